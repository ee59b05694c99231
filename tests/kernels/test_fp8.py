"""Linear layers with weights in FP8, against float64. fp32 in the interpreter; on a GPU in fp16 and bf16."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from nanovllm.kernels.fp8.block_linear import FEW_TOKENS as SMALL_TILES
from nanovllm.kernels.fp8.block_linear import BlockTile, block_linear, choose_block_tile
from nanovllm.kernels.fp8.fp8_linear import FEW_TOKENS, choose_tile, fp8_linear
from nanovllm.kernels.fp8.quantise_tokens import quantise_tokens
from nanovllm.kernels.fp8.widening_linear import Tile, widening_linear
from nanovllm.kernels.fused.add_rms_norm import add_rms_norm
from nanovllm.kernels.linear.choice import choose_norm_linear, hopper_linear
from nanovllm.kernels.linear.tiled_linear import num_splits
from tests.kernels.as_card import as_card
from tests.kernels.test_fused import Where, normal

FP8 = torch.float8_e4m3fn
ROWS = {"channel": 1, "blocks": 128, "cut blocks": 64}
KINDS = "plain", "bias", "gated", "partial"


@pytest.fixture(
    params=[
        pytest.param(("cpu", torch.float32), id="interpreter"),
        pytest.param(("cuda", torch.float16), id="fp16", marks=pytest.mark.gpu),
        pytest.param(("cuda", torch.bfloat16), id="bf16", marks=pytest.mark.gpu),
    ]
)
def where(request: pytest.FixtureRequest) -> Where:
    chosen: Where = request.param
    return chosen


def weights(device: str, outputs: int, inputs: int, rows: int) -> tuple[Tensor, Tensor]:
    """All numbers of e4m3 but NaN are among them, subnormal ones too. Scales differ, so that a wrong one shows."""
    bytes_ = torch.arange(outputs * inputs, dtype=torch.int64) * 7 % 254
    weight = (bytes_ + (bytes_ >= 127)).to(torch.uint8).view(FP8).view(outputs, inputs).to(device)
    columns = inputs if rows == 1 else 128
    shape = outputs // rows, inputs // columns
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(3)).add(0.05).mul(2e-4).to(device)
    return weight, scale


def truth(x: Tensor, weight: Tensor, scale: Tensor, kind: str, bias: Tensor | None) -> Tensor:
    rows, columns = (whole // parts for whole, parts in zip(weight.shape, scale.shape, strict=True))
    wide = weight.double() * scale.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    y = x.double() @ wide.t()
    if kind == "gated":
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up
    return y if bias is None else y + bias


def error_of(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


TILES = [Tile(32, 256, 4, False, 256), Tile(64, 128, 3, True, 64), Tile(32, 128, 2, False, 1)]
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
# The interpreter is slow. In the fast tier each kind of layer and of scales meets the others once.
FAST = {(1, "channel", "gated"), (1, "blocks", "gated"), (17, "cut blocks", "partial"), (17, "channel", "bias")}


def cases() -> list[Any]:
    found = []
    for tile, num_tokens in zip(TILES, (1, 17, 70), strict=True):
        for scales in ROWS:
            for kind in KINDS:
                slow = () if (num_tokens, scales, kind) in FAST else pytest.mark.slow
                found.append(pytest.param(num_tokens, tile, scales, kind, marks=slow))
    return found


@pytest.mark.parametrize(("num_tokens", "tile", "scales", "kind"), cases())
def test_widening_linear(where: Where, num_tokens: int, tile: Tile, scales: str, kind: str) -> None:
    """Exact but for the sums: all weights are widened without rounding."""
    inputs, outputs = 512, 256
    x, (weight, scale) = normal(where, num_tokens, inputs), weights(where[0], outputs, inputs, ROWS[scales])
    bias = normal(where, outputs, seed=3) if kind == "bias" else None
    how = {} if kind in ("plain", "bias") else {kind: True}
    found = widening_linear(x, weight, scale, bias, tile=tile, **how)
    if kind == "partial":
        inner = 128 if scales != "channel" else tile.inner
        splits = num_splits(inputs, outputs // tile.columns * -(-num_tokens // 64), inner, tile.programs)
        assert found.dtype == torch.float32 and found.shape == (splits, num_tokens, outputs)
        found = found.sum(0)
    expected = truth(x, weight, scale, kind, bias)
    assert found.shape == expected.shape
    assert error_of(found, expected) < ROUNDING[found.dtype]


@pytest.mark.gpu
def test_an_input_of_more_than_two_billion_numbers() -> None:
    """In fp16 every step is one of few tokens, however many it has."""
    x = torch.zeros(2**17 + 64, 2**14, dtype=torch.float16, device="cuda")
    x[-3:] = normal(("cuda", torch.float16), 3, 2**14)
    weight, scale = weights("cuda", 64, 2**14, 1)
    expected = truth(x[-3:], weight, scale, "plain", None)
    assert error_of(widening_linear(x, weight, scale, tile=TILES[1])[-3:], expected) < ROUNDING[torch.float16]
    assert error_of(fp8_linear(x, weight, scale)[-3:], expected) < ROUNDING[torch.float16]


@pytest.mark.parametrize("kind", ["bias", pytest.param("gated", marks=pytest.mark.slow)])
def test_a_layer_of_128_inputs_has_one_scale_for_many_rows(where: Where, kind: str) -> None:
    """Blocks then have as many columns of scales as channels have: one."""
    x, (weight, scale) = normal(where, 3, 128), weights(where[0], 256, 128, 64)
    assert scale.shape == (4, 1)
    bias = normal(where, 256, seed=3) if kind == "bias" else None
    found = widening_linear(x, weight, scale, bias, tile=TILES[1], gated=kind == "gated")
    assert error_of(found, truth(x, weight, scale, kind, bias)) < ROUNDING[found.dtype]


@pytest.mark.parametrize("grouped", [True, False])
def test_quantise_tokens(where: Where, grouped: bool) -> None:
    """To the nearest number, by the largest of a token or of 128 of its numbers. Zeros stay zeros."""
    x = 3 * normal(where, 5, 384) * torch.logspace(-2, 2, 5, device=where[0])[:, None].to(where[1])
    x[1, :128], x[2] = 0, 0
    small, scale = quantise_tokens(x, grouped=grouped)
    assert small.dtype == FP8 and small.shape == x.shape and scale.shape == (3 if grouped else 1, 5)
    parts = x.float().view(5, -1, 128 if grouped else 384)
    largest = parts.abs().amax(-1).t()
    assert torch.allclose(scale, torch.where(largest > 0, largest / 448, 1.0))
    assert not small[2].float().any()
    padded, padded_scale = quantise_tokens(x, grouped=grouped, multiple=4)
    assert padded.shape == (8, 384) and torch.equal(padded[:5].float(), small.float())
    assert torch.equal(padded_scale[:, :5], scale)
    if where[0] == "cpu":
        return  # Triton's interpreter gets the rounding to FP8 wrong, from 240 on by a factor
    found = small.float().view_as(parts) * scale.t()[..., None]
    # A number has four bits; below 2^-6 the steps are of 2^-9
    step = torch.maximum(parts.abs() / 8, scale.t()[..., None] * 2**-9)
    assert ((found - parts).abs() <= 0.5001 * step).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_token_that_is_not_a_number_spoils_nobody_else(dtype: torch.dtype) -> None:
    x = normal(("cuda", dtype), 3, 256)
    fine = quantise_tokens(x, grouped=False)
    x[1, 7] = float("nan")
    small, scale = quantise_tokens(x, grouped=False)
    assert small[1, 7].float().isnan()
    assert torch.equal(small[[0, 2]].float(), fine[0][[0, 2]].float()) and torch.equal(scale[:, 2], fine[1][:, 2])


@pytest.mark.parametrize(
    ("num_tokens", "rows", "with_bias"),
    [
        (5, 128, True),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in ((70, 64, False), (SMALL_TILES + 1, 128, True))),
    ],
)
def test_block_linear(where: Where, num_tokens: int, rows: int, with_bias: bool) -> None:
    """The product of what was quantised, to the rounding of its sums: of 14 bits, on the tensor cores of Hopper."""
    inputs, outputs = 384, 384
    weight, scale = weights(where[0], outputs, inputs, rows)
    small, x_scale = quantise_tokens(normal(where, num_tokens, inputs), grouped=True)
    bias = normal(where, outputs, seed=3) if with_bias else None
    x = small.double().view(num_tokens, -1, 128) * x_scale.t().double()[..., None]
    expected = truth(x.flatten(1), weight, scale, "plain", bias)
    limit = max(ROUNDING[where[1]], 0 if where[0] == "cpu" else 1e-3)
    tile = choose_block_tile(num_tokens, outputs, inputs, rows, partial=False)
    assert error_of(block_linear(small, x_scale, weight, scale, bias, dtype=where[1], tile=tile), expected) < limit
    if bias is None:
        parts = block_linear(small, x_scale, weight, scale, dtype=where[1], tile=BlockTile(64, 64, 4, splits=3))
        assert parts.shape == (3, *expected.shape) and parts.dtype == torch.float32
        assert error_of(parts.sum(0), expected) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scales", ROWS)
@pytest.mark.parametrize("inputs", [128, 1024, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_linear(dtype: torch.dtype, inputs: int, scales: str, kind: str) -> None:
    """Whatever computes it. For few tokens only sums are rounded; for more, in bf16, so is the input, to four bits."""
    outputs = 768
    weight, scale = weights("cuda", outputs, inputs, ROWS[scales])
    for num_tokens in (1, 3, 16, 33, FEW_TOKENS, FEW_TOKENS + 1, 200, 700):
        x = normal(("cuda", dtype), num_tokens, inputs)
        bias = normal(("cuda", dtype), outputs, seed=3) if kind == "bias" else None
        how = {} if kind in ("plain", "bias") else {kind: True}
        found = fp8_linear(x, weight, scale, bias, **how)
        found = found.sum(0) if found.dim() == 3 else found
        expected = truth(x, weight, scale, kind, bias)
        exact = num_tokens <= FEW_TOKENS or dtype != torch.bfloat16
        added = 0 if exact or bias is None else bias  # beside a large bias the error of the product would not show
        error = error_of(found - added, expected - added)
        assert error < (ROUNDING[dtype] if exact else 0.06), (num_tokens, error)
        assert exact or error > 0.005, "the input was not quantised?"


@pytest.mark.gpu
@pytest.mark.parametrize(("parts", "dtype"), [(4, torch.bfloat16), (1, torch.float16), (0, torch.bfloat16)])
@pytest.mark.parametrize("kind", ["plain", "bias", "gated"])
@pytest.mark.parametrize("scales", ROWS)
@pytest.mark.parametrize("inputs", [2048, 4096])
def test_the_norm_inside(inputs: int, scales: str, kind: str, parts: int, dtype: torch.dtype) -> None:
    """The sum is that of `add_rms_norm` bit for bit, and the result that of the same product."""
    device, outputs, gated = torch.device("cuda", torch.cuda.current_device()), 768, kind == "gated"
    weight, scale = weights("cuda", outputs, inputs, ROWS[scales])
    bias = normal(("cuda", dtype), outputs, seed=3) if kind == "bias" else None
    norm_weight, asked = normal(("cuda", dtype), inputs, seed=4), 0
    for num_tokens in (1, 2, 3, 4):
        kernel = choose_norm_linear(num_tokens, weight, gated=gated)
        if kernel is None:
            continue
        asked += 1
        shape = (parts, num_tokens, inputs) if parts else (num_tokens, inputs)
        x, residual = (
            normal(("cuda", torch.float32 if parts else dtype), *shape),
            normal(("cuda", dtype), num_tokens, inputs),
        )
        ours, total = kernel(x, residual, norm_weight, 1e-6, weight, bias, scale)
        normed, expected = add_rms_norm(x, residual, norm_weight, 1e-6)
        assert torch.equal(total, expected)
        assert error_of(ours, truth(normed, weight, scale, kind, bias)) < ROUNDING[dtype], num_tokens
    assert asked or hopper_linear(device) is None


def test_every_layer_gets_a_tile_that_fits() -> None:
    """On every card with FP8, with no more columns than divide a part of a layer."""
    for card in (8, 9), (9, 0), (10, 0), (12, 0):
        with as_card(card):
            for num_tokens in (1, 16, 17, 33, 64):
                for layer in ("plain", "gated", "partial"):
                    for size in (2**20, 2**25, 2**28):
                        tile = choose_tile(torch.device("cpu"), num_tokens, layer, size)
                        assert tile.columns in (32, 64) and tile.inner >= 128
