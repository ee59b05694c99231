"""The text of one output while its tokens arrive, and the stop string that ends it."""

from collections.abc import Mapping, Sequence

from nanovllm.outputs import Logprob, TokenLogprob
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.stop_strings import StopStrings
from nanovllm.text.token_texts import TextStream, TokenCursor, Tokenizer, TokenTexts


class Detokenizer:
    """The text of one choice, and the stop string that ends it.

    A stop string ends the output where the string appears in the text together with the special tokens that
    `skip_special_tokens` hides, as `stop_strings` of `transformers` does: `stop=["<|im_end|>"]` stops at that token,
    and so does a part of its text, such as "<|im". Unlike there, the string also ends the output where it appears in
    the shown text with something hidden in the middle, and it never begins in the prompt.

    stop_reason: the stop string that was met. From then on `text` is final, and further tokens are ignored.
    tokenizer: a tokenizer, or its `TokenTexts`, which many requests may share.
    prompt_token_ids: what stands before the output, for tokenizers that write a space only after something.
    """

    def __init__(
        self, tokenizer: Tokenizer | TokenTexts, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self.stop_reason: str | None = None
        self._texts = texts = tokenizer if isinstance(tokenizer, TokenTexts) else TokenTexts(tokenizer)
        self._skip_special_tokens = params.skip_special_tokens
        self._stream = TextStream(texts, prompt_token_ids, params.skip_special_tokens)
        self._stops = StopStrings(tuple(params.stop)) if params.stop else None
        self._before_run: StopStrings | None = None  # as they were before what waits in the stream
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._unread: list[int] = []  # not decoded before somebody asks, unless there are stop strings to look for
        self._shown: list[str] = []
        self._held = ""  # the end of the text, which waits in the stream or may become a stop string
        self._pending = ""  # the part of it that waits in the stream
        self._cursor = (
            None if params.logprobs is None else TokenCursor(texts, prompt_token_ids, self._skip_special_tokens)
        )

    @property
    def text(self) -> str:
        """What may be shown: without an end that is an incomplete character or may become a stop string."""
        if self._unread:
            self._shown.append(self._stream.feed(self._unread))
            self._unread = []
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def take(self) -> str:
        """The part of `text` that was not taken before. From then on `text` is without it."""
        text = self.text
        self._shown = []
        return text

    def append(self, token_id: int) -> str | None:
        """Take in the next token; returns the stop string that has been met. A stop string counts only if it ends
        after the first `min_tokens` tokens."""
        if self._stops is None:
            self._unread.append(token_id)
        elif self.stop_reason is None:
            self._num_tokens += 1
            if self._skip_special_tokens and self._texts.tokens[token_id].is_special:
                hidden = self._texts.after(self._stream.previous, token_id).decode(errors="replace")
                self._go_on("", self._stops, hidden)
            else:
                self._read(self._stream.feed([token_id]), self._stops)
        return self.stop_reason

    def finish(self) -> None:
        """No more tokens will come: release what was held back."""
        if self.stop_reason is not None:
            return
        if self._stops is None:
            self._shown = [self.text, self._stream.flush()]
        else:
            self._read(self._stream.flush(), self._stops)
            self._shown.append(self._held)
            self._held = ""

    def logprobs(self, chosen: int, found: Mapping[int, tuple[float, int]]) -> dict[int, Logprob]:
        """Take in the log-probability and rank of the next position's tokens, with what each would add to the text.
        `chosen` is the token that became part of the output. Called only where the parameters ask for logprobs."""
        assert self._cursor is not None
        entry = with_text(self._cursor, found)
        self._cursor.go(chosen)
        return entry

    def prompt_logprobs(
        self, token_ids: Sequence[int], found: Sequence[Mapping[int, tuple[float, int]]]
    ) -> list[dict[int, Logprob]]:
        """The same for the tokens of the prompt after the first. Text offsets are those of the prompt's text."""
        cursor = TokenCursor(self._texts, [], self._skip_special_tokens)
        entries = []
        for token_id, entry in zip(token_ids, found, strict=False):
            cursor.go(token_id)
            entries.append(with_text(cursor, entry))
        return entries

    def _read(self, certain: str, stops: StopStrings) -> None:
        """Continue with what the stream has given. Stop strings are looked for in what waits in the stream as well."""
        before, self._pending = self._pending, self._stream.pending  # empty, but for byte fallback
        new = certain or self._pending  # never both
        if self._before_run is not None and not new.startswith(before):  # what waited is no text after all
            self._held = self._held.removesuffix(before)
            self._stops = stops = self._before_run
            before = ""
        elif self._pending and not before:
            self._before_run = stops.copy()
        self._go_on(new[len(before) :], stops)

    def _go_on(self, new: str, stops: StopStrings, hidden: str = "") -> None:
        """Continue with shown or with hidden text, up to the end of a stop string."""
        if self.stop_reason is not None:
            return
        text, start = self._held + new, stops.num_shown - len(self._held)
        found = stops.feed(hidden or new, self._num_tokens > self._min_tokens, bool(hidden))
        if found is not None:
            begin, end, self.stop_reason = found
            self._shown.append(text[: (end if self._keep_stop else begin) - start])
            self._held = ""
        else:
            end = min(stops.settled - start, len(text) - len(self._pending))
            self._shown.append(text[:end])
            self._held = text[end:]


def with_text(cursor: TokenCursor, found: Mapping[int, tuple[float, int]]) -> dict[int, Logprob]:
    """Log-probabilities and ranks of tokens that may come next, with what each would add to the text."""
    entry: dict[int, Logprob] = {}
    for token_id, (value, rank) in found.items():
        text, raw = cursor.look(token_id)
        entry[token_id] = TokenLogprob(value, rank, text, tuple(raw), cursor.offset)
    return entry
