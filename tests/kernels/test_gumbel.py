"""The counter-based noise: exact integers, uniform, and independent in each of its three arguments."""

import math

import pytest
import torch
from torch import Tensor

from nanovllm.sampling.noise import gumbel, random_bits, row_keys
from nanovllm.sampling_params import derive_seed, mix64

MASK32 = 2**32 - 1


def mix32(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D & MASK32
    x = (x ^ (x >> 15)) * 0x846CA68B & MASK32
    return x ^ (x >> 16)


def test_bits_are_those_of_unbounded_integers() -> None:
    """What wraps on the device must wrap as Python's integers do when they are masked."""
    seeds, indices = [0, 1, 2**62 + 5, 2**63 - 1], [0, 7, 100, 2**31]
    keys = row_keys(torch.tensor(seeds), torch.tensor(indices))
    bits = random_bits(keys, torch.tensor([0, 1, 999, 151935], dtype=torch.int32))
    for row, (seed, index) in enumerate(zip(seeds, indices, strict=True)):
        key = mix64(mix64(seed) + (index + 1) * 0x9E3779B97F4A7C15)
        assert keys[row].item() % 2**64 == key
        for column, token in enumerate((0, 1, 999, 151935)):
            expected = mix32((mix32(token ^ (key & MASK32)) + (key >> 32)) & MASK32)
            assert bits[row, column].item() % 2**32 == expected


def noise(which: str, n: int) -> Tensor:
    """[n] noise values along one of the three arguments, the other two fixed."""
    zeros, counting = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    if which == "token":
        return gumbel(zeros[:1] + 11, zeros[:1], counting)[0]
    seeds, indices = (counting, zeros) if which == "seed" else (zeros + 11, counting)
    return gumbel(seeds, indices, torch.tensor([42]))[:, 0]


@pytest.mark.parametrize("which", ["seed", "index", "token"])
def test_noise_is_gumbel_and_independent_along_each_argument(which: str) -> None:
    n, cells = 200_000, 100
    g = noise(which, n)
    assert g.isfinite().all()
    uniform = torch.exp(-torch.exp(-g.double()))  # the distribution function of a Gumbel variable
    counts = (uniform * cells).long().clamp(max=cells - 1)
    spread = math.sqrt(2 * (cells - 1))
    statistic = ((counts.bincount(minlength=cells) - n / cells) ** 2 / (n / cells)).sum()
    assert abs(statistic - (cells - 1)) < 5 * spread
    # Neighbours at several distances fall into the cells of a 10 x 10 table independently of each other.
    coarse = counts // 10
    for distance in (1, 2, 3, 4, 64, 256, 1024):
        pairs = coarse[:-distance] * 10 + coarse[distance:]
        expected = len(pairs) / cells
        statistic = ((pairs.bincount(minlength=cells) - expected) ** 2 / expected).sum()
        assert abs(statistic - (cells - 1)) < 5 * spread, distance


def test_each_bit_of_seed_index_and_token_changes_half_of_the_output() -> None:
    tokens = torch.arange(1024, dtype=torch.int32)

    def bits(seed: int, index: int, flip: int = 0) -> Tensor:
        return random_bits(row_keys(torch.tensor([seed]), torch.tensor([index])), tokens ^ flip)[0]

    def share_changed(a: Tensor, b: Tensor) -> float:
        return sum((((a ^ b) >> i) & 1).sum().item() for i in range(32)) / (32 * len(a))

    base = bits(0, 0)
    for i in range(63):
        assert abs(share_changed(base, bits(1 << i, 0)) - 0.5) < 0.03
    for i in range(31):
        assert abs(share_changed(base, bits(0, 1 << i)) - 0.5) < 0.03
    for i in range(17):
        assert abs(share_changed(base, bits(0, 0, flip=1 << i)) - 0.5) < 0.03


def test_rows_of_two_seeds_are_not_permutations_of_each_other() -> None:
    """One round of mixing would give every aligned block of ids the same set of numbers under any seed."""
    tokens = torch.arange(256, dtype=torch.int32)
    rows = random_bits(row_keys(torch.arange(40), torch.zeros(40, dtype=torch.int64)), tokens)
    sets = [set(row) for row in rows.tolist()]
    assert all(len(sets[i] & sets[j]) < 3 for i in range(40) for j in range(i))


def test_noise_reaches_far_and_is_never_infinite() -> None:
    """The largest of 20 million values is near log(20 million) = 16.8; a coarse uniform variable stops at 16.6."""
    largest = max(
        gumbel(torch.tensor([seed]), torch.tensor([0]), torch.arange(1_000_000)).amax().item() for seed in range(20)
    )
    assert 15 < largest <= 22.2


@pytest.mark.parametrize("bits", [-1, -2, -128, 0, 1, 2**31 - 1, -(2**31)])
def test_noise_is_finite_at_both_ends_of_the_bits(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinite value would come once in 30 million, and make a greedy row NaN."""
    monkeypatch.setattr("nanovllm.sampling.noise.random_bits", lambda *_: torch.tensor([[bits]], dtype=torch.int32))
    noise = gumbel(torch.tensor([0]), torch.tensor([0]), torch.tensor([0])).item()
    assert -2.9 < noise < 22.2


def test_derived_seeds_are_distinct_and_in_range() -> None:
    seeds = {derive_seed(seed, choice) for seed in (0, 1, 2, 2**63 - 1) for choice in range(1000)}
    assert len(seeds) == 4000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(7, 3) == derive_seed(7, 3)
