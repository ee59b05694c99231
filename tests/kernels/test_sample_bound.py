"""The sampling kernel computes no scores where none can win. Here all are computed, and by the same arithmetic."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from nanovllm.kernels.fused import gumbel, sample
from nanovllm.sampling.noise import random_bits, row_keys

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IDS = 3 * sample.TILE + 104  # of one program (see `one_part`), which looks at them in vectors of 8
SEED = 12345


@pytest.fixture(autouse=True)
def one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has a whole row, so that what it knows from a tile decides about the next ones."""
    monkeypatch.setattr(sample, "PROGRAMS", 1)


@triton.jit
def scores_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, out_ptr, low_ptr, high_ptr, temperature_ptr, first_id, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, SIZE)
    low, high = tl.load(low_ptr).to(tl.uint32), tl.load(high_ptr).to(tl.uint32)
    folded = gumbel.fold((first_id + i).to(tl.uint32)) ^ gumbel.fold(low)
    noise = gumbel.gumbel(gumbel.uniform_of(gumbel.hash_bits(folded, high)), FAST)
    place = tl.program_id(0) * WIDTH + i
    score = tl.load(logits_ptr + place, mask=i < WIDTH)
    score += tl.load(temperature_ptr) * noise
    tl.store(out_ptr + place, score, mask=i < WIDTH)


def scores_of(logits: Tensor, temperature: float, first_id: int = 0) -> Tensor:
    """All scores of rows of float32 logits [N, n]."""
    if temperature == 0:
        return logits
    key = int(row_keys(torch.tensor([SEED]), torch.tensor([1])))
    low, high, t = (
        torch.tensor([x], device=DEVICE) for x in (key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF, float(temperature))
    )
    out = torch.empty_like(logits)
    n, width = logits.shape
    size = triton.next_power_of_2(width)
    scores_kernel[(n,)](logits, out, low, high, t, first_id, WIDTH=width, SIZE=size, FAST=DEVICE == "cuda")
    return out


def drawn(logits: Tensor, temperature: float, first_id: int = 0, num_ids: int | None = None) -> list[int]:
    """The kernel's tokens of rows that all have the same noise. logits [N, n]."""
    n = len(logits)
    rows = torch.arange(n, dtype=torch.int32, device=DEVICE)
    token_ids = torch.zeros(n, 8, dtype=torch.int32, device=DEVICE)
    tokens = sample.sample_rows(
        logits.contiguous(), rows, torch.ones_like(rows), torch.full((n,), temperature, device=DEVICE),
        torch.full((n,), SEED, device=DEVICE), torch.zeros_like(rows), token_ids, first_id, num_ids,
    )  # fmt: skip
    return [int(t) for t in tokens]


def expected(logits: Tensor, temperature: float, first_id: int = 0) -> list[int]:
    scores = scores_of(logits.contiguous(), temperature, first_id)
    return [first_id + int((row == row.max()).nonzero()[0]) if row.max().isfinite() else -1 for row in scores]


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 0.6, 1e30])
@pytest.mark.parametrize("offset", [0.0, -1e6])
@pytest.mark.parametrize(("first_id", "num_ids"), [(0, IDS), (8, IDS - 500), (3, IDS - 1)])
def test_the_winner_is_that_of_all_scores(temperature: float, offset: float, first_id: int, num_ids: int) -> None:
    """Far from zero and where it is cold many scores are equal, within a tile and across tiles: the lowest id wins."""
    noise = torch.randn(IDS, generator=torch.Generator().manual_seed(first_id)).to(DEVICE)
    peaked = 20 * (noise > 2.5) + 2 * noise
    logits = torch.stack((0 * noise, noise / 2, (3 * noise).round(), peaked, peaked.flip(0), noise.sort()[0])) + offset
    tokens = expected(logits[:, :num_ids], temperature, first_id)
    logits[:, num_ids:] = 1e4 + abs(offset)  # padding
    assert drawn(logits, temperature, first_id, num_ids) == tokens


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize("place", [5, IDS - 5])
def test_what_is_not_finite(temperature: float, place: int) -> None:
    """Not overlooked behind a token that is far above the others."""
    logits = torch.zeros(6, IDS, device=DEVICE)
    logits[:, 7] = 50.0
    logits[0, place], logits[1, place], logits[2] = float("nan"), float("inf"), float("-inf")
    logits[3], logits[3, place] = float("-inf"), -7.0
    logits[4], logits[4, place] = float("-inf"), float("nan")
    logits[5, 7], logits[5, place] = 0.0, float("-inf")
    assert drawn(logits, temperature) == [-1, -1, -1, place, -1, *expected(logits[5:], temperature)]


@pytest.mark.parametrize("offset", [0.0, pytest.param(-3000.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("temperature", [pytest.param(1e-5, marks=pytest.mark.slow), 0.6, 40.0])
@pytest.mark.parametrize("which", [pytest.param("smallest numbers", marks=pytest.mark.slow), "any"])
def test_one_that_only_just_wins(which: str, temperature: float, offset: float) -> None:
    """Nothing counts but one token of the first tile and one of the last, whose score is the next number above, the
    same or the next below. Where the uniform numbers are smallest the bound is closest to the score."""
    key = row_keys(torch.tensor([SEED]), torch.tensor([1]))
    by_number = (random_bits(key, torch.arange(IDS))[0].long() % 2**32).argsort()
    early, late = by_number[by_number < sample.TILE], by_number[by_number >= sample.TILE]
    some = range(6) if which == "smallest numbers" else range(6, 400, 66)
    a, b = (tokens[list(some)].repeat_interleave(3).to(DEVICE) for tokens in (early, late))
    row = torch.arange(len(a), device=DEVICE)
    logits = torch.full((len(a), IDS), float("-inf"), device=DEVICE)
    logits[row, a] = logits[row, b] = offset
    target = scores_of(logits, temperature)[row, a]
    beyond = torch.tensor([-1.0, 0.0, 1.0], device=DEVICE).repeat(len(some)) * float("inf")
    target = torch.where(beyond.isnan(), target, torch.nextafter(target, beyond))
    for _ in range(4):  # the logit whose score comes closest to that
        logits[row, b] += target - scores_of(logits, temperature)[row, b]
    tokens = expected(logits, temperature)
    assert drawn(logits, temperature) == tokens
    assert len({token in late.tolist() for token in tokens}) == 2, "both kinds of winners"


@pytest.mark.slow
def test_one_that_wins_by_a_rounding() -> None:
    """Equal logits so large that the noise is half of what tells two neighbours apart: it rounds the later one up."""
    key = row_keys(torch.tensor([SEED]), torch.tensor([1]))
    bits = random_bits(key, torch.arange(16 * sample.TILE))[0].long() % 2**32
    late = sample.TILE + int(bits[sample.TILE :].argmin())
    logits = torch.full((1, 16 * sample.TILE), float("-inf"), device=DEVICE)
    logits[0, 5] = logits[0, late] = -3000.0
    winners = set()
    for i in range(12):
        temperature = 0.9e-5 * 1.05**i
        tokens = expected(logits, temperature)
        assert drawn(logits, temperature) == tokens
        winners.update(tokens)
    assert winners == {5, late}
