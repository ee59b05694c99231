"""The fused kernels against the plain operations that they stand for. fp32 in the interpreter; on a GPU in bf16 too."""

from collections.abc import Callable
from functools import partial as bind
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nanovllm.attention.interface import write_kv
from nanovllm.kernels.fused.add_rms_norm import FEW_ROWS, add_rms_norm
from nanovllm.kernels.fused.decode_inputs import decode_inputs
from nanovllm.kernels.fused.norm_rope_write import norm_rope_write
from nanovllm.kernels.fused.sample import sample_rows
from nanovllm.kernels.fused.silu_and_mul import gelu_and_mul, silu_and_mul
from nanovllm.kernels.linear.choice import choose_linear
from nanovllm.kernels.linear.skinny_linear import skinny_linear
from nanovllm.kernels.linear.tiled_linear import Tile, num_splits, tiled_linear
from nanovllm.layers.norm import rms_norm
from nanovllm.layers.rope import RotaryEmbedding, apply_rope
from nanovllm.runner.batch import decode_inputs_reference
from nanovllm.sampling.sampler import sample_plain
from nanovllm.sampling.state import SamplingMetadata

ON = [
    pytest.param(("cpu", torch.float32), id="interpreter"),
    pytest.param(("cuda", torch.float32), id="fp32", marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.bfloat16), id="bf16", marks=pytest.mark.gpu),
]
Where = tuple[str, torch.dtype]


@pytest.fixture(params=ON)
def where(request: pytest.FixtureRequest) -> Where:
    chosen: Where = request.param
    return chosen


def normal(where: Where, *shape: int, seed: int = 0) -> Tensor:
    device, dtype = where
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def assert_close(ours: Tensor, truth: Tensor) -> None:
    """By the relative error of the whole: float32 arithmetic is far below, one rounding to bf16 is 2e-3."""
    error = (ours.double() - truth.double()).norm() / truth.double().norm()
    assert error < (1e-6 if ours.dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("size", [96, 1024])
@pytest.mark.parametrize("with_residual", [True, False])
def test_add_rms_norm(where: Where, size: int, with_residual: bool) -> None:
    num_rows = 5 if size != 96 else FEW_ROWS + 1
    x, residual = 3 * normal(where, num_rows, size), normal(where, num_rows, size, seed=1)
    weight = normal(where, size, seed=2)
    normed, total = add_rms_norm(x, residual if with_residual else None, weight, 1e-6)
    expected = x + residual if with_residual else x
    assert torch.equal(total, expected)
    assert_close(normed, rms_norm(expected, weight, 1e-6))


def test_add_rms_norm_by_weights_in_float32(where: Where) -> None:
    """As Gemma has them: what comes out has the dtype of what goes in."""
    x, residual, weight = normal(where, 5, 96), normal(where, 5, 96, seed=1), 1 + normal(where, 96, seed=2).float()
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert normed.dtype == total.dtype == x.dtype
    assert_close(normed, rms_norm(x + residual, weight, 1e-6))
    assert_close(add_rms_norm(x, None, weight, 1e-6)[0], rms_norm(x, weight, 1e-6))


def test_gelu_and_mul(where: Where) -> None:
    gate_up = 4 * normal(where, 3, 2 * 1100)
    gate, up = gate_up.double().chunk(2, -1)
    assert_close(gelu_and_mul(gate_up), torch.nn.functional.gelu(gate, approximate="tanh") * up)


def test_silu_and_mul(where: Where) -> None:
    gate_up = 4 * normal(where, 3, 2 * 1100)
    gate, up = gate_up.double().chunk(2, -1)
    assert_close(silu_and_mul(gate_up), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (9, 3, 64), (2, 1, 128)])
@pytest.mark.parametrize("with_norm", [True, False])
def test_norm_rope_write(where: Where, num_heads: int, num_kv_heads: int, head_dim: int, with_norm: bool) -> None:
    device, dtype = where
    qkv = normal(where, 5, num_heads + 2 * num_kv_heads, head_dim)
    positions = torch.tensor([0, 1, 7, 30, 31], dtype=torch.int32, device=device)
    slots = torch.tensor([3, 17, 16, 0, 40], device=device)
    norms = (normal(where, head_dim, seed=1), normal(where, head_dim, seed=2)) if with_norm else None
    rotary = RotaryEmbedding(head_dim, 1e4, None, 32).to(device)
    kv = torch.full((2, 3, 16, num_kv_heads, head_dim), 7.0, dtype=dtype, device=device)
    expected_kv = kv.clone()

    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], 1e-6), rms_norm(k, norms[1], 1e-6)
    cos, sin = rotary(positions)
    write_kv(expected_kv, apply_rope(k, cos, sin), v, slots)
    out = norm_rope_write(qkv, kv, norms, rotary.table, positions, slots, 1e-6)
    assert_close(out, apply_rope(q, cos, sin))
    assert_close(kv, expected_kv)
    untouched = torch.ones(48, dtype=torch.bool, device=device)
    untouched[slots] = False
    assert (kv.flatten(1, 2)[:, untouched] == 7).all(), "only the step's own slots are written"


def sampling_state(device: str, num_rows: int) -> dict[str, Any]:
    return {
        "temperature": torch.tensor([0.0, 0.7, 1.0, 1.3] * num_rows, device=device)[:num_rows],
        "seeds": torch.arange(num_rows, device=device) * 2**40 + 5,
        "num_prompt_tokens": torch.arange(num_rows, dtype=torch.int32, device=device),
        "token_ids": torch.full((num_rows, 50), -7, dtype=torch.int32, device=device),
    }


@pytest.mark.parametrize("vocab_size", [511, pytest.param(10_000, marks=pytest.mark.slow)])
def test_sample_rows(where: Where, vocab_size: int) -> None:
    """The tokens of the plain tail, each put behind the tokens of its row."""
    device = where[0]
    rows = torch.tensor([6, 2, 0, 1, 5, 3, 7, 4] * 3, dtype=torch.int32, device=device)[:20]
    rows = torch.cat((rows[:8], rows[:8] + 8, rows[:4] + 16))  # 20 different ones
    state = sampling_state(device, 24)
    logits = 2 * normal(where, 20, vocab_size)
    positions = state["num_prompt_tokens"][rows] + 3
    metadata = SamplingMetadata(
        state["temperature"][rows], state["seeds"][rows], positions - state["num_prompt_tokens"][rows]
    )
    expected = sample_plain(logits, metadata)
    tokens = sample_rows(logits, rows, positions, **state)
    assert tokens.tolist() == expected.tolist()
    assert len(set(tokens.tolist())) > 10
    written = (state["token_ids"] != -7).nonzero()
    assert sorted(written.tolist()) == sorted([r, p] for r, p in zip(rows.tolist(), positions.tolist(), strict=True))
    assert state["token_ids"][rows.long(), positions.long()].tolist() == expected.tolist()


@pytest.mark.parametrize(("vocab_size", "ranks"), [(5, 4), pytest.param(9001, 2, marks=pytest.mark.slow)])
def test_sample_rows_over_ranks(where: Where, vocab_size: int, ranks: int) -> None:
    """What one rank draws from all logits, every rank draws from its own and the bests of all; padding never wins."""
    device = where[0]
    num_rows, width = 6, -(-vocab_size // ranks)
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    logits = normal(where, num_rows, vocab_size).round().sub(9)  # below what stands in the padding; many ties
    logits[4, vocab_size - 1], logits[5] = float("nan"), float("-inf")
    positions = rows + 3
    state = sampling_state(device, num_rows)
    expected = sample_rows(logits, rows, positions, **state)
    padded = torch.nn.functional.pad(logits, (0, width * ranks - vocab_size))
    bests: list[Tensor] = []

    def draw(rank: int, all_gather: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        own = sampling_state(device, num_rows)
        share = padded[:, rank * width : (rank + 1) * width].contiguous()
        num_ids = max(0, min(width, vocab_size - rank * width))
        return sample_rows(
            share, rows, positions, **own, first_id=rank * width, num_ids=num_ids, all_gather=all_gather
        ), own["token_ids"]

    for rank in range(ranks):
        draw(rank, lambda best: bests.append(best) or best[None])  # type: ignore[func-returns-value]
    for rank in range(ranks):
        tokens, written = draw(rank, lambda best: torch.stack(bests))
        assert tokens.tolist() == expected.tolist() and torch.equal(written, state["token_ids"])
    assert expected[4] == expected[5] == -1 and len(set(expected.tolist())) > 2


def test_sample_rows_with_bad_logits(where: Where) -> None:
    """-1 where the largest is not finite, 0 in the row (an id that exists); ties go to the lowest id."""
    device, dtype = where
    logits = torch.zeros(5, 9000, device=device, dtype=dtype)
    logits[0, 4500] = float("nan")
    logits[1, 8999] = float("inf")
    logits[2] = float("-inf")
    logits[3, [5000, 100, 8000]] = 3.0
    logits[4, 17], logits[4, 5] = float("-inf"), 1.0
    state = sampling_state(device, 5)
    state["temperature"].zero_()
    rows = torch.arange(5, dtype=torch.int32, device=device)
    tokens = sample_rows(logits, rows, rows + 10, **state)
    assert tokens.tolist() == [-1, -1, -1, 100, 5]
    assert [int(state["token_ids"][r, r + 10]) for r in range(5)] == [0, 0, 0, 100, 5]


def test_decode_inputs(where: Where) -> None:
    device = where[0]
    generator = torch.Generator(device).manual_seed(0)
    token_ids = torch.randint(0, 999, (6, 81), generator=generator, device=device, dtype=torch.int32)
    block_table = torch.randint(0, 99, (6, 40), generator=generator, device=device, dtype=torch.int32)
    rows = torch.tensor([4, 5, 0, 5, 1], dtype=torch.int32, device=device)
    positions = torch.tensor([0, 79, 33, 1, 64], dtype=torch.int32, device=device)

    def filled(look_up: object) -> list[Tensor]:
        out = [torch.zeros(5, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64, torch.int32)]
        table = torch.zeros(5, 40, dtype=torch.int32, device=device)
        look_up(rows, positions, token_ids, block_table, 2, *out, table)  # type: ignore[operator]
        used = torch.arange(40, device=device) <= (positions // 2)[:, None]
        return [*out, table * used]

    for ours, expected in zip(filled(decode_inputs), filled(decode_inputs_reference), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("splits", [1, 3])
def test_add_rms_norm_of_parts(where: Where, splits: int) -> None:
    """What a split linear layer leaves to the norm: the parts are summed in float32 and rounded once."""
    parts = normal((where[0], torch.float32), splits, 5, 96)
    residual, weight = normal(where, 5, 96, seed=1), normal(where, 96, seed=2)
    normed, total = add_rms_norm(parts, residual, weight, 1e-6)
    expected = (parts.double().sum(0) + residual.double()).to(where[1])
    assert_close(total, expected)
    assert_close(normed, rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("num_tokens", [1, 5, 17])
@pytest.mark.parametrize("kind", ["plain", "bias", "gated", "partial"])
@pytest.mark.parametrize("inputs", [128, 384])
def test_skinny_linear(where: Where, num_tokens: int, kind: str, inputs: int) -> None:
    outputs = 64
    x, weight = normal(where, num_tokens, inputs), normal(where, outputs, inputs, seed=1) / 16
    bias = normal(where, outputs, seed=3)
    truth = x.double() @ weight.double().t()
    if kind == "plain":
        ours = skinny_linear(x, weight)
    elif kind == "bias":
        ours, truth = skinny_linear(x, weight, bias), truth + bias
    elif kind == "gated":
        gate, up = truth.chunk(2, -1)
        ours, truth = skinny_linear(x, weight, gated=True), torch.nn.functional.silu(gate) * up
    else:
        ours = skinny_linear(x, weight, partial=True)
        assert ours.shape == (inputs // 128, num_tokens, outputs) and ours.dtype == torch.float32
        ours = ours.sum(0)
    assert ours.shape == truth.shape
    error = (ours.double() - truth).norm() / truth.norm()
    assert error < (1e-5 if ours.dtype == torch.float32 else 1e-2)


TILES = [Tile(32, 128, 3, swapped=False), Tile(64, 64, 3, swapped=True)]  # in fp32 they must fit as well


@pytest.mark.parametrize("tile", TILES, ids=["tokens first", "weights first"])
@pytest.mark.parametrize("num_tokens", [1, 20, 64, 100])
@pytest.mark.parametrize("kind", ["plain", "bias", "gated", "partial"])
def test_tiled_linear(where: Where, num_tokens: int, kind: str, tile: Tile) -> None:
    inputs, outputs = 512, 128
    x, weight = normal(where, num_tokens, inputs), normal(where, outputs, inputs, seed=1) / 16
    bias = normal(where, outputs, seed=3)
    truth = x.double() @ weight.double().t()
    if kind == "bias":
        ours, truth = tiled_linear(x, weight, bias, tile=tile), truth + bias
    elif kind == "gated":
        gate, up = truth.chunk(2, -1)
        ours, truth = tiled_linear(x, weight, tile=tile, gated=True), torch.nn.functional.silu(gate) * up
    elif kind == "partial":
        ours = tiled_linear(x, weight, tile=tile, partial=True)
        assert ours.shape == (min(4, inputs // tile.inner), num_tokens, outputs) and ours.dtype == torch.float32
        ours = ours.sum(0)
    else:
        ours = tiled_linear(x, weight, tile=tile)
    assert ours.shape == truth.shape
    error = (ours.double() - truth).norm() / truth.norm()
    assert error < (1e-5 if ours.dtype == torch.float32 else 1e-2)


def test_inputs_are_cut_for_the_programs_of_a_large_gpu_at_most() -> None:
    assert [num_splits(4096, tiles, 256) for tiles in (1, 16, 32, 64, 65, 128, 500)] == [4, 4, 4, 2, 1, 1, 1]
    assert [num_splits(inputs, 1, 256) for inputs in (256, 384, 512, 768, 1024, 3072)] == [1, 1, 2, 1, 4, 4]


@pytest.mark.parametrize("how", [{}, {"gated": True}, {"partial": True}], ids=["plain", "gated", "partial"])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 40, 64, 65, 128, 129])
def test_few_tokens_get_a_kernel_that_fits_them(how: dict[str, bool], num_tokens: int) -> None:
    """Large and small layers, and those of odd shapes, without running them."""
    used = 0
    for outputs, inputs in product((64, 96, 1024, 4096, 6144, 24576), (64, 128, 1024, 3072, 4096)):
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
        chosen = choose_linear(num_tokens, weight, **how)
        assert choose_linear(num_tokens, weight.float(), **how) is None, "they are for 16 bits"
        if chosen is None:
            continue
        used += 1
        columns = outputs // 2 if how.get("gated") else outputs
        assert isinstance(chosen, bind) and inputs % 128 == 0 and num_tokens <= 128
        tile = chosen.keywords.get("tile")
        assert columns % (32 if tile is None else tile.columns) == 0
        assert tile is not None or num_tokens <= 16, "too many for the kernel that takes all weights at once"
    assert used or num_tokens > (128 if how.get("partial") else 64)
