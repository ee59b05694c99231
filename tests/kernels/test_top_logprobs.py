"""The likeliest tokens and their log-probabilities: the kernel and the reference, against a sort in float64."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nanovllm.kernels.fused import top_logprobs as kernel
from nanovllm.sampling.logprobs import TopLogprobs, top_logprobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def by_kernel(logits: Tensor, sampled: Tensor, n: int) -> TopLogprobs:
    found = kernel.top_logprobs(logits.to(DEVICE), sampled.to(DEVICE), n)
    return TopLogprobs(*found).to("cpu")


def check(found: TopLogprobs, logits: Tensor, sampled: Tensor, n: int) -> None:
    """As a stable sort in float64 has it, so that of equal logits the lowest id is first."""
    exact = logits.double()
    n = min(n, logits.shape[1])
    ids = torch.cat((sampled[:, None], exact.sort(descending=True, stable=True).indices[:, :n]), 1)
    assert found.token_ids.equal(ids)
    assert found.values.dtype == torch.float32
    torch.testing.assert_close(found.values.double(), exact.log_softmax(-1).gather(1, ids), atol=1e-5, rtol=1e-6)
    above = exact > exact.gather(1, sampled[:, None])
    assert found.ranks.equal(above.sum(-1) + 1)


def random_logits(n: int, vocab_size: int, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (scale * torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(vocab_size))).to(dtype)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "PART", 16)
    monkeypatch.setattr(kernel, "PARTS", 4)


DTYPES = [torch.float32, torch.bfloat16]
WAYS = {"kernel": by_kernel, "reference": top_logprobs}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab_size", "n"), [(1, 1), (3, 5), (700, 0), (1030, 3)])
def test_as_a_sort_has_it(vocab_size: int, n: int, dtype: torch.dtype, way: str) -> None:
    logits = random_logits(2, vocab_size, dtype=dtype)
    sampled = torch.tensor([0, vocab_size - 1])
    check(WAYS[way](logits, sampled, n), logits, sampled, n)


IDS = torch.arange(200)
ADVERSARIAL = {
    "all equal": torch.full((200,), 1.5),
    "all equal but one": torch.where(IDS == 70, 2.0, 1.5),
    "all ruled out but one": torch.where(IDS == 70, 2.0, -math.inf),
    "the first part ruled out": torch.where(IDS < 20, -math.inf, 1.0),
    "both zeros": torch.where(IDS % 2 == 0, 0.0, -0.0),
    "few values": (IDS % 7).float(),
    "few values below zero": -(IDS % 7).float() - 3,
    "huge": 1e38 * (IDS % 3 - 1).float(),
    "a steep slope": -3.0 * IDS.float(),
    "all of the best in one part": torch.where((IDS >= 32) & (IDS < 48), 9.0, 0.01 * IDS),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("n", "dtype"), [(4, torch.float32), pytest.param(20, torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_adversarial_rows(n: int, dtype: torch.dtype, way: str, small_parts: None) -> None:
    logits = torch.stack(list(ADVERSARIAL.values())).to(dtype)
    sampled = torch.full((len(logits),), 70)
    check(WAYS[way](logits, sampled, n), logits, sampled, n)


def test_the_whole_vocabulary(small_parts: None) -> None:
    logits = random_logits(1, 40)
    check(by_kernel(logits, torch.tensor([3]), 40), logits, torch.tensor([3]), 40)


def test_tokens_with_the_same_log_probability_differ_in_rank() -> None:
    """Beside a large logit the others' log-probabilities are rounded to the same number; the logits tell."""
    logits = torch.tensor([[1e4, 1.0, 2.0, 3.0]])
    for way in WAYS.values():
        assert [int(way(logits, torch.tensor([t]), 1).ranks) for t in range(4)] == [1, 4, 3, 2]


@pytest.mark.filterwarnings("ignore:.*encountered")
@pytest.mark.parametrize("way", WAYS)
def test_bad_rows_spoil_nothing_else(way: str, small_parts: None) -> None:
    """What is said of them means nothing, but ids are ids."""
    logits = random_logits(6, 50)
    logits[0, 3], logits[1, 3], logits[2, :], logits[3, :] = math.nan, math.inf, math.nan, -math.inf
    sampled = torch.tensor([-1, -1, -1, -1, 5, 6])
    found = WAYS[way](logits, sampled, 2)
    assert (found.token_ids >= 0).all() and (found.token_ids < 50).all()
    check(TopLogprobs(*(column[4:] for column in found)), logits[4:], sampled[4:], 2)


def test_padding_counts_for_nothing(small_parts: None) -> None:
    padded = random_logits(2, 100)
    padded[:, 90:] = 50.0
    logits, sampled = padded[:, :90], torch.tensor([1, 89])
    check(by_kernel(logits, sampled, 2), logits, sampled, 2)


def test_rows_that_ask_for_nothing_are_left_out(small_parts: None) -> None:
    logits, sampled = random_logits(3, 100), torch.tensor([1, 2, 3])
    rows, num_wanted = torch.tensor([4, 0, 2], dtype=torch.int32), torch.tensor([-1, -1, 5, -1, 0])
    found = kernel.top_logprobs(logits.to(DEVICE), sampled.to(DEVICE), 2, (rows.to(DEVICE), num_wanted.to(DEVICE)))
    asking = [0, 2]
    check(TopLogprobs(*(column.cpu()[asking] for column in found)), logits[asking], sampled[asking], 2)


def test_no_row_depends_on_another(small_parts: None) -> None:
    logits, sampled = random_logits(2, 300, dtype=torch.bfloat16), torch.tensor([4, 5])
    together = by_kernel(logits, sampled, 2)
    for i in range(2):
        alone = by_kernel(logits[i : i + 1], sampled[i : i + 1], 2)
        assert all(one.equal(all_rows[i : i + 1]) for one, all_rows in zip(alone, together, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [0.3, 3.0, 12.0])
def test_a_vocabulary_of_real_size(dtype: torch.dtype, scale: float) -> None:
    for vocab_size in 151_936, 49_153:
        logits, sampled = random_logits(8, vocab_size, scale, dtype), torch.arange(8) * 6000
        for n in 0, 5, 20, 1000:
            check(by_kernel(logits, sampled, n), logits, sampled, n)
