"""A linear layer for few tokens that reads its weights in FP8 and multiplies them in the dtype of its input.

With few tokens the products are not what takes the time. So faster products in FP8, for which the input would have to
be rounded, would gain nothing. The weights are widened in registers, which is exact: bf16 and fp16 have every number of
e4m3. The scales are applied to sums in float32: a scale per channel once, at the end, and scales of blocks after each
block.

Everything else is as in `tiled_linear`, whose docstring explains it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from nanovllm.kernels.launch import CACHE_LINE, overlaps_launches, shared_memory
from nanovllm.kernels.linear.tiled_linear import MAX_TILE, num_splits, rows_of_weights

AHEAD = 2048  # bytes, of each column, that are asked for before the predecessor has finished
GROUP = 128  # inputs of a scale, if scales are those of blocks


@dataclass(frozen=True)
class Tile:
    """How a program computes its part.

    columns: outputs of a program (if gated, of each half). inner: inputs of a step of its loop. num_stages: steps under
    way. swapped: whether the product is W x^T. programs: with `partial`, how many programs there may be at most after
    the inputs were cut.
    """

    columns: int
    inner: int
    num_stages: int
    swapped: bool
    programs: int


@triton.jit
def _widened(weight_ptr, x):  # type: ignore[no-untyped-def]
    """Weights in the dtype of x, by way of fp16 and fp32: Ada has no instruction from FP8 to bf16."""
    w = tl.load(weight_ptr, eviction_policy="evict_first")
    return w.to(tl.float16).to(tl.float32).to(x.dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def _widening_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, num_tokens, inputs, outputs, depth,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr,
    LINE: tl.constexpr, GROUPED: tl.constexpr, SWAPPED: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    is_token = (token < num_tokens)[:, None]
    inner = part * depth + tl.arange(0, INNER)
    row, up_row = rows_of_weights(weight_ptr, column, inputs, outputs, part * depth, LINES, LINE, GATED, PDL)
    if GROUPED:  # the columns of a program are in one block
        groups = inputs // INNER
        group_ptr = scale_ptr + tl.program_id(0) * COLUMNS // ROWS * groups + part * (depth // INNER)
        up_group_ptr = group_ptr + outputs // ROWS * groups
        scale = tl.load(group_ptr)
        up_scale = tl.load(up_group_ptr) if GATED else scale
    if PDL:
        gdc_wait()
    x_ptr += token[:, None].to(tl.int64) * inputs + inner[None, :]
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
        w = _widened(weight_ptr + start, x)  # [COLUMNS, INNER]
        if GROUPED:
            # The next step's scales are asked for now. After the last step there are none: its own are read again.
            next_group = tl.minimum(start + INNER, depth - INNER) // INNER
            next_scale = tl.load(group_ptr + next_group)
            if SWAPPED:
                acc += tl.dot(w, tl.trans(x), input_precision="ieee") * scale
            else:
                acc += tl.dot(x, tl.trans(w), input_precision="ieee") * scale
            scale = next_scale
        elif SWAPPED:
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if GATED:
            up = _widened(up_ptr + start, x)
            if GROUPED:
                next_up_scale = tl.load(up_group_ptr + next_group)
                if SWAPPED:
                    acc_up += tl.dot(up, tl.trans(x), input_precision="ieee") * up_scale
                else:
                    acc_up += tl.dot(x, tl.trans(up), input_precision="ieee") * up_scale
                up_scale = next_up_scale
            elif SWAPPED:
                acc_up = tl.dot(up, tl.trans(x), acc_up, input_precision="ieee")
            else:
                acc_up = tl.dot(x, tl.trans(up), acc_up, input_precision="ieee")
    if SWAPPED:
        acc = tl.trans(acc)
        acc_up = tl.trans(acc_up)
    if not GROUPED:
        acc *= tl.load(scale_ptr + column)[None, :]
    if GATED:
        if not GROUPED:
            acc_up *= tl.load(scale_ptr + outputs + column)[None, :]
        acc = acc * tl.sigmoid(acc) * acc_up
    if BIAS:
        acc += tl.load(bias_ptr + column)[None, :]
    out_ptr += (part * num_tokens + token)[:, None].to(tl.int64) * outputs + column[None, :]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=is_token)


def widening_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None,
    *, tile: Tile, gated: bool = False, partial: bool = False,
) -> Tensor:  # fmt: skip
    """x [T, in], contiguous; weight [out, in] in FP8; scale [out, 1], or [out / R, in / 128] -> [T, out].

    gated, partial: as in `tiled_linear`, which says what is returned then. The ends of weights have no masks: in is a
    multiple of 128; the result has a multiple of the tile's columns, and R is one as well.
    """
    num_tokens, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    rows = weight.shape[0] // scale.shape[0]
    grouped = rows > 1  # by the rows: of 128 inputs, blocks have one column of scales as well
    tokens = min(MAX_TILE, max(16, triton.next_power_of_2(num_tokens)))
    grid = outputs // tile.columns, triton.cdiv(num_tokens, tokens)
    inner = GROUP if grouped else min(tile.inner, inputs & -inputs)
    splits = num_splits(inputs, grid[0] * grid[1], inner, tile.programs) if partial else 1
    depth = inputs // splits
    shape = (splits, num_tokens, outputs) if partial else (num_tokens, outputs)
    out = x.new_empty(shape, dtype=torch.float32 if partial else x.dtype)
    step_bytes = inner * (tokens * x.element_size() + (2 if gated else 1) * tile.columns)
    pdl = overlaps_launches(x.device)
    _widening_linear_kernel[(grid[0], splits, grid[1])](
        x, weight, scale, bias, out, num_tokens, inputs, outputs, depth, TOKENS=tokens, COLUMNS=tile.columns,
        INNER=inner, ROWS=rows, LINES=min(depth & -depth, AHEAD // 2 if gated else AHEAD) // CACHE_LINE,
        LINE=CACHE_LINE, GROUPED=grouped, SWAPPED=tile.swapped, GATED=gated, BIAS=bias is not None, PDL=pdl,
        num_warps=4, num_stages=max(1, min(tile.num_stages, shared_memory(x.device) // step_bytes - 1)),
        launch_pdl=pdl,
    )  # fmt: skip
    return out
