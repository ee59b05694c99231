"""Exercise 5b: Choose the token budget from a promise about latency.

A large `max_num_batched_tokens` is good for throughput, but a request that is decoding waits while somebody's long
prompt goes through in the same step. A small one cuts the prompt into chunks, and every step is short. Which budget is
right? The largest that keeps your promise.

Time depends on the machine, tokens do not. So measure the wait in tokens of work:

    longest_waits(events) -> dict[int, int]
        for each request that got at least two tokens: the most tokens (of all requests together) that went through the
        model from just after one of its tokens up to and including the step that gave it the next one

    largest_budget(run, limit, budgets) -> int | None
        the largest of `budgets` with which nobody waits for more than `limit` tokens; None if there is none.
        `run(budget)` runs the workload with that budget and returns the events.

An event has "type", "step" and "request"; "scheduled" has "tokens" (how many of the request go through in this step),
and "token" says that the request got one. A preempted request waits, too.

Check: .venv/bin/python -m tools.lectures.lecture_exercises 5b
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from stages.core import Event


def longest_waits(events: SequenceOf[Event]) -> dict[int, int]:
    raise NotImplementedError("exercise 5b: the longest wait between two tokens, in tokens of work")


def largest_budget(run: Callable[[int], list[Event]], limit: int, budgets: Iterable[int]) -> int | None:
    raise NotImplementedError("exercise 5b: the largest budget that keeps the promise")
