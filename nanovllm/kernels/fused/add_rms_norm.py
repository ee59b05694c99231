"""Residual addition and RMSNorm in one pass: a row is read once and both results are written."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import overlaps_launches

FEW_ROWS = 64  # with so few rows each may have more threads: the next kernel waits less


@triton.jit
def _add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, eps,
    SIZE: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    if PDL:
        gdc_launch_dependents()
    column = tl.arange(0, PADDED)
    exists = column < SIZE
    weight = tl.load(weight_ptr + column, mask=exists, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + row * SIZE + column, mask=exists, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(x_ptr + (split * num_rows + row) * SIZE + column, mask=exists, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * SIZE + column, mask=exists, other=0.0)
        x = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * SIZE + column, x, mask=exists)
        x = x.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
    tl.store(out_ptr + row * SIZE + column, normed.to(out_ptr.dtype.element_ty), mask=exists)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and residual [T, H], contiguous -> (rms_norm(x + residual), x + residual); without a residual (rms_norm(x), x).

    x may come in parts [S, T, H], which are summed over S in float32 (see `tiled_linear` and `grouped_mlp`); then there
    is a residual. The sum is rounded to the dtype of the residual, as it is stored, before it is normalised.
    """
    size = x.shape[-1]
    splits = x.shape[0] if x.dim() == 3 else 1
    out = torch.empty_like(x if residual is None else residual)  # [T, H]
    total = x if residual is None else torch.empty_like(out)
    pdl = overlaps_launches(x.device)
    _add_rms_norm_kernel[(out.shape[0],)](
        x, residual, weight, out, total, eps,
        SIZE=size, PADDED=triton.next_power_of_2(size), SPLITS=splits, ADD=residual is not None, PDL=pdl,
        num_warps=8 if size > 2048 or len(out) <= FEW_ROWS else 4, launch_pdl=pdl,
    )  # fmt: skip
    return out, total
