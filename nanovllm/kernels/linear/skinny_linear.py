"""A linear layer for few tokens, with the gate that may follow it folded in.

With a handful of tokens a linear layer is the reading of its weights: 4 to 13 MB in a layer of a small model. That
takes two to four microseconds, less than a kernel takes to start and to drain. So all weights should be on their way at
once, and early. Every program owns a few output columns and at most 1,024 inputs, and asks for all its weights in one
go. It does so while its predecessor still runs (see `launch.py`), because weights depend on no other kernel.

Within a program each warp multiplies its own part of the inputs, so that no warp waits for a long chain of products.
The parts are summed at the end.

A layer with few columns and many inputs would keep too few multiprocessors busy. `partial=True` cuts the inputs among
programs (split-K) and leaves the sums to the norm that follows, which reads the result anyway.

Larger layers, and more tokens, are for `tiled_linear`: `kernels/cards.toml` has the table.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import overlaps_launches

NUM_WARPS = 4
MAX_INNER = 1024  # inputs that a program takes at once


def num_columns(outputs: int, gated: bool) -> int:
    """Columns of a program, of each half if gated. So a program has 32 to 64 KiB of weights, and there are enough
    programs for every multiprocessor of a large GPU."""
    return 32 if outputs >= 4096 and not gated else 16


def inner_length(inputs: int) -> int:
    """The largest power of two that divides `inputs`, up to `MAX_INNER`."""
    return min(inputs & -inputs, MAX_INNER)


@triton.jit(do_not_specialize=["num_tokens"])
def _skinny_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_tokens,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    PARTS: tl.constexpr, STEPS: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.arange(0, PARTS)[:, None, None] * (INNER // PARTS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.arange(0, TOKENS)
    is_token = token < num_tokens
    inner = tl.program_id(1) * (STEPS * INNER) + part + tl.arange(0, INNER // PARTS)[None, None, :]
    if PDL:
        gdc_launch_dependents()
    weight_ptr += column[None, :, None] * INPUTS + inner
    x_ptr += token[None, :, None] * INPUTS + inner
    w = tl.load(weight_ptr, eviction_policy="evict_first")  # [PARTS, COLUMNS, INNER / PARTS]
    if GATED:
        up = tl.load(weight_ptr + OUTPUTS * INPUTS, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr, mask=is_token[None, :, None], other=0.0)  # [PARTS, TOKENS, INNER / PARTS]
    acc = tl.dot(x, tl.permute(w, (0, 2, 1)), input_precision="ieee")  # [PARTS, TOKENS, COLUMNS]
    if GATED:
        acc_up = tl.dot(x, tl.permute(up, (0, 2, 1)), input_precision="ieee")
    for step in tl.static_range(1, STEPS):
        x = tl.load(x_ptr + step * INNER, mask=is_token[None, :, None], other=0.0)
        w = tl.load(weight_ptr + step * INNER, eviction_policy="evict_first")
        acc = tl.dot(x, tl.permute(w, (0, 2, 1)), acc, input_precision="ieee")
        if GATED:
            up = tl.load(weight_ptr + OUTPUTS * INPUTS + step * INNER, eviction_policy="evict_first")
            acc_up = tl.dot(x, tl.permute(up, (0, 2, 1)), acc_up, input_precision="ieee")
    acc = tl.sum(acc, 0)  # [TOKENS, COLUMNS]
    if BIAS:
        acc += tl.load(bias_ptr + column)[None, :]
    if GATED:
        acc = acc * tl.sigmoid(acc) * tl.sum(acc_up, 0)
    out_ptr += (tl.program_id(1) * num_tokens + token)[:, None] * OUTPUTS + column[None, :]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=is_token[:, None])


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, partial: bool = False
) -> Tensor:
    """`tiled_linear` for few tokens. The number of the result's columns is a multiple of 32."""
    num_tokens, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    columns, inner = num_columns(outputs, gated), inner_length(inputs)
    splits = inputs // inner if partial else 1
    shape = (splits, num_tokens, outputs) if partial else (num_tokens, outputs)
    out = x.new_empty(shape, dtype=torch.float32 if partial else x.dtype)
    pdl = overlaps_launches(x.device)
    _skinny_linear_kernel[(outputs // columns, splits)](
        x, weight, bias, out, num_tokens,
        INPUTS=inputs, OUTPUTS=outputs, TOKENS=max(16, triton.next_power_of_2(num_tokens)), COLUMNS=columns,
        INNER=inner, PARTS=NUM_WARPS, STEPS=inputs // (inner * splits), GATED=gated, BIAS=bias is not None,
        PDL=pdl, num_warps=NUM_WARPS, launch_pdl=pdl,
    )  # fmt: skip
    return out
