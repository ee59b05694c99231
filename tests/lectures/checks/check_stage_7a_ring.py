"""Exercise 7a: the sum, on every rank the same bits, and how much each rank sends. The ranks are threads."""

from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import ModuleType

import pytest
import torch
from torch import Tensor

PATIENCE = 2.0  # seconds that a rank waits for the one before it


class Place:
    """A rank's place in the ring, which counts what it sends."""

    def __init__(self, rank: int, mailboxes: "list[Queue[Tensor]]") -> None:
        self.rank, self.size, self.mailboxes = rank, len(mailboxes), mailboxes
        self.sent = 0

    def send(self, x: Tensor) -> None:
        self.sent += x.numel()
        self.mailboxes[(self.rank + 1) % self.size].put(x.clone())

    def receive(self) -> Tensor:
        return self.mailboxes[self.rank].get(timeout=PATIENCE)


def all_reduce(answers: ModuleType, parts: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """What each rank gets for its part, and how many numbers it sends for it."""
    mailboxes: list[Queue[Tensor]] = [Queue() for _ in parts]
    places = [Place(rank, mailboxes) for rank in range(len(parts))]
    with ThreadPoolExecutor(len(parts)) as pool:
        sums = list(pool.map(answers.ring_all_reduce, parts, places))
    assert all(mailbox.empty() for mailbox in mailboxes), "somebody sent what nobody took"
    return sums, [place.sent for place in places]


def random_parts(ranks: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(ranks)
    return [torch.randn(shape, generator=generator) for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(), (3,), (4, 8), (2, 3, 5)])
def test_everybody_has_the_sum(answers: ModuleType, ranks: int, shape: tuple[int, ...]) -> None:
    parts = random_parts(ranks, *shape)
    before = [part.clone() for part in parts]
    sums, _ = all_reduce(answers, parts)
    for total in sums:
        torch.testing.assert_close(total, torch.stack(before).sum(0))
    assert all(map(torch.equal, parts, before)), "x itself must stay as it is"


@pytest.mark.parametrize("ranks", [3, 4, 5])
def test_to_the_last_bit(answers: ModuleType, ranks: int) -> None:
    sums, _ = all_reduce(answers, random_parts(ranks, 4096))
    differing = max(int((total != sums[0]).sum()) for total in sums)
    assert differing == 0, f"{differing} of 4096 numbers differ between two ranks"


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_nobody_sends_much(answers: ModuleType, ranks: int) -> None:
    for n in (1, ranks, 101):
        _, sent = all_reduce(answers, random_parts(ranks, n))
        assert max(sent) <= 2 * (ranks - 1) * -(-n // ranks), f"x has {n} numbers, and the ranks sent {sent}"
    _, sent = all_reduce(answers, random_parts(ranks, 120))
    assert sent == [answers.numbers_sent(120, ranks)] * ranks


def test_hardly_more_for_many_ranks(answers: ModuleType) -> None:
    few, many = answers.numbers_sent(6400, 2), answers.numbers_sent(6400, 64)
    print(f"of 6400 numbers each of 2 ranks sends {few}, each of 64 ranks {many}")
    assert few < many < 2 * few
