"""From token ids to text while they come, without ever taking a character back.

A token is not a piece of text: an emoji may be spread over four tokens, and some tokenizers write the space before a
word only if something stands before it. Decoding everything anew for each token would be right, and quadratic.

The scheduler asks after each token whether the text has met a stop string, and ends the sequence there
(`Scheduler._append`).
"""

from collections.abc import Sequence
from typing import Protocol

from nanovllm.sampling_params import SamplingParams
from nanovllm.text.stop_strings import StopStrings

INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are not, or not yet, a character
PROMPT_CONTEXT = 4  # tokens
LONGEST_WAIT = 8  # tokens; twice the bytes that the longest character has


class Tokenizer(Protocol):
    """A `tokenizers.Tokenizer`, or one of `transformers` (its `backend_tokenizer` is the same and ten times faster)."""

    def decode(self, ids: Sequence[int], /, skip_special_tokens: bool = True) -> str: ...


class TextStream:
    """Token ids in, text out. The pieces joined are the text of all ids, and the work for each token is bounded.

    Only a window of tokens is decoded: the *context*, whose text is out and which is there for what follows it, and
    the *pending* ones. Where the window ends in a complete character, the pending tokens become the context.

    Exact for byte-level tokenizers (Qwen, Llama 3, SmolLM2) whatever the ids, and for others as long as their bytes are
    characters in the end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._set_context(list(prompt_token_ids[-PROMPT_CONTEXT:]))
        if self._context_text.endswith(INCOMPLETE):
            self._set_context([])  # a character begun in the prompt would swallow the first bytes of the output
        self._pending: list[int] = []
        self._num_out = 0  # characters of the pending tokens that are out

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        self._pending += token_ids
        text = self._pending_text()
        new = text.rstrip(INCOMPLETE)[self._num_out :]
        self._num_out += len(new)
        if text.endswith(INCOMPLETE):
            return new + (self._settle_most(text) if len(self._pending) > LONGEST_WAIT else "")
        if text:
            self._set_context(self._pending)
        elif not self._context_text:  # nothing but skipped tokens so far, or a space that shows before a word only
            self._set_context((self._context + self._pending)[-LONGEST_WAIT:])
        self._pending, self._num_out = [], 0
        return new

    def flush(self) -> str:
        """No more tokens will come: what is incomplete stays so."""
        new = self._pending_text()[self._num_out :]
        self._num_out += len(new)
        return new

    def _settle_most(self, text: str) -> str:
        """Take most of the pending tokens for what they are: bytes that will not become characters. Otherwise a model
        that writes such bytes for ever would have all of them decoded again each time.

        Only the last character may still change, and it has at most four bytes, each in a token of its own at worst. A
        cut inside a character shows: its halves decode to more characters than the whole.
        """
        for cut in range(len(self._pending) - 1, 0, -1):
            if not self._decode(self._pending[cut : cut + 1]):
                del self._pending[cut]  # a skipped token
                continue
            before, after = self._pending_text(cut), self._decode(self._pending[cut:])
            if before + after == text:
                new = before[self._num_out :]
                self._num_out = max(self._num_out - len(before), 0)
                self._set_context(self._pending[:cut])
                self._pending = self._pending[cut:]
                return new
        return ""

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _pending_text(self, end: int | None = None) -> str:
        return self._decode(self._context + self._pending[:end])[len(self._context_text) :]

    def _set_context(self, token_ids: list[int]) -> None:
        self._context = token_ids
        self._context_text = self._decode(token_ids) if token_ids else ""


class Detokenizer:
    """The text of one choice, and the stop string that ends it.

    stop_reason: the stop string that was met. From then on `text` is final, and further tokens are ignored.
    prompt_token_ids: what stands before the output, for tokenizers that write a space only after something.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.stop_reason: str | None = None
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._stops = StopStrings(tuple(params.stop)) if params.stop else None
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._unread: list[int] = []  # not decoded before somebody asks, unless there are stop strings to look for
        self._shown: list[str] = []
        self._held = ""  # the end of the text, which may become a stop string

    @property
    def text(self) -> str:
        """What may be shown: without an end that is an incomplete character or may become a stop string."""
        if self._unread:
            self._shown.append(self._stream.feed(self._unread))
            self._unread = []
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def append(self, token_id: int) -> str | None:
        """Take in the next token; returns the stop string that has been met, None for none. A stop string counts only
        where it ends behind the first `min_tokens` tokens."""
        if self._stops is None:
            self._unread.append(token_id)
        else:
            self._num_tokens += 1
            self._show(self._stream.feed([token_id]), self._stops)
        return self.stop_reason

    def finish(self) -> None:
        """No more tokens will come: release what was held back."""
        if self.stop_reason is not None:
            return
        if self._stops is None:
            self._shown = [self.text, self._stream.flush()]
        else:
            self._show(self._stream.flush(), self._stops)
            self._shown.append(self._held)
            self._held = ""

    def token_text(self, token_id: int) -> str:
        """One token by itself, a special one too. Bytes that are only part of a character are U+FFFD."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _show(self, new: str, stops: StopStrings) -> None:
        if self.stop_reason is not None:
            return
        found = stops.feed(new, may_stop=self._num_tokens > self._min_tokens)
        text = self._held + new
        if found is None:
            end = len(text) - stops.held
            self._held = text[end:]
        else:
            position, self.stop_reason = found
            end = len(self._held) + position - (0 if self._keep_stop else len(self.stop_reason))
            self._held = ""
        self._shown.append(text[:end])
