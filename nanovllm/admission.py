"""What may join the queue, for whoever keeps one: `AsyncLLM`, and the server's engine process."""

from dataclasses import dataclass

from nanovllm.engine.grammars import Matcher
from nanovllm.sampling_params import SamplingParams


class QueueFull(RuntimeError):
    """As many sequences wait as `max_queue` allows."""


class NeverFits(QueueFull):
    """So many sequences at once that even an empty queue could not take them."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A request that can run: what `AsyncLLM.check` returns, and `submit` takes."""

    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None
    prompt: str | None = None  # the text, where there is one; for the output only
    matcher: Matcher | None = None  # of structured outputs: see `LLMEngine.compile`; None in an API process


def check_queue(num_new: int, num_waiting: int, num_free_seats: int, max_num_seqs: int, max_queue: int | None) -> None:
    """Raises QueueFull if more than `max_queue` sequences would wait once the free seats were taken."""
    if max_queue is None:
        return
    if num_new > max_queue + max_num_seqs:
        raise NeverFits(
            f"these are {num_new} sequences (prompts x n), more than max_queue={max_queue} and "
            f"max_num_seqs={max_num_seqs} can ever hold together; send fewer at once"
        )
    if num_waiting + num_new - num_free_seats > max_queue:
        raise QueueFull(f"max_queue={max_queue} sequences are waiting already; try again later")
