"""A linear layer for many tokens whose weights have a scale for each block, by products in FP8.

Tensor cores multiply numbers in FP8 at twice the rate of bf16. The input is quantised by groups of 128 ("DeepSeek-V3
Technical Report", 2024, section 3.3.2), so that an outlier costs precision in its own group alone. After each group the
sum is scaled and added to the result in float32. The own sums of tensor cores are less exact in FP8, and this way they
never have more than 128 products.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import overlaps_launches, shared_memory
from nanovllm.kernels.linear.tiled_linear import num_splits

GROUP = 128
FEW_TOKENS = 256  # with more tokens the tiles are larger: there are enough programs then, and arithmetic is the limit
PROGRAMS = 512  # at most, after inputs were cut: several for each multiprocessor, since a single one waits for L2
BAND = 16  # tiles of outputs that are computed next to each other, so that their weights stay in the L2 cache


@triton.jit(do_not_specialize=["num_tokens"])
def _block_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, num_tokens, inputs, outputs, groups,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BAND: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tiles, token_tiles = outputs // COLUMNS, tl.cdiv(num_tokens, TOKENS)
    first = tl.program_id(0) // (BAND * token_tiles) * BAND
    band = tl.minimum(tiles - first, BAND)
    place = tl.program_id(0) % (BAND * token_tiles)
    tile = first + place % band
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    token = place // band * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    inner = tl.arange(0, GROUP)
    part = tl.program_id(1)
    first_group = part * groups
    x_ptr += token[:, None].to(tl.int64) * inputs + first_group * GROUP + inner[None, :]
    weight_ptr += column[:, None].to(tl.int64) * inputs + first_group * GROUP + inner[None, :]
    x_scale_ptr += first_group * num_tokens + token
    scale_ptr += tile * COLUMNS // ROWS * (inputs // GROUP) + first_group
    scale = tl.load(scale_ptr)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x_scale = tl.load(x_scale_ptr, mask=is_token, other=0.0)
    acc = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for group in range(0, groups):
        x = tl.load(x_ptr + group * GROUP, mask=is_token[:, None], other=0.0)  # [TOKENS, GROUP]
        w = tl.load(weight_ptr + group * GROUP)  # [COLUMNS, GROUP]
        # The next group's scales are asked for now. After the last group there are none: its own are read again.
        following = tl.minimum(group + 1, groups - 1)
        next_x_scale = tl.load(x_scale_ptr + following * num_tokens, mask=is_token, other=0.0)
        next_scale = tl.load(scale_ptr + following)
        acc += tl.dot(x, tl.trans(w)) * (x_scale * scale)[:, None]
        x_scale, scale = next_x_scale, next_scale
    if BIAS:
        acc += tl.load(bias_ptr + column)[None, :]
    out_ptr += (part * num_tokens + token)[:, None].to(tl.int64) * outputs + column[None, :]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=is_token[:, None])


class BlockTile(NamedTuple):
    """Tokens and output columns of a program, its warps, and parts that the inputs are cut into."""

    tokens: int
    columns: int
    num_warps: int
    splits: int


def choose_block_tile(num_tokens: int, outputs: int, inputs: int, rows: int, partial: bool) -> BlockTile:
    """rows: of the weights, that share a scale. If a `partial` layer would have few programs, its inputs are cut."""
    if num_tokens > FEW_TOKENS:
        return BlockTile(128, min(128, rows), 8, 1)
    tiles = outputs // 64 * triton.cdiv(num_tokens, 64)
    return BlockTile(64, 64, 4, num_splits(inputs, tiles, GROUP, PROGRAMS) if partial else 1)


def block_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype,
    tile: BlockTile,
) -> Tensor:  # fmt: skip
    """x [T, in] and its scales [in / 128, T], by `quantise_tokens`; weight [out, in] in FP8; scale [out / R, in / 128]
    -> [T, out] in `dtype`; if the inputs are cut, without bias, [S, T, out] float32, to be summed over S. R is 64 or
    128; in is a multiple of 128, and out is one of R."""
    num_tokens, inputs = x.shape
    outputs = weight.shape[0]
    tokens, columns, num_warps, splits = tile
    shape = (num_tokens, outputs) if splits == 1 else (splits, num_tokens, outputs)
    out = x.new_empty(shape, dtype=dtype if splits == 1 else torch.float32)
    pdl = overlaps_launches(x.device)
    step_bytes = (tokens + columns) * GROUP
    _block_linear_kernel[(outputs // columns * triton.cdiv(num_tokens, tokens), splits)](
        x, x_scale, weight, scale, bias, out, num_tokens, inputs, outputs, inputs // (GROUP * splits), TOKENS=tokens,
        COLUMNS=columns, GROUP=GROUP, ROWS=outputs // len(scale), BAND=BAND, BIAS=bias is not None, PDL=pdl,
        num_warps=num_warps, num_stages=min(4, shared_memory(x.device) // step_bytes - 1), launch_pdl=pdl,
    )  # fmt: skip
    return out
