"""Residual addition and RMSNorm in one pass: a row is read once and both results are written."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import CACHE_LINE, overlaps_launches
from nanovllm.kernels.prefetch import prefetch

LINES = 512  # cache lines that a program asks for
MAX_AHEAD = 512  # tokens; with more, there is work enough to hide the reading of weights


@triton.jit(do_not_specialize=["split_stride", "num_rows", "num_lines"])
def _add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, ahead_ptr, eps, split_stride, num_rows, num_lines,
    SIZE: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, ADD: tl.constexpr, LINES: tl.constexpr,
    LINE: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    if AHEAD:  # noqa: SIM102 (one is known to the compiler, the other is not)
        if row >= num_rows:
            line = (row - num_rows) * LINES + tl.arange(0, LINES)
            prefetch(ahead_ptr + tl.where(line < num_lines, line, 0) * LINE)
            gdc_wait()
            return
    column = tl.arange(0, PADDED)
    exists = column < SIZE
    weight = tl.load(weight_ptr + column, mask=exists, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + row * SIZE + column, mask=exists, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(x_ptr + split * split_stride + row * SIZE + column, mask=exists, other=0.0)
    if ADD:
        x += tl.load(residual_ptr + row * SIZE + column, mask=exists, other=0.0)
        x = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * SIZE + column, x, mask=exists)
        x = x.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
    tl.store(out_ptr + row * SIZE + column, normed.to(out_ptr.dtype.element_ty), mask=exists)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    ahead: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and residual [T, H], contiguous -> (rms_norm(x + residual), x + residual); without a residual, of x alone.

    x may be in parts, [S, T, H] float32, whose sum is meant (see `skinny_linear`); then there is a residual. The sum is
    rounded to the dtype of the weights before it is normalised, as it is where it is stored.

    ahead: weights that the next kernel will read. Multiprocessors that have no row fetch them into the L2 cache.
    """
    size = x.shape[-1]
    splits = x.shape[0] if x.dim() == 3 else 1
    out = weight.new_empty(x.shape[-2], size)  # [T, H]
    total = x if residual is None else torch.empty_like(out)
    pdl = overlaps_launches(x.device)
    num_rows = out.shape[0]
    num_lines = 0
    if ahead is not None and pdl and num_rows <= MAX_AHEAD:
        num_lines = ahead.numel() * ahead.element_size() // CACHE_LINE
    _add_rms_norm_kernel[(num_rows + triton.cdiv(num_lines, LINES),)](
        x, residual, weight, out, total, ahead, eps, x.stride(0) if x.dim() == 3 else 0, num_rows, num_lines,
        SIZE=size, PADDED=triton.next_power_of_2(size), SPLITS=splits, ADD=residual is not None, LINES=LINES,
        LINE=CACHE_LINE // weight.element_size(), AHEAD=num_lines > 0, PDL=pdl,
        num_warps=4 if size <= 2048 else 8, launch_pdl=pdl,
    )  # fmt: skip
    return out, total
