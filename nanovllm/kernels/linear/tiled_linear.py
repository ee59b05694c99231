"""A linear layer for up to some tens of tokens.

This is the tiled matrix product of every textbook: a program owns a tile of the output and walks along the inputs, with
the next tiles of weights on their way to shared memory while it multiplies. Three things fit it to few tokens.

*The weights lead.* Hopper's matrix instruction takes at least 64 rows. A layer has so many output columns, but a step
often has fewer tokens. So for few tokens the product is computed transposed: W x^T.

*Enough programs.* A layer with few columns has not enough tiles of output for all multiprocessors of a large GPU. With
`partial=True` the inputs are cut among programs as well (split-K), and the sums are left to the norm that follows,
which reads the result anyway.

*An early start.* While its predecessor still runs, a program asks for the weights that it will need first (see
`launch.py`). The library's kernels do not do that.

`kernels/cards.toml` has the table of which kernel is used when.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import CACHE_LINE, overlaps_launches, prefetch_l2

MAX_TILE = 64  # tokens
PROGRAMS = 128  # inputs are cut until there are so many: about one for each multiprocessor of a large GPU
MAX_SPLITS = 4  # parts of a result; each is written and read in float32
AHEAD = 1024  # inputs, of each column, whose weights are asked for before the predecessor has finished


@dataclass(frozen=True)
class Tile:
    """Output columns of a program (if gated, of each half), inputs of a step, steps under way, whether it is W x^T."""

    columns: int
    inner: int
    num_stages: int
    swapped: bool


@triton.jit
def rows_of_weights(  # type: ignore[no-untyped-def]
    weight_ptr, column, inputs, outputs, begin,
    LINES: tl.constexpr, LINE: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Where the weights of these output columns begin, and those of the up projection. With PDL the first LINES cache
    lines of each, from input `begin` on, are prefetched; the caller then waits for the predecessor."""
    row = weight_ptr + column[:, None].to(tl.int64) * inputs
    up_row = weight_ptr + (outputs + column[:, None]).to(tl.int64) * inputs
    if PDL:
        gdc_launch_dependents()
        line = begin + (tl.arange(0, LINES) * LINE)[None, :]
        prefetch_l2(row + line)
        if GATED:
            prefetch_l2(up_row + line)
    return row, up_row


@triton.jit(do_not_specialize=["num_tokens"])
def _tiled_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_tokens, inputs, outputs, depth,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
    SWAPPED: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    is_token = (token < num_tokens)[:, None]
    inner = part * depth + tl.arange(0, INNER)
    row, up_row = rows_of_weights(weight_ptr, column, inputs, outputs, part * depth, LINES, LINE, GATED, PDL)
    if PDL:
        gdc_wait()
    x_ptr += token[:, None] * inputs + inner[None, :]
    weight_ptr = row + inner[None, :]
    up_ptr = up_row + inner[None, :]
    if SWAPPED:
        acc = tl.zeros([COLUMNS, TOKENS], tl.float32)
        acc_up = tl.zeros([COLUMNS, TOKENS], tl.float32)
    else:
        acc = tl.zeros([TOKENS, COLUMNS], tl.float32)
        acc_up = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for start in range(0, depth, INNER):
        x = tl.load(x_ptr + start, mask=is_token, other=0.0)  # [TOKENS, INNER]
        w = tl.load(weight_ptr + start, eviction_policy="evict_first")  # [COLUMNS, INNER]
        if SWAPPED:
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if GATED:
            up = tl.load(up_ptr + start, eviction_policy="evict_first")
            if SWAPPED:
                acc_up = tl.dot(up, tl.trans(x), acc_up, input_precision="ieee")
            else:
                acc_up = tl.dot(x, tl.trans(up), acc_up, input_precision="ieee")
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_up
    if SWAPPED:
        acc = tl.trans(acc)
    if BIAS:
        acc += tl.load(bias_ptr + column)[None, :]
    out_ptr += (part * num_tokens + token)[:, None] * outputs + column[None, :]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=is_token)


def num_splits(inputs: int, tiles: int, inner: int, programs: int = PROGRAMS) -> int:
    """Into how many parts to cut the inputs of a layer that has so many tiles of output, for `programs` programs at
    most. A power of two; each part is a multiple of `inner`."""
    splits = 1
    while splits < MAX_SPLITS and 2 * splits * tiles <= programs and inputs % (2 * splits * inner) == 0:
        splits *= 2
    return splits


def tiled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: Tile, gated: bool = False, partial: bool = False
) -> Tensor:
    """x [T, in], contiguous; weight [out, in] -> [T, out], or [T, out / 2] if gated. In 16 bits.

    bias: [out], added. gated: weight holds a gate above an up projection; the result is silu(gate) * up.
    partial: without bias and gate -> [S, T, out] float32, to be summed over S.

    The ends of weights have no masks. So in is a multiple of 128, and the result has a multiple of the tile's columns.
    """
    num_tokens, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    tokens = min(MAX_TILE, max(16, triton.next_power_of_2(num_tokens)))
    grid = outputs // tile.columns, triton.cdiv(num_tokens, tokens)
    inner = min(tile.inner, inputs & -inputs)
    splits = num_splits(inputs, grid[0] * grid[1], inner) if partial else 1
    depth = inputs // splits
    shape = (splits, num_tokens, outputs) if partial else (num_tokens, outputs)
    out = x.new_empty(shape, dtype=torch.float32 if partial else x.dtype)
    line = CACHE_LINE // x.element_size()
    ahead = AHEAD // 2 if gated else AHEAD
    pdl = overlaps_launches(x.device)
    _tiled_linear_kernel[(grid[0], splits, grid[1])](
        x, weight, bias, out, num_tokens, inputs, outputs, depth, TOKENS=tokens, COLUMNS=tile.columns, INNER=inner,
        LINES=min(depth & -depth, ahead) // line, LINE=line, SWAPPED=tile.swapped, GATED=gated, BIAS=bias is not None,
        PDL=pdl, num_warps=4, num_stages=tile.num_stages, launch_pdl=pdl,
    )  # fmt: skip
    return out
