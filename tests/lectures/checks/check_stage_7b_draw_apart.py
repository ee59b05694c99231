"""Exercise 7b: the tokens of one rank, from one pair a row. The ranks are threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stages.core import SamplingParams, Sequence, sample

PATIENCE = 2.0  # seconds that a rank waits for the others
PAIR = 16  # bytes of two numbers in float64


class Desk:
    """The group as one of its ranks sees it, which counts the bytes that it puts in."""

    def __init__(self, rank: int, on_it: "list[Tensor | None]", barrier: threading.Barrier) -> None:
        self.rank, self.size, self.on_it, self.barrier = rank, len(on_it), on_it, barrier
        self.bytes_put_in = 0

    def all_gather(self, x: Tensor) -> Tensor:
        self.bytes_put_in += x.nbytes
        self.on_it[self.rank] = x
        self.barrier.wait(PATIENCE)
        gathered = torch.stack([part for part in self.on_it if part is not None])
        self.barrier.wait(PATIENCE)
        return gathered


def draw(answers: ModuleType, whole: Tensor, ranks: int, seqs: list[Sequence]) -> tuple[list[list[int]], int]:
    """The tokens that each of the ranks draws from its part of the logits [N, V], and the most bytes one put in."""
    vocab_size = whole.shape[1]
    width = -(-vocab_size // ranks)
    parts = F.pad(whole, (0, ranks * width - vocab_size)).split(width, dim=1)
    barrier, on_it = threading.Barrier(ranks), [None] * ranks
    desks = [Desk(rank, on_it, barrier) for rank in range(ranks)]  # type: ignore[arg-type]

    def work(rank: int) -> list[int]:
        try:
            tokens: list[int] = answers.draw_apart(parts[rank], desks[rank], seqs, vocab_size)
        except BaseException:
            barrier.abort()  # or the others would wait
            raise
        return tokens

    with ThreadPoolExecutor(ranks) as pool:
        tokens = list(pool.map(work, range(ranks)))
    return tokens, max(desk.bytes_put_in for desk in desks)


def rows(n: int, *temperatures: float) -> list[Sequence]:
    """Of different seeds, and different numbers of tokens so far."""
    params = [SamplingParams(temperatures[i % len(temperatures)], 9) for i in range(n)]
    return [Sequence(i, [1] * (2 + i % 3), 2, p, seed=100 + i) for i, p in enumerate(params)]


def random_logits(n: int, vocab_size: int) -> Tensor:
    return torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(vocab_size))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("vocab_size", [5, 64, 511])
def test_the_tokens_are_those_of_one_rank(answers: ModuleType, vocab_size: int, ranks: int) -> None:
    whole, seqs = random_logits(24, vocab_size), rows(24, 0.0, 0.7, 1.0, 1.5)
    expected = sample(whole, seqs)
    assert len(set(expected)) > 2
    tokens, _ = draw(answers, whole, ranks, seqs)
    assert tokens == [expected] * ranks, "every rank must know the same tokens"


def test_padding_is_never_drawn(answers: ModuleType) -> None:
    whole, seqs = random_logits(8, 9) - 50, rows(8, 0.0, 1.0)
    tokens, _ = draw(answers, whole, 4, seqs)
    assert tokens == [sample(whole, seqs)] * 4


def test_noise_is_not_rounded(answers: ModuleType) -> None:
    """Next to logits of 30 million, in float32, there is no room for it."""
    whole, seqs = torch.full((8, 64), 3e7), rows(8, 1.0)
    tokens, _ = draw(answers, whole, 2, seqs)
    assert tokens[0] == sample(whole, seqs)


def test_a_pair_of_numbers_for_each_row(answers: ModuleType) -> None:
    n = 24
    whole, seqs = random_logits(n, 511), rows(n, 0.0, 1.0)
    _, most = draw(answers, whole, 2, seqs)
    assert most <= PAIR * n, f"{most} bytes for {n} rows; a pair for each would be {PAIR * n}"
