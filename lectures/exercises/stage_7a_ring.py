"""Exercise 7a: Sum over all ranks, while each of them talks to its neighbours only.

The ranks stand in a ring: each can send to the next one, and receive from the one before. `ring_all_reduce` below is
right, up to rounding: everybody's x travels once around, and everybody adds up what passes. Two things are wrong
with it.

1. Each rank sends R - 1 times the whole of x. With more ranks it sends more.
2. Ranks add in different orders, so their sums differ in the last bits, and each goes on with a hidden state of its
   own. That does little harm until ranks decide something by themselves, which token is best or which expert a token
   goes to. Then all must have the same sum, to the last bit.

Write the ring that libraries use (Patarasuk & Yuan, 2009). Cut x into R chunks. In R - 1 rounds each rank sends a chunk
on, and adds what it receives to its own chunk of that number; choose them so that at the end each rank has one chunk
that is complete. In R - 1 more rounds the complete chunks travel on, until everybody has all of them. No number is sent
twice in either half, so x may have any shape, and a size that R does not divide.

Then `numbers_sent(n, ranks)`: how many numbers each rank sends for an x of n of them, where `ranks` divides n. Before
you write it, guess: how many times as many for 64 ranks as for 2?

Check: .venv/bin/python -m tools.lectures.lecture_exercises 7a
"""

from typing import Protocol

from torch import Tensor


class Ring(Protocol):
    """A rank's place in the ring. Sending never waits; receiving waits until the rank before has sent."""

    rank: int
    size: int

    def send(self, x: Tensor) -> None: ...

    def receive(self) -> Tensor: ...


def ring_all_reduce(x: Tensor, ring: Ring) -> Tensor:
    """The sum of all ranks' x: the same shape, and on every rank the same bits. x itself stays as it is."""
    total, passing = x, x
    for _ in range(ring.size - 1):
        ring.send(passing)
        passing = ring.receive()
        total = total + passing
    return total  # yours to mend


def numbers_sent(n: int, ranks: int) -> int:
    raise NotImplementedError("exercise 7a: how many numbers each rank sends")
