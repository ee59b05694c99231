"""What a caller gets back, with vLLM's names."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    """A token's log-probability at one position, its rank there (1 is the likeliest), and its text by itself."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request.

    token_ids include the EOS or stop token that ended them. finish_reason is "error" for a choice whose logits were not
    finite. stop_reason is the stop string or the stop token id that was met, None for EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


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
    """All choices of a request, so far or for good."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(repr=False)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt whose KV came from the prefix cache."""
        return self.metrics.num_cached_tokens
