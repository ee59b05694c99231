"""The kernels for mixtures of experts against plain PyTorch. fp32 in the interpreter; on a GPU in bf16 too."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nanovllm.kernels.moe import grouped_mlp as grouped_mlp_module
from nanovllm.kernels.moe import sort_pairs as sort_pairs_module
from nanovllm.kernels.moe.grouped_mlp import UNSORTED, Tile, choose_tile, grouped_mlp
from nanovllm.kernels.moe.route import route
from nanovllm.kernels.moe.sort_pairs import sort_pairs
from nanovllm.layers import experts as layer
from nanovllm.layers.fp8_linear import widen
from tests.kernels.test_fp8 import weights as fp8_weights
from tests.kernels.test_fused import Where, normal, where

__all__ = ["where"]  # a fixture


def uneven(num_tokens: int, num_experts: int, num_chosen: int, device: str) -> Tensor:
    """Experts [T, K] of which the first have most tokens, and the last ones hardly any."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.randn(num_tokens, num_experts, generator=generator) - torch.linspace(0, 4, num_experts)
    return scores.topk(num_chosen).indices.to(device)


def reference(x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """In float64, one pair after another."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(experts[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double().cpu() @ x[token].double().cpu()).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            out[token] += weight * (down[expert].double().cpu() @ hidden)
    return out


def check(where: Where, num_tokens: int, num_experts: int, num_chosen: int, hidden: int, inner: int) -> None:
    """With one expert more, which gets no tokens and whose weights nothing may look at."""
    x = normal(where, num_tokens, hidden)
    gate_up = normal(where, num_experts + 1, 2 * inner, hidden, seed=1) / 8
    down = normal(where, num_experts + 1, hidden, inner, seed=2) / 8
    gate_up[-1], down[-1] = float("nan"), float("nan")
    experts = uneven(num_tokens, num_experts, num_chosen, where[0])
    weights = normal((where[0], torch.float32), num_tokens, num_chosen, seed=3).softmax(-1)
    truth = reference(x, gate_up, down, experts, weights)
    for compute in grouped_mlp, layer.grouped_mlp:
        found = compute(x, gate_up, down, experts, weights)
        assert found.shape == x.shape and found.dtype == x.dtype
        error = (found.double().cpu() - truth).norm() / truth.norm()
        assert error < (1e-5 if where[1] == torch.float32 else 2e-2), compute.__module__
    parts = grouped_mlp(x, gate_up, down, experts, weights, partial=True)
    assert parts.shape == (num_chosen, *x.shape)
    found = grouped_mlp(x, gate_up, down, experts, weights)
    assert torch.allclose(parts.float().sum(0), found.float(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen", "hidden", "inner"),
    [
        (20, 4, 2, 40, 24),  # an expert has two tiles; sizes that are no multiple of a tile
        (UNSORTED, 3, 2, 40, 24),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in (
                (1, 1, 1, 128, 64),
                (1, 8, 3, 96, 40),
                (30, 3, 3, 48, 16),
                (40, 4, 1, 160, 72),
                (70, 6, 4, 64, 130),
                (300, 2, 1, 32, 16),
            )
        ),
    ],
)
def test_grouped_mlp(where: Where, num_tokens: int, num_experts: int, num_chosen: int, hidden: int, inner: int) -> None:
    check(where, num_tokens, num_experts, num_chosen, hidden, inner)


@pytest.mark.parametrize("num_tokens", [5, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [1, 128], ids=["channel", "blocks"])
def test_experts_in_fp8(where: Where, rows: int, num_tokens: int) -> None:
    """Exact but for the sums, in tiles of few pairs and of many. An expert has a tile that is not full."""
    num_experts, hidden, inner = 3, 256, 128
    x = normal(where, num_tokens, hidden)
    experts = uneven(num_tokens, num_experts, 2, where[0])
    routing = experts, normal((where[0], torch.float32), num_tokens, 2, seed=3).sigmoid()
    tile = choose_tile(torch.device("cpu"), 1, num_tokens, 2 * num_tokens, num_experts, gated=True)
    assert tile.pairs == (16 if num_tokens == 5 else 64)
    made = [fp8_weights(where[0], num_experts * n, k, rows) for n, k in ((2 * inner, hidden), (hidden, inner))]
    (gate_up, gate_up_scale), (down, down_scale) = ([t.unflatten(0, (num_experts, -1)) for t in pair] for pair in made)
    wide = [torch.stack(list(map(widen, *pair))) for pair in ((gate_up, gate_up_scale), (down, down_scale))]
    truth = reference(x, wide[0], wide[1], *routing)
    for compute in grouped_mlp, layer.grouped_mlp:
        found = compute(x, gate_up, down, *routing, scales=(gate_up_scale, down_scale))
        error = (found.double().cpu() - truth).norm() / truth.norm()
        assert error < (1e-5 if where[1] == torch.float32 else 2e-2), compute.__module__


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "ranks", "max_compared"),
    [(20, 6, 3, 10**6), (UNSORTED, 6, 3, 10**6), pytest.param(20, 4, 2, 0, marks=pytest.mark.slow)],
)
def test_whole_experts_on_ranks(
    where: Where, num_tokens: int, num_experts: int, ranks: int, max_compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks' parts add up to the whole. What nobody wrote is read by nobody; a token without experts here is 0."""
    new_empty = Tensor.new_empty

    def spoiled(self: Tensor, *size: Any, **how: Any) -> Tensor:
        new = new_empty(self, *size, **how)
        return new.fill_(float("nan")) if new.is_floating_point() else new

    monkeypatch.setattr(Tensor, "new_empty", spoiled)
    monkeypatch.setattr(sort_pairs_module, "MAX_COMPARED", max_compared)
    x = normal(where, num_tokens, 40)
    gate_up, down = normal(where, num_experts, 48, 40, seed=1) / 8, normal(where, num_experts, 40, 24, seed=2) / 8
    experts = uneven(num_tokens, num_experts, 2, where[0])
    weights = normal((where[0], torch.float32), num_tokens, 2, seed=3).softmax(-1)
    truth = reference(x, gate_up, down, experts, weights)
    each = num_experts // ranks
    for compute in grouped_mlp, layer.grouped_mlp:
        parts = []
        for rank in range(ranks):
            own = slice(rank * each, (rank + 1) * each)
            parts.append(compute(x, gate_up[own], down[own], experts, weights, (rank, ranks)).double().cpu())
            is_here = (experts // each == rank).any(1).cpu()
            assert rank == 0 or not is_here.all()
            assert not parts[-1][~is_here].any(), compute.__module__
        error = (sum(parts) - truth).norm() / truth.norm()
        assert error < (1e-5 if where[1] == torch.float32 else 2e-2), compute.__module__


@pytest.mark.parametrize("num_tokens", [UNSORTED, 20])
def test_weights_by_tma(where: Where, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither columns nor inputs are a multiple of the tile's, and behind an expert's weights are those of the next."""
    if where[0] == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no TMA")
    tile = Tile(16, 64, 32 * where[1].itemsize, 4, 3, tma=True)
    monkeypatch.setattr(grouped_mlp_module, "choose_tile", lambda *_, gated: tile)
    check(where, num_tokens, 4, 2, 72, 40)


@pytest.mark.slow
@pytest.mark.parametrize("tokens_of_tile", [1, 64, 512, 4096])
def test_every_tile(where: Where, tokens_of_tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of prompts, too, at a number of tokens that the interpreter can do; and the library's sort."""
    device, dtype = torch.device(where[0]), where[1]
    sizes = device, dtype.itemsize, tokens_of_tile, 8 * tokens_of_tile, 128
    tiles = {gated: choose_tile(*sizes, gated) for gated in (True, False)}
    monkeypatch.setattr(grouped_mlp_module, "choose_tile", lambda *_, gated: tiles[gated])
    monkeypatch.setattr(sort_pairs_module, "MAX_COMPARED", 0)
    check(where, 40, 3, 2, 72, 72)


@pytest.mark.parametrize("max_compared", [0, 10**6], ids=["library", "compared"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen", "own"),
    [
        (50, 7, 3, (2, 3)),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in ((50, 7, 3, (0, 7)), (1, 4, 4, (0, 2)), (33, 100, 5, (75, 25)), (40, 1, 1, (0, 1)))
        ),
    ],
)
def test_sort_pairs(
    where: Where, num_tokens: int, num_experts: int, num_chosen: int, own: tuple[int, int], max_compared: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """own: the first expert of a rank, and how many it has. Pairs of all others come last."""
    monkeypatch.setattr(sort_pairs_module, "MAX_COMPARED", max_compared)
    experts, (first, num_own) = uneven(num_tokens, num_experts, num_chosen, where[0]), own
    order, ends = sort_pairs(experts, num_own, first)
    pairs = [e - first if first <= e < first + num_own else num_own for e in experts.flatten().tolist()]
    assert order.tolist() == sorted(range(len(pairs)), key=pairs.__getitem__)
    assert ends.tolist() == torch.tensor(pairs).bincount(minlength=num_own).cumsum(0)[:num_own].tolist()


@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "normalise"),
    [
        (60, 4, True),
        (60, 4, False),
        *(pytest.param(e, k, n, marks=pytest.mark.slow) for e, k in ((8, 2), (5, 5), (1, 1)) for n in (True, False)),
    ],
)
def test_route(where: Where, num_experts: int, num_chosen: int, normalise: bool) -> None:
    logits = 3 * normal(where, 4, num_experts)
    experts, weights = route(logits, num_chosen, normalise=normalise)
    probabilities = logits.float().softmax(-1)
    expected = probabilities.topk(num_chosen).values
    if normalise:
        expected = expected / expected.sum(-1, keepdim=True)
    assert experts.dtype == torch.int64 and weights.dtype == torch.float32
    assert torch.allclose(weights, expected, rtol=1e-5)
    chosen = probabilities.gather(1, experts)
    assert torch.allclose(chosen, probabilities.topk(num_chosen).values, rtol=1e-5)
    assert all(len(set(row)) == num_chosen for row in experts.tolist())
    halves = torch.stack([logits.float() / 4, logits.float() * 3 / 4])
    in_parts = route(halves, num_chosen, normalise=normalise)
    assert torch.equal(in_parts[0], experts) and torch.allclose(in_parts[1], weights, rtol=1e-5)


def test_route_of_equals_and_of_what_is_not_a_number(where: Where) -> None:
    """Experts that exist, each once; of equals the first. A token that is lost spoils no other."""
    logits = torch.zeros(6, 6, device=where[0], dtype=where[1])
    logits[1, 4] = 2.0
    logits[2] = float("nan")
    logits[3, 2] = float("nan")
    logits[4, 5] = float("inf")
    logits[5] = -float("inf")
    for normalise in (True, False):
        experts, weights = route(logits, 3, normalise=normalise)
        assert experts[0].tolist() == [0, 1, 2] and experts[1].tolist() == [4, 0, 1]
        assert all(len(set(row)) == 3 and set(row) <= set(range(6)) for row in experts.tolist())
        assert weights[:2].isfinite().all() and not weights[[2, 3, 5]].isfinite().any()


def test_a_token_that_is_not_a_number_spoils_nobody_else(where: Where) -> None:
    """It shares tiles with healthy tokens."""
    x, gate_up = normal(where, 12, 32), normal(where, 2, 48, 32, seed=1) / 4
    down = normal(where, 2, 32, 24, seed=2) / 4
    experts = uneven(12, 2, 1, where[0])
    weights = torch.ones(12, 1, device=where[0])
    expected = grouped_mlp(x, gate_up, down, experts, weights)
    x[4], x[7, 3] = float("nan"), float("inf")
    found = grouped_mlp(x, gate_up, down, experts, weights)
    fine = [i for i in range(12) if i not in (4, 7)]
    assert torch.equal(found[fine], expected[fine]) and not found[4].isfinite().any()


def test_tiles_fit_the_tokens_of_an_expert() -> None:
    """Small tiles while weights are read for few tokens each, as in Qwen3-30B-A3B (8 of 128) and Mixtral (2 of 8)."""
    sizes: dict[tuple[int, int], list[Any]] = {
        (num_experts, num_chosen): [
            choose_tile(torch.device("cpu"), 2, n, n * num_chosen, num_experts, gated).pairs
            for n in (1, 64, 65, 256, 257)
            for gated in (True,)
        ]
        for num_experts, num_chosen in ((128, 8), (8, 2), (1000, 1))
    }
    assert sizes == {(128, 8): [16] * 4 + [64], (8, 2): [16, 16, 64, 64, 64], (1000, 1): [16] * 4 + [64]}
