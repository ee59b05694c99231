"""Which kernel computes a linear layer with weights in FP8.

For few tokens the weights are widened, and the input stays exact. On a Hopper GPU `weight_prefetch_linear` does
this, elsewhere `widening_linear`. For more tokens the input is quantised as well (`quantise_tokens`), and tensor cores
multiply in FP8. With a scale per output channel the library computes this product. With scales of blocks it does so on
Hopper alone, for most layers (`library_has_blocks`); elsewhere `block_linear` does. From FP8 the library gives bf16
alone, so in fp16 every step counts as one of few tokens.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from nanovllm.kernels.cards import choose
from nanovllm.kernels.fp8.block_linear import block_linear, choose_block_tile
from nanovllm.kernels.fp8.quantise_tokens import quantise_tokens
from nanovllm.kernels.fp8.widening_linear import Tile, widening_linear
from nanovllm.kernels.fused.silu_and_mul import silu_and_mul
from nanovllm.kernels.launch import is_hopper
from nanovllm.kernels.linear.choice import hopper_linear

FEW_TOKENS = 64
LIBRARY = (12, 9)  # the CUDA version from which the library has scales of blocks
LIBRARY_TOKENS = 4  # with those it takes a multiple of so many tokens


@cache  # a step asks for every layer
def choose_tile(device: torch.device, num_tokens: int, layer: str, num_bytes: int) -> Tile:
    """The tile for a layer, by the table of cards. layer: as in `linear/choice.py`. num_bytes: of the weights."""
    return Tile(**choose(device, "fp8", layer, tokens=num_tokens, kib=num_bytes / 1024))


@cache
def library_has_blocks(device: torch.device, rows: int, inputs: int) -> bool:
    """Whether the library takes scales of `rows` x 128 weights. It wants a multiple of four scales for each row."""
    version = tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))
    return is_hopper(device) and version >= LIBRARY and rows == 128 and inputs % 512 == 0


def fp8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, gated: bool = False, partial: bool = False
) -> Tensor:
    """x [T, in] in 16 bits, contiguous; weight [out, in] in FP8; scale [out, 1], or [out / R, in / 128] float32
    -> [T, out].

    in is a multiple of 128; out (if gated, each half of it) and R are multiples of 64. gated: without bias; the result
    is silu(gate) * up [T, out / 2]. partial: without bias; the result may be [S, T, out] float32, to be summed over S.
    """
    if len(x) <= FEW_TOKENS or x.dtype != torch.bfloat16:
        hopper = hopper_linear(x.device)
        if hopper is not None:
            columns = len(weight) // 2 if gated else len(weight)
            tile = hopper.choose_fp8_tile(len(x), columns, x.shape[1], gated, partial)
            return hopper.weight_prefetch_linear(x, weight, bias, scale, tile=tile, gated=gated, partial=partial)
        layer = "gated" if gated else "partial" if partial else "plain"
        tile = choose_tile(x.device, min(len(x), FEW_TOKENS), layer, weight.numel())
        return widening_linear(x, weight, scale, bias, tile=tile, gated=gated, partial=partial)
    rows = len(weight) // len(scale)  # more than one: a scale for each block, and not for each channel
    in_library = rows > 1 and bias is None and library_has_blocks(x.device, rows, x.shape[1])
    small, x_scale = quantise_tokens(x, grouped=rows > 1, multiple=LIBRARY_TOKENS if in_library else 1)
    if in_library:
        blocks = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        y = scaled_mm(small, weight.t(), x_scale.t(), blocks[0], scale.t(), blocks[1], output_dtype=x.dtype)[: len(x)]
    elif rows > 1:
        tile = choose_block_tile(len(x), len(weight), x.shape[1], rows, partial)
        y = block_linear(small, x_scale, weight, scale, bias, dtype=x.dtype, tile=tile)
    else:
        # Tensor cores then sum many products before they add them in float32, as in other engines
        y = torch._scaled_mm(
            small, weight.t(), x_scale.view(-1, 1), scale.view(1, -1), bias, out_dtype=x.dtype, use_fast_accum=True
        )
    return silu_and_mul(y) if gated else y
