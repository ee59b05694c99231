"""A linear layer for few tokens, with what comes before and after it folded in.

With a handful of tokens a linear layer is the reading of its weights: 4 to 13 MB in a layer of a small model, two to
four microseconds, less than the time that it takes to start a kernel and to let it drain. So there are few kernels,
each with all that belongs together (norm before it, gate or residual addition after it), and each begins to fetch its
weights into the L2 cache while its predecessor still runs (see `launch.py`).

Every program computes a few output columns for all tokens, hence reads its weights once. The norm's factor of a row
does not depend on the column, so it can wait for the end: the products run over x * weight, unscaled, while the sum of
squares is gathered beside them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import overlaps_launches


@dataclass(frozen=True)
class SkinnyConfig:
    """Columns of a program, length of a step through the inputs, warps, steps in flight."""

    columns: int
    inner: int
    num_warps: int = 4
    num_stages: int = 4


def skinny_config(num_tokens: int, inputs: int, outputs: int, gated: bool) -> SkinnyConfig:
    """Enough programs for every multiprocessor of a large GPU where the layer has that many columns."""
    columns = 16 if gated or outputs <= 2048 else 32
    return SkinnyConfig(columns=columns, inner=256 if num_tokens <= 16 else 128)


@triton.jit
def _prefetch(pointer):  # type: ignore[no-untyped-def]
    """Ask for the cache lines of all pointers to be brought to L2, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointer], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _skinny_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr, num_tokens, eps,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    LINES: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.arange(0, TOKENS)
    inner = tl.arange(0, INNER)
    is_token = (token < num_tokens)[:, None]
    if PDL:
        line = tl.arange(0, LINES) * 64  # elements of 16 bits in a cache line
        for start in range(0, INPUTS, LINES * 64):
            _prefetch(weight_ptr + column[:, None] * INPUTS + start + line[None, :])
            if GATED:
                _prefetch(weight_ptr + (OUTPUTS + column)[:, None] * INPUTS + start + line[None, :])
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([TOKENS, COLUMNS], tl.float32)
    gate = tl.zeros([TOKENS, COLUMNS], tl.float32)
    squares = tl.zeros([TOKENS], tl.float32)
    for start in range(0, INPUTS, INNER):
        x = tl.load(x_ptr + token[:, None] * INPUTS + start + inner[None, :], mask=is_token, other=0.0)
        w = tl.load(weight_ptr + column[:, None] * INPUTS + start + inner[None, :])  # [COLUMNS, INNER]
        if NORM:
            x32 = x.to(tl.float32)
            squares += tl.sum(x32 * x32, 1)
            x = (x32 * tl.load(norm_ptr + start + inner)[None, :]).to(x.dtype)
        if GATED:
            up = tl.load(weight_ptr + (OUTPUTS + column)[:, None] * INPUTS + start + inner[None, :])
            gate = tl.dot(x, tl.trans(w), gate, input_precision="ieee")
            acc = tl.dot(x, tl.trans(up), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if NORM:
        factor = tl.rsqrt(squares / INPUTS + eps)[:, None]
        acc *= factor
        gate *= factor
    if BIAS:
        acc += tl.load(bias_ptr + column)[None, :]
    if GATED:
        acc *= gate * tl.sigmoid(gate)
    offset = token[:, None] * OUTPUTS + column[None, :]
    if ADD:
        acc += tl.load(residual_ptr + offset, mask=is_token, other=0.0)
    tl.store(out_ptr + offset, acc.to(out_ptr.dtype.element_ty), mask=is_token)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    config: SkinnyConfig | None = None,
) -> torch.Tensor:
    """x [T, in], few tokens, contiguous; weight [out, in] -> [T, out], or [T, out / 2] if gated. In 16 bits.

    in is a multiple of 256 and the result's columns are one of 32: there are no masks for the ends of weights.
    norm: weight [in] of an RMSNorm (with `eps`) that x goes through first.
    gated: weight holds a gate above an up projection; the result is silu(gate) * up.
    bias: [out], added. residual: [T, out], added last.
    """
    num_tokens, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    config = config or skinny_config(num_tokens, inputs, outputs, gated)
    out = x.new_empty(num_tokens, outputs)
    pdl = overlaps_launches(x.device)
    _skinny_linear_kernel[(outputs // config.columns,)](
        x, weight, norm, bias, residual, out, num_tokens, eps,
        INPUTS=inputs, OUTPUTS=outputs, TOKENS=max(16, triton.next_power_of_2(num_tokens)), COLUMNS=config.columns,
        INNER=config.inner, LINES=(inputs & -inputs) // 64,
        NORM=norm is not None, GATED=gated, BIAS=bias is not None, ADD=residual is not None,
        PDL=pdl, num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=pdl,
    )  # fmt: skip
    return out
