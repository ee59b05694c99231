"""A request as the caller sees it: n choices, their texts and log-probabilities, and the output made of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from nanovllm.engine.plan import TokenLogprobs
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SpeculationStats
from nanovllm.sampling_params import SamplingParams


class Detokenizer(Protocol):
    """The text of one choice, built while its tokens come, and its stop strings."""

    stop_reason: str | None  # the stop string that was met; from then on `text` is final

    @property
    def text(self) -> str:
        """What may be shown: an end that could become a stop string or an unfinished character is held back."""
        ...

    def append(self, token_ids: list[int]) -> None:
        """Take in new tokens. A stop string counts only where it ends behind the first `min_tokens` of them."""
        ...

    def finish(self) -> None:
        """No more tokens will come: release what was held back."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token by itself."""
        ...


MakeDetokenizer = Callable[[list[int], SamplingParams], Detokenizer]  # of the prompt's token ids and the parameters


@dataclass(slots=True, eq=False)
class Choice:
    seq: Sequence
    detokenizer: Detokenizer | None
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None

    def take(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> int:
        """Take in new tokens, and say how many; those behind the one that completes a stop string are surplus."""
        if self.detokenizer is not None:
            # A token that ended the output stays in its ids, but is not text, unless that is asked for.
            hidden = self.seq.finish_reason == "stop" and not self.seq.params.include_stop_str_in_output
            shown = token_ids[:-1] if hidden else token_ids
            for count, token in enumerate(shown, start=1):
                self.detokenizer.append([token])
                if self.detokenizer.stop_reason is not None and count < len(token_ids):
                    del self.seq.token_ids[count - len(token_ids) :]
                    token_ids, logprobs = token_ids[:count], logprobs and logprobs[:count]
                    break
        if self.logprobs is not None and self.cumulative_logprob is not None and logprobs is not None:
            text = self.detokenizer.token_text if self.detokenizer is not None else lambda id: None
            for token, found in zip(token_ids, logprobs, strict=True):
                self.logprobs.append({id: Logprob(value, rank, text(id)) for id, (value, rank) in found.items()})
                self.cumulative_logprob += found[token][0]
        return len(token_ids)

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.seq.choice,
            text="" if self.detokenizer is None else self.detokenizer.text,
            token_ids=self.seq.token_ids[self.seq.num_prompt_tokens :],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.seq.finish_reason,
            stop_reason=self.seq.stop_reason,
        )


@dataclass(slots=True, eq=False)
class Request:
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    choices: list[Choice] = field(default_factory=list)
    held: list[Sequence] = field(default_factory=list)  # choices that wait for the first one to compute the prompt
    first_token_time: float | None = None

    @property
    def finished(self) -> bool:
        return all(choice.seq.finish_reason is not None for choice in self.choices)

    def output(self, now: float) -> RequestOutput:
        first = self.choices[0].seq
        metrics = RequestMetrics(
            arrival_time=self.arrival_time,
            first_scheduled_time=first.first_scheduled_time,
            first_token_time=self.first_token_time,
            finished_time=now if self.finished else None,
            num_cached_tokens=first.num_cached_tokens,
            num_preemptions=sum(choice.seq.num_preemptions for choice in self.choices),
            speculation=SpeculationStats.total(choice.seq.speculation for choice in self.choices),
        )
        outputs = [choice.output() for choice in self.choices]
        return RequestOutput(self.request_id, None, self.prompt_token_ids, outputs, self.finished, metrics)
