"""Solution of exercise 6a. What the formula leaves out: a row of padding is hardly read from memory, and costs little.

A recording costs what it costs, at every start. So real engines take a ladder, and few of them ever fit it.
"""

import bisect
import functools
import itertools
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from stages.core import Event


def batch_sizes(events: SequenceOf[Event]) -> Counter[int]:
    # exercise 6a: how often a replayed step has how many sequences
    scheduled: dict[int, dict[int, int]] = {}  # step -> request -> tokens
    got: dict[int, set[int]] = {}  # step -> requests that got a token
    for event in events:
        if event["type"] == "scheduled":
            scheduled.setdefault(event["step"], {})[event["request"]] = event["tokens"]
        elif event["type"] == "token":
            got.setdefault(event["step"], set()).add(event["request"])
    return Counter(
        len(work)
        for step, work in scheduled.items()
        if set(work.values()) == {1} and work.keys() == got.get(step, set())
    )
    # end exercise


def padded_rows(counts: Mapping[int, int], buckets: SequenceOf[int]) -> int:
    # exercise 6a: rows that nobody wants
    return sum(steps * (buckets[bisect.bisect_left(buckets, size)] - size) for size, steps in counts.items())
    # end exercise


def best_buckets(counts: Mapping[int, int], num_buckets: int, largest: int) -> list[int]:
    # exercise 6a: the sizes with the fewest rows of padding
    # A bucket that no batch fills can be made smaller without harm, so only sizes that come are worth a thought
    sizes = sorted({size for size, steps in counts.items() if steps} | {largest})
    steps = [0, *itertools.accumulate(counts.get(size, 0) for size in sizes)]
    rows = [0, *itertools.accumulate(counts.get(size, 0) * size for size in sizes)]

    def between(below: int, bucket: int) -> int:
        """Padding of the batches above `below` in this bucket, both given as indices; -1 is below all."""
        return sizes[bucket] * (steps[bucket + 1] - steps[below + 1]) - (rows[bucket + 1] - rows[below + 1])

    @functools.cache
    def best(last: int, left: int) -> tuple[int, tuple[int, ...]]:
        """The least padding up to sizes[last], which is recorded, with `left` recordings below it."""
        options: list[tuple[int, tuple[int, ...]]] = [(between(-1, last), (sizes[last],))]
        for below in range(last if left else 0):
            padding, chosen = best(below, left - 1)
            options.append((padding + between(below, last), (*chosen, sizes[last])))
        return min(options)

    return list(best(len(sizes) - 1, num_buckets - 1)[1])
    # end exercise
