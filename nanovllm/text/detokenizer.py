"""The text of one output while its tokens arrive, and the stop string that ends it."""

from collections.abc import Mapping, Sequence

from nanovllm.outputs import Logprob, TokenLogprob
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.stop_strings import StopsAcrossHidden, StopStrings
from nanovllm.text.token_texts import TextStream, TokenCursor, Tokenizer, TokenTexts


class Detokenizer:
    """The text of one choice, and the stop string that ends it.

    A stop string ends the output where the string appears in the text, with or without the special tokens that
    `skip_special_tokens` hides: `stop=["<|im_end|>"]` stops there, as `stop_strings` of `transformers` does. Unlike
    there, a part of a hidden token ("<|im") is never met.

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
        self._across: StopsAcrossHidden | None = None  # once a special token is hidden
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._unread: list[int] = []  # not decoded before somebody asks, unless there are stop strings to look for
        self._shown: list[str] = []
        self._taken = ""  # the end of what was taken, as long as a stop string may reach back
        self._held = ""  # the end of the text, which waits in the stream or may become a stop string
        self._pending = ""  # the part of it that waits in the stream
        self._cursor = (
            None if params.logprobs is None else TokenCursor(texts, prompt_token_ids, self._skip_special_tokens)
        )
        self._last: Logprob | None = None  # of the newest token that is part of the text

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
        if self._stops is not None:
            self._taken = (self._taken + text)[-len(self._stops.stops[0]) :]
        return text

    def append(self, token_id: int) -> str | None:
        """Take in the next token; returns the stop string that has been met. A stop string counts only if it ends
        after the first `min_tokens` tokens."""
        if self._stops is None:
            self._unread.append(token_id)
        elif self.stop_reason is None:
            self._num_tokens += 1
            if self._skip_special_tokens and self._texts.tokens[token_id].is_special:
                if self._across is None:
                    self._across = StopsAcrossHidden(self._stops.stops, self._taken + self.text + self._held)
                self._go_on("", self._stops, hidden=self._texts.after(None, token_id).decode(errors="replace"))
            else:
                self._read(self._stream.feed([token_id]), self._stops)
        return self.stop_reason

    def finish(self) -> None:
        """No more tokens will come: release what was held back."""
        if self.stop_reason is not None:
            return
        if self._cursor is not None and self._last is not None:
            self._last.decoded_token = (self._last.decoded_token or "") + self._cursor.rest()
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
        if self._cursor.go(chosen):
            self._last = entry[chosen]
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
        new = certain + self._pending
        if new.startswith(before):
            self._go_on(new[len(before) :], stops)
        else:  # what waited is no text after all
            self._held = self._held.removesuffix(before)
            self._across = None
            stops.begin_with(self._held)
            self._go_on(new, stops)

    def _go_on(self, new: str, stops: StopStrings, hidden: str = "") -> None:
        """Continue with shown or with hidden text, up to the end of a stop string."""
        if self.stop_reason is not None:
            return
        may_stop = self._num_tokens > self._min_tokens
        text = self._held + new
        found = stops.feed(new, may_stop)
        reason, begin, end = None, 0, len(text) - max(stops.held, len(self._pending))
        if found is not None:
            position, reason = found
            end = len(self._held) + position
            begin = end - len(reason)
        if self._across is not None:
            before = self._across.num_shown - len(self._held)  # characters that are out
            across = self._across.feed(hidden or new, bool(hidden), may_stop)
            if across is not None and (reason is None or across[1] - before <= end):
                begin, end, reason = across[0] - before, across[1] - before, across[2]
            elif reason is None:
                end = min(end, self._across.settled - before)
        if reason is not None:
            self.stop_reason = reason
            self._shown.append(text[: end if self._keep_stop else begin])
            self._held = ""
        else:
            self._shown.append(text[:end])
            self._held = text[end:]


def with_text(cursor: TokenCursor, found: Mapping[int, tuple[float, int]]) -> dict[int, Logprob]:
    """Log-probabilities and ranks of tokens that may come next, with what each would add to the text."""
    entry: dict[int, Logprob] = {}
    for token_id, (value, rank) in found.items():
        text, raw = cursor.look(token_id)
        entry[token_id] = TokenLogprob(value, rank, text, raw, cursor.offset)
    return entry
