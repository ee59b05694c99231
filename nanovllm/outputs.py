"""What a caller gets back, with vLLM's names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    """A token's log-probability at one position, its rank there (1 is the likeliest), and what it adds to the text.

    A token that ends within a character adds nothing; the token that completes the character adds all of it. Where the
    text ends within a character, it has a U+FFFD there that no token adds. A special token that the text leaves out has
    its name here. None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class TokenLogprob(Logprob):
    """With what vLLM's class does not have: the token's bytes as numbers, whether or not they are characters, and the
    number of characters of the output's text before it."""

    raw: tuple[int, ...] = ()
    text_offset: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request.

    token_ids:      with the EOS or stop token that ended them.
    logprobs:       a list by position, of dicts by token id. It is made when it is first read.
    finish_reason:  None while it goes on; "error" where the logits were not finite, no token was allowed, or a grammar
                    could not go on.
    stop_reason:    the stop string or the stop token id that was met; None for EOS; what was wrong with a grammar.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


_logprobs: Any = vars(CompletionOutput)["logprobs"]


def _read_logprobs(output: CompletionOutput) -> list[dict[int, Logprob]] | None:
    """An engine's own sequence becomes a list here, so that `asdict`, `json` and `pickle` can handle it."""
    found = _logprobs.__get__(output)
    if found is not None and type(found) is not list:
        found = list(found)
        _logprobs.__set__(output, found)
    return found


def logprobs_from(output: CompletionOutput, start: int) -> Sequence[dict[int, Logprob]] | None:
    """`output.logprobs[start:]`, in a time that does not grow with what is before `start`."""
    found: Sequence[dict[int, Logprob]] | None = _logprobs.__get__(output)
    return None if found is None else found[start:]


CompletionOutput.logprobs = property(_read_logprobs, _logprobs.__set__)  # type: ignore[assignment, misc]


@dataclass(slots=True)
class SpeculationStats:
    """What became of tokens that were guessed ahead. Of the lists, entry i is about the (i + 1)-th guess of a step."""

    num_steps: int = 0  # that verified at least one guess
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # together with all guesses before it
    num_tokens: int = 0  # that these steps brought: accepted guesses, and the target's own where the sequence went on

    def count(self, num_proposed: int, num_accepted: int, num_tokens: int) -> None:
        """Take in one step of one sequence."""
        self.num_steps += 1
        self.num_tokens += num_tokens
        for counts, number in (self.proposed, num_proposed), (self.accepted, num_accepted):
            counts += [0] * (num_proposed - len(counts))
            for i in range(number):
                counts[i] += 1

    @classmethod
    def total(cls, parts: Iterable["SpeculationStats"]) -> "SpeculationStats | None":
        """The sum; None if nothing was guessed."""
        parts = [part for part in parts if part.num_steps]
        if not parts:
            return None
        proposed = [sum(counts) for counts in zip_longest(*(p.proposed for p in parts), fillvalue=0)]
        accepted = [sum(counts) for counts in zip_longest(*(p.accepted for p in parts), fillvalue=0)]
        return cls(sum(p.num_steps for p in parts), proposed, accepted, sum(p.num_tokens for p in parts))

    @property
    def acceptance_by_position(self) -> list[float]:
        return [a / p for a, p in zip(self.accepted, self.proposed, strict=True)]

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a verifying step brought on average: the accepted guesses, and the target's own one."""
        return self.num_tokens / self.num_steps if self.num_steps else 1.0


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.perf_counter()`, and what it cost.

    Times are of whichever choice was first (`finished_time`: last).
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0  # tokens that the prefix cache saved the first choice at its first admission
    num_preemptions: int = 0  # of all choices
    speculation: SpeculationStats | None = None  # of all choices; None where nothing was guessed

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first admission."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """All choices of a request, so far or for good.

    prompt_logprobs: for each token of the prompt its log-probability and that of the likeliest tokens, as
                     `CompletionOutput.logprobs` has them; None for the first token, before which nothing stands. None
                     as a whole where it is not asked for, or while the prompt is not computed to its end.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(repr=False)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt whose KV came from the prefix cache."""
        return self.metrics.num_cached_tokens
