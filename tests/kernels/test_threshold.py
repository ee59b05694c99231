"""The threshold of min_p, top_k and top_p, against a sort in float64."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nanovllm.kernels.fused import threshold
from nanovllm.kernels.fused.edits import edit_logits, restore_logits
from nanovllm.kernels.fused.sample import sample_rows
from nanovllm.sampling_params import SamplingParams
from tests.kernels.sampling import Rows, lively_logits, random_edits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR = 1e-6  # of the border either is right: top_p's sums are made of rounded exponentials


def kept(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The mask [N, V] of what the kernel leaves."""
    n, vocab_size = logits.shape
    column = torch.ones(n + 1, device=DEVICE)
    border, last_id, _ = threshold.thresholds(
        logits.to(DEVICE),
        torch.arange(1, n + 1, dtype=torch.int32, device=DEVICE),
        temperature * column,
        (top_k or vocab_size) * column.long(),
        top_p * column,
        (math.log(min_p) if min_p else -math.inf) * column,
    )
    logits, border, last_id = logits.float(), border.cpu()[:, None], last_id.cpu()[:, None]
    return (logits > border) | ((logits == border) & (torch.arange(vocab_size) <= last_id))


def check(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> None:
    """Every row as a stable sort in float64 has it; next to top_p's border a token may be on either side."""
    mask = kept(logits, temperature, top_k, top_p, min_p)
    top_p = float(torch.tensor(top_p))
    for row, found in zip(logits.float(), mask, strict=True):
        scaled = (row - row.max()) / torch.tensor(temperature)
        left = torch.ones_like(found) if not min_p else scaled >= float(torch.tensor(math.log(min_p)))
        order = row.masked_fill(~left, -math.inf).sort(descending=True, stable=True).indices[: int(left.sum())]
        order = order[: top_k or None]
        p = ((row.double() - row.max().double()) / float(torch.tensor(temperature))).exp()[order]
        before = (p.cumsum(0) - p) / p.sum()
        surely = order[before < top_p - NEAR] if top_p < 1 else order[row[order] > -math.inf]
        perhaps = order[before < top_p + NEAR] if top_p < 1 else order
        assert found[surely].all() and found[order[0]]
        assert set(found.nonzero()[:, 0].tolist()) <= {*perhaps.tolist(), int(order[0])}


def random_logits(n: int, vocab_size: int, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (scale * torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(vocab_size))).to(dtype)


NOTHING: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
DTYPES = [torch.float32, torch.bfloat16]
FILTERS: list[dict[str, Any]] = [
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"top_k": 1},
    {"top_k": 5, "min_p": 0.2},
    {"top_p": 0.9},
    {"top_p": 0.5, "temperature": 0.1},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_p": 0.3, "min_p": 0.1, "temperature": 2.0},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [3, 321])
def test_as_a_sort_has_it(vocab_size: int, dtype: torch.dtype, filters: dict[str, Any]) -> None:
    check(random_logits(1, vocab_size, dtype=dtype), **filters)


SMALL = {"CELL": 4, "CELLS": 8, "ROOM": 8, "CHUNK": 4, "TILE": 4}


FEW: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 17, "top_p": 0.9, "min_p": 0.01},
    {"top_k": 65},
    {"top_k": 16},
]


@pytest.mark.parametrize(
    ("dtype", "filters"),
    [
        pytest.param(dtype, filters, marks=() if dtype == torch.bfloat16 and i < 2 else pytest.mark.slow)
        for dtype in DTYPES
        for i, filters in enumerate(FEW)
    ],
    ids=str,
)
def test_tiles_cells_and_candidates_are_only_sizes(
    dtype: torch.dtype, filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small cells and little room the row itself is searched, over several tiles."""
    for name, size in SMALL.items():
        monkeypatch.setattr(threshold, name, size)
    check(random_logits(1, 150, dtype=dtype), **filters)


ADVERSARIAL = {
    "all equal": torch.full((1, 200), 1.5),
    "all equal but one": torch.where(torch.arange(200) == 70, 2.0, 1.5)[None],
    "all ruled out but one": torch.where(torch.arange(200) == 70, 2.0, -math.inf)[None],
    "both zeros": torch.where(torch.arange(200) % 2 == 0, 0.0, -0.0)[None],
    "ties at the border": (torch.arange(200) % 7).float()[None],
    "ties below zero": -(torch.arange(200) % 7).float()[None] - 3,
    "huge": 1e38 * (torch.arange(200) % 3 - 1).float()[None],
    "a steep slope": -3.0 * torch.arange(200).float()[None],
}


@pytest.mark.slow
@pytest.mark.parametrize("room", [8, 64])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_rows(name: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for size_name, size in (SMALL | {"ROOM": room}).items():
        monkeypatch.setattr(threshold, size_name, size)
    parameters = zip(DTYPES * 5, (0, 1, 2, 29, 199, 200) * 2, (1e-9, 0.3, 0.5, 1 - 1e-7, 1.0) * 2, strict=False)
    for dtype, top_k, top_p in parameters:
        check(ADVERSARIAL[name].to(dtype), top_k=top_k, top_p=top_p, min_p=0.01 * (top_k == 29))


def test_rows_that_ask_for_nothing_or_have_no_maximum_keep_everything() -> None:
    logits = random_logits(4, 100)
    logits[0, 3], logits[1, 3], logits[2, :] = math.nan, math.inf, -math.inf
    assert kept(logits, **(NOTHING | {"top_k": 5, "top_p": 0.5, "min_p": 0.5}))[:3, 0].all()
    assert kept(logits[3:], **NOTHING).all()
    assert kept(logits[3:], **(NOTHING | {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.5})).all()


@pytest.mark.parametrize("filters", FILTERS[:5:2], ids=str)
def test_no_row_depends_on_another(filters: dict[str, Any]) -> None:
    logits = random_logits(3, 300, dtype=torch.bfloat16)
    together = kept(logits, **(NOTHING | filters))
    for i in range(3):
        assert kept(logits[i : i + 1], **(NOTHING | filters)).equal(together[i : i + 1])


def draws_alike(rows: Rows, vocab_size: int, seeds: range, dtype: torch.dtype = torch.float32) -> set[int]:
    """The kernels draw what the full tail draws, for all rows, again and again; and leave the logits as they are."""
    state, n = rows.state, len(rows.params)
    positions = state.num_prompt_tokens + rows.indices
    expected, found = [], []
    logits = [lively_logits(n, vocab_size, seed=seed).to(dtype) for seed in seeds]
    for some in logits:
        expected.append(rows.full(some))
    for name, value in list(vars(state).items()):
        if isinstance(value, Tensor):
            setattr(state, name, value.to(DEVICE))
    index, positions = torch.arange(n, dtype=torch.int32, device=DEVICE), positions.to(DEVICE)
    known = state.token_ids.clone()
    for some in logits:
        state.token_ids.copy_(known)
        raw = some.to(DEVICE)
        left = raw.clone()
        edits = edit_logits(left, index, positions, state)
        tokens = sample_rows(
            left, index, positions, state.temperature, state.seed, state.num_prompt_tokens, state.token_ids,
            filters=(state.top_k, state.top_p, state.log_min_p), masks=(state.masked, state.mask), edits=edits,
        )  # fmt: skip
        restore_logits(left, edits)
        assert torch.equal(left, raw)
        assert torch.equal(state.token_ids[index.long(), positions.long()], tokens.clamp(min=0).int())
        found.append(tokens.tolist())
    assert found == expected
    return {token for tokens in found for token in tokens}


@pytest.mark.slow
def test_the_kernels_draw_what_the_full_tail_draws() -> None:
    """Rows with filters of their own, beside one without and a greedy one; the same seeds."""
    params = [
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.5, top_p=0.7),
        SamplingParams(temperature=0.8, min_p=0.1),
        SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
        SamplingParams(),
        SamplingParams(temperature=0.0, top_k=2),
    ]
    assert len(draws_alike(Rows([p.changed(seed=i) for i, p in enumerate(params)]), 40, range(8))) > 10


FILTER_CHOICES: list[dict[str, Any]] = [
    {}, {"temperature": 0.0}, {"top_k": 3}, {"top_k": 20, "top_p": 0.9}, {"top_p": 0.6, "temperature": 1.4},
    {"min_p": 0.1}, {"min_p": 0.05, "top_p": 0.8}, {"top_k": 9, "min_p": 0.2, "temperature": 0.7},
]  # fmt: skip


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 7))])
def test_edits_masks_and_filters_together(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of every kind, in one tile and in several, with and without room for all candidates."""
    for name, size in SMALL.items() if seed % 2 else ():
        monkeypatch.setattr(threshold, name, size)
    rng = random.Random(seed)
    cases = [random_edits(rng, 70) for _ in range(8)]
    params = [
        p.changed(seed=rng.randrange(100), logprobs=None, **({"temperature": 1.0} | rng.choice(FILTER_CHOICES)))
        for p, _, _ in cases
    ]
    rows = Rows(params, [(prompt, output) for _, prompt, output in cases], 70, eos=[2, 5])
    tokens = draws_alike(rows, 70, range(3), DTYPES[seed % 2])
    assert len(tokens) > 8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])
def test_a_vocabulary_of_real_size(dtype: torch.dtype, scale: float) -> None:
    logits = random_logits(8, 151_936, scale, dtype)
    for filters in [*FILTERS, {"top_k": 1000}, {"top_k": 50_000, "top_p": 0.99}, {"top_p": 1 - 1e-6}]:
        check(logits, **filters)
