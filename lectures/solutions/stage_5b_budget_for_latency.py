"""Solution of exercise 5b: a running sum of the work, looked at whenever a request gets a token."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from stages.core import Event


def longest_waits(events: SequenceOf[Event]) -> dict[int, int]:
    # exercise 5b: the longest wait between two tokens, in tokens of work
    done = 0  # tokens that have gone through the model so far; a step's are told before its results
    at_last_token: dict[int, int] = {}
    waits: dict[int, int] = {}
    for event in events:
        request = event["request"]
        if event["type"] == "scheduled":
            done += event["tokens"]
        elif event["type"] == "token":
            if request in at_last_token:
                waits[request] = max(waits.get(request, 0), done - at_last_token[request])
            at_last_token[request] = done
    return waits
    # end exercise


def largest_budget(run: Callable[[int], list[Event]], limit: int, budgets: Iterable[int]) -> int | None:
    # exercise 5b: the largest budget that keeps the promise
    for budget in sorted(budgets, reverse=True):
        if max(longest_waits(run(budget)).values(), default=0) <= limit:
            return budget
    return None
    # end exercise
