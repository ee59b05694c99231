"""Exercise 6a: Choose the batch sizes to record from the batches that really come.

The ladder 1, 2, 4, 8, 16, 24 ... is right for a service of which nothing is known. Every size on it is a recording,
which takes memory, and time at start-up. Every batch between two sizes computes rows that nobody wants. If you know
which batches come, you can do better with fewer recordings.

    batch_sizes(events) -> Counter[int]
        how many sequences the steps have that stage 6 replays: {3: 10} says that ten steps had three each. Every
        sequence of such a step has one token to compute, and gets the next one. A prompt's chunk of one token does not
        count, and neither does a step with such a chunk in it.

    padded_rows(counts, buckets) -> int
        rows of padding that all these steps compute together, if these are the sizes that were recorded

    best_buckets(counts, num_buckets, largest) -> list[int]
        at most `num_buckets` sizes in ascending order, with the fewest rows of padding. The last is `largest`, since a
        full engine must find a recording, too. With 256 sequences and 20 recordings you cannot try all choices.

An event has "type", "step" and "request"; "scheduled" has "tokens" (how many of the request go through in this step),
and "token" says that the request got one.

Guess first: eleven seats, for which the ladder has five recordings: 1, 2, 4, 8 and 11. With five that fit, how many of
the padded rows are left on the workload of the check? (It prints both.) Then ask what the formula leaves out: what does
a row of padding cost on a GPU, if a decode step mostly reads weights?

Check: .venv/bin/python -m tools.lectures.lecture_exercises 6a
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from stages.core import Event


def batch_sizes(events: SequenceOf[Event]) -> Counter[int]:
    raise NotImplementedError("exercise 6a: how often a replayed step has how many sequences")


def padded_rows(counts: Mapping[int, int], buckets: SequenceOf[int]) -> int:
    raise NotImplementedError("exercise 6a: rows that nobody wants")


def best_buckets(counts: Mapping[int, int], num_buckets: int, largest: int) -> list[int]:
    raise NotImplementedError("exercise 6a: the sizes with the fewest rows of padding")
