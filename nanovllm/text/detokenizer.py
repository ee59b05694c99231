"""The text of one output while its tokens come, and the stop string that ends it."""

from collections.abc import Mapping, Sequence

from nanovllm.outputs import Logprob, TokenLogprob
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.stop_strings import StopsAcrossHidden, StopStrings
from nanovllm.text.token_texts import TextStream, TokenCursor, Tokenizer, TokenTexts


class Detokenizer:
    """The text of one choice, and the stop string that ends it.

    A stop string ends the output where the string appears in the text, with or without the special tokens that
    `skip_special_tokens` hides: `stop=["<|im_end|>"]` stops there, as `stop_strings` of `transformers` does.

    stop_reason: the stop string that was met. From then on `text` is final, and further tokens are ignored.
    tokenizer: or its `TokenTexts`, which many requests may share.
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
        self._num_exempt = 0  # waiting characters that came too early, by `min_tokens`, to end a stop string
        self._unread: list[int] = []  # not decoded before somebody asks, unless there are stop strings to look for
        self._shown: list[str] = []
        self._held = ""  # the end of the text, which may become a stop string
        self._cursor = None if params.logprobs is None else TokenCursor(texts, prompt_token_ids, self._skip_special_tokens)
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

    def append(self, token_id: int) -> str | None:
        """Take in the next token; returns the stop string that has been met. One counts only where it ends behind the
        first `min_tokens` tokens."""
        if self._stops is None:
            self._unread.append(token_id)
        elif self.stop_reason is None:
            self._num_tokens += 1
            if self._skip_special_tokens and self._texts.token(token_id).is_special:
                if self._across is None:
                    self._across = StopsAcrossHidden(self._stops.stops, self.text + self._held)
                self._show("", self._stops, hidden=self._texts.after(None, token_id).decode(errors="replace"))
            else:
                self._show(self._stream.feed([token_id]), self._stops)
                if self._stream.pending and self.stop_reason is None:
                    self._stop_in_pending(self._stops)
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
            self._show(self._stream.flush(), self._stops)
            self._shown.append(self._held)
            self._held = ""

    def logprobs(self, chosen: int, found: Mapping[int, tuple[float, int]]) -> dict[int, Logprob]:
        """Take in the log-probability and rank of the next position's tokens, with what each would add to the text.
        `chosen` is the token that became part of the output. Called only where the parameters ask for logprobs."""
        assert self._cursor is not None
        offset, entry = self._cursor.offset, dict[int, Logprob]()
        for token_id, (value, rank) in found.items():
            text, raw = self._cursor.look(token_id)
            entry[token_id] = TokenLogprob(value, rank, text, raw, offset)
        if self._cursor.go(chosen):
            self._last = entry[chosen]
        return entry

    def _show(self, new: str, stops: StopStrings, hidden: str = "") -> None:
        """Go on by text that is shown, or by text that is hidden, up to the end of a stop string."""
        may_stop = self._num_tokens > self._min_tokens
        early, self._num_exempt = new[: self._num_exempt], 0
        if early:
            stops.feed(early, may_stop=False)
        found = stops.feed(new[len(early) :], may_stop)
        text = self._held + new
        end, reason, begin = len(text) - stops.held, None, 0
        if found is not None:
            position, reason = found
            end = len(self._held) + len(early) + position
            begin = end - len(reason)
        if self._across is not None:
            across = self._across.feed(hidden or new, bool(hidden), may_stop)
            before = self._across.num_shown - len(text)  # characters that are out
            if across is not None and (reason is None or across[1] - before <= end):
                reason, begin, end = across[2], across[0] - before, across[1] - before
            elif reason is None:
                end = min(end, self._across.settled - before)
        if reason is not None:
            self.stop_reason = reason
            self._shown.append(text[: end if self._keep_stop else begin])
            self._held = ""
        else:
            self._shown.append(text[:end])
            self._held = text[end:]

    def _stop_in_pending(self, stops: StopStrings) -> None:
        """A run of byte tokens is text at its end only, but a stop string that is complete in the run ends the output."""
        text = self._held + self._stream.pending
        found = [stop for stop in stops.stops if text.endswith(stop)]
        if self._num_tokens <= self._min_tokens:
            self._num_exempt = len(self._stream.pending)
        elif found and len(self._stream.pending) > self._num_exempt:
            self.stop_reason = found[0]
            self._shown.append(text if self._keep_stop else text.removesuffix(found[0]))
            self._held = ""
