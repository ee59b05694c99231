"""The sampler draws what it should, row by row, whatever stands beside a row (CASES M1, M2, M3)."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.sampling import sampler
from nanovllm.sampling.logprobs import log_probabilities
from nanovllm.sampling.sampler import sample_full, sample_plain
from nanovllm.sampling.state import SamplingMetadata
from nanovllm.sampling_params import SamplingParams
from tests.kernels.sampling import VOCAB, Rows, literal_edits, lively_logits

DRAWS = 20_000


def probabilities(logits: Tensor, p: SamplingParams) -> Tensor:
    """One row's distribution, written down literally: float64, a Python loop, no cleverness."""
    prob = (torch.tensor(literal_edits(logits, p, [0], [])).double() / p.temperature).softmax(-1)
    prob[prob < p.min_p * prob.max()] = 0
    order = sorted(range(len(prob)), key=lambda i: (-prob[i].item(), i))
    if p.top_k > 0:
        prob[order[p.top_k :]] = 0
    prob = prob / prob.sum()
    total, kept = 0.0, []
    for i in order:
        if total < p.top_p or p.top_p == 1:
            kept.append(i)
        total += prob[i].item()
    mask = torch.zeros_like(prob)
    mask[kept] = 1
    return prob * mask / (prob * mask).sum()


def chi_square_is_plausible(counts: Tensor, expected: Tensor) -> bool:
    """Pearson's statistic is within 5 standard deviations of its mean; cells that expect fewer than 5 are merged."""
    assert counts[expected == 0].sum() == 0, "a token that cannot be drawn was drawn"
    n = counts.sum()
    rare = expected * n < 5
    c = torch.cat((counts[~rare], counts[rare].sum()[None])).double()
    e = torch.cat((expected[~rare], expected[rare].sum()[None])).double() * n
    c, e = c[e > 0], e[e > 0]
    degrees = len(e) - 1
    statistic = ((c - e) ** 2 / e).sum().item()
    return statistic <= degrees + 5 * math.sqrt(2 * max(degrees, 1))


MIXED = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_k=0),
    SamplingParams(temperature=1.0, top_k=-1),
    SamplingParams(temperature=1.3, top_k=1),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=0.7, top_k=VOCAB + 1),
    SamplingParams(temperature=1.0, top_p=1e-9),
    SamplingParams(temperature=1.0, top_p=1.0),
    SamplingParams(temperature=1.5, top_p=0.8),
    SamplingParams(temperature=1.5, min_p=0.1),
    SamplingParams(temperature=1.5, top_k=7, top_p=0.7, min_p=0.02),
]
EDITED = [
    SamplingParams(temperature=1.2, logit_bias={0: 2.0, 7: -100, 39: 1.0}, repetition_penalty=1.5),
    SamplingParams(temperature=1.2, allowed_token_ids=[1, *range(20, 35)], top_p=0.8, logit_bias={2: 100}),
    SamplingParams(temperature=1.2, top_k=20).changed(bad_words_ids=((3,), (8,))),
]


def test_frequencies_fit_the_known_probabilities_in_a_mixed_batch() -> None:
    """M2: 20,000 draws of each row, all rows in the same batches, through the full tail."""
    params = MIXED + EDITED
    batch = Rows(params)
    rows = torch.arange(len(params))
    logits = lively_logits(len(params))
    needs = batch.state.needs(rows.tolist())
    assert needs is not None
    counts = torch.zeros(len(params), VOCAB, dtype=torch.int64)
    step = 2_000
    for start in range(0, DRAWS, step):
        many = rows.repeat(step)  # the same rows at `step` output positions
        positions = torch.arange(start, start + step).repeat_interleave(len(params))
        metadata = batch.metadata(many, indices=positions, seeds=1234 + many)
        tokens = sample_full(logits[many], metadata, many, batch.state, needs)
        counts += torch.zeros_like(counts).index_put_((many, tokens), torch.tensor(1), accumulate=True)
    for row, p in enumerate(params):
        expected = torch.zeros(VOCAB).double()
        if p.temperature == 0:
            expected[logits[row].argmax()] = 1
        else:
            expected = probabilities(logits[row], p)
        assert chi_square_is_plausible(counts[row], expected), p


def test_frequencies_over_seeds_fit_as_well() -> None:
    """One draw for each of 20,000 neighbouring seeds, as when every request of a service has its own."""
    logits = lively_logits(1)
    seeds = torch.arange(DRAWS)
    metadata = SamplingMetadata(torch.ones(DRAWS), seeds, torch.zeros(DRAWS, dtype=torch.int64))
    tokens = sample_plain(logits.expand(DRAWS, -1), metadata)
    assert chi_square_is_plausible(tokens.bincount(minlength=VOCAB), logits[0].double().softmax(-1))


@pytest.mark.parametrize(
    "beside",
    [
        SamplingParams(top_p=0.5, min_p=0.1, repetition_penalty=1.5, min_tokens=2, logprobs=3),
        SamplingParams(top_k=2, frequency_penalty=0.4),  # for which two candidates would do
        SamplingParams(min_p=0.5),
        SamplingParams(logprobs=0),
    ],
)
def test_a_row_without_filters_gets_the_same_token_from_both_tails(beside: SamplingParams) -> None:
    params = [SamplingParams(temperature=(0.0, 0.3, 1.0, 2.0, 1e-5)[s % 5], seed=s) for s in range(50)]
    logits = lively_logits(51, scale=1.0)
    batch = Rows([*params, beside], eos=[3])
    assert batch.full(logits)[:50] == batch.plain(logits)[:50]


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_agree_with_argmax_on_wide_logits(temperature: float) -> None:
    """M1, mixed with rows at 0 and 1, in both tails."""
    logits = lively_logits(64, scale=200.0)
    params = [SamplingParams(temperature=(0.0, temperature, 1.0)[i % 3], seed=i, top_k=30) for i in range(64)]
    batch = Rows(params)
    for tokens in (batch.plain(logits), batch.full(logits)):
        assert min(tokens) >= 0
        cold = [i for i in range(64) if i % 3 < 2]
        assert [tokens[i] for i in cold] == logits[cold].argmax(-1).tolist()


def test_temperature_zero_is_exact_argmax_and_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [9, 4, 30]] = 2.0
    logits[2] = -1000.0
    batch = Rows([SamplingParams(temperature=0.0, logprobs=0)] * 3)
    assert batch.plain(logits) == batch.full(logits) == [0, 4, 0]
    near = torch.full((1, VOCAB), 1.0)
    near[0, 17] = 1.0 + 2**-23  # the next float32
    assert Rows([SamplingParams(temperature=0.0)]).plain(near) == [17]


def test_denormal_and_huge_temperatures_give_a_token() -> None:
    logits = lively_logits(4, scale=1e4)
    batch = Rows([SamplingParams(temperature=t, seed=1, top_p=0.9) for t in (1e-45, 1e-30, 1e10, 1e30)])
    for tokens in (batch.plain(logits), batch.full(logits)):
        assert all(0 <= t < VOCAB for t in tokens)
        assert tokens[:2] == logits[:2].argmax(-1).tolist()


def test_alone_and_in_a_batch_give_the_same_tokens_and_logprobs() -> None:
    """M3: each request alone, in a batch of five, and in that batch turned round."""
    params = [
        SamplingParams(temperature=1.0, seed=5, logprobs=4),
        SamplingParams(temperature=0.8, seed=6, top_p=0.9, logprobs=0),
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=1.2, seed=7, top_k=3, repetition_penalty=1.3),
        SamplingParams(temperature=1.0, seed=8, min_p=0.2, frequency_penalty=0.5, min_tokens=4, logprobs=3),
    ]
    history = [([1, 2], [3] * i) for i in range(5)]
    logits = lively_logits(5)

    def run(rows: list[int]) -> list[object]:
        batch = Rows([params[i] for i in rows], [history[i] for i in rows], eos=[2])
        index = torch.arange(len(rows))
        needs = batch.state.needs(index.tolist())
        assert needs is not None
        tokens = sample_full(logits[rows], batch.metadata(index), index, batch.state, needs)
        logprobs: list[Any] = [None] * len(rows)
        if needs.num_logprobs is not None:
            top = log_probabilities(logits[rows], tokens, needs.num_logprobs)
            logprobs = top.per_row([params[i].logprobs for i in rows])
        return list(zip(tokens.tolist(), logprobs, strict=True))

    together = run([0, 1, 2, 3, 4])
    assert run([4, 3, 2, 1, 0]) == together[::-1]
    assert [run([i])[0] for i in range(5)] == together


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in (result if isinstance(result, tuple | list) else [result]) if isinstance(t, Tensor)]
        self.numel = max([self.numel, *(t.numel() for t in tensors)])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_batch_is_sampled_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same tokens and logprobs. All rows at once would need ten tensors of the size of their logits."""
    params = [replace(p, seed=i, logprobs=(None, 0, 3)[i % 3]) for i, p in enumerate(MIXED)]
    params += [SamplingParams(seed=20 + i, repetition_penalty=1.5, presence_penalty=1) for i in range(6)]
    history = [([1, 2], [i, 3]) for i in range(len(params))]
    logits = lively_logits(len(params)).to(dtype)

    def run() -> tuple[list[int], list[Any], int]:
        batch, rows = Rows(params, history), torch.arange(len(params))
        needs = batch.state.needs(rows.tolist())
        assert needs is not None
        metadata = batch.metadata(rows)
        with Largest() as largest:
            tokens = sample_full(logits, metadata, rows, batch.state, needs)
            top = log_probabilities(logits, tokens, needs.num_logprobs or 0)
        return tokens.tolist(), top.per_row([p.logprobs for p in params]), largest.numel

    whole = run()
    assert whole[2] == len(params) * VOCAB
    for rows_at_once in (1, 4):
        monkeypatch.setattr(sampler, "MAX_SCORES", rows_at_once * VOCAB + 1)
        parts = run()
        assert parts[:2] == whole[:2] and parts[2] <= max(rows_at_once * VOCAB, 4 * len(params))


def test_a_bad_row_fails_alone() -> None:
    """Rule 9, in both tails, for each way in which a row can be bad; also where the bad logit is one that is masked."""
    logits = lively_logits(6)
    good = logits.clone()
    logits[1, 3] = math.nan
    logits[2, 3] = math.inf
    logits[3] = -math.inf
    logits[4, 3] = math.nan
    params = [SamplingParams(temperature=1.0, seed=i) for i in range(6)]
    params[4] = SamplingParams(temperature=1.0, top_k=2, min_tokens=5, stop_token_ids=[3])
    batch = Rows(params)
    for run in (batch.plain, batch.full):
        tokens = run(logits)
        assert tokens[1:5] == [-1] * 4
        assert [tokens[0], tokens[5]] == [run(good)[0], run(good)[5]]
    logits[5, 0] = -math.inf  # a token that cannot be drawn is no fault
    assert batch.plain(logits)[5] >= 0


def test_top_k_keeps_exactly_k_among_equals() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 20:30] = 1.0
    n = 2_000
    for k, allowed in ((1, {20}), (3, {20, 21, 22}), (12, {*range(20, 30), 0, 1})):
        batch = Rows([SamplingParams(temperature=5.0, top_k=k)])
        rows = torch.zeros(n, dtype=torch.int64)
        needs = batch.state.needs([0])
        assert needs is not None
        tokens = sample_full(
            logits.expand(n, -1), batch.metadata(rows, indices=torch.arange(n)), rows, batch.state, needs
        )
        assert set(tokens.tolist()) == allowed
