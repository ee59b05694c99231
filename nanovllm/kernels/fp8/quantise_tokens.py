"""Quantise the input of a product in FP8: each token, or each 128 numbers of a token, get a scale by the largest."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import overlaps_launches

GROUP = 128
FP8, FP8_MAX = torch.float8_e4m3fn, 448.0


@triton.jit(do_not_specialize=["stride"])
def _quantise_tokens_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, scale_ptr, stride, MAX: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr,
    GROUP: tl.constexpr, GROUPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, PADDED)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    exists = group < GROUPS
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + token * (GROUPS * GROUP) + place, mask=exists[:, None], other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 1)  # [PADDED]
    if not GROUPED:
        largest = tl.max(largest, 0) + tl.zeros_like(largest)
    scale = tl.where(largest > 0, largest / MAX, 1.0)
    # The conversion rounds to nearest. NaN stays NaN, and spoils this token alone.
    tl.store(
        out_ptr + token * (GROUPS * GROUP) + place,
        (x / scale[:, None]).to(out_ptr.dtype.element_ty),
        mask=exists[:, None],
    )
    if GROUPED:
        tl.store(scale_ptr + group * stride + token, scale, mask=exists)
    else:
        tl.store(scale_ptr + token + 0 * group, scale, mask=group == 0)


def quantise_tokens(x: Tensor, *, grouped: bool, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """x [T, in], contiguous, in a multiple of 128 -> x in FP8 [T, in], and scales [in / 128, T] float32, or [1, T] if
    not grouped. A number is its value in FP8 times its scale. What comes back has a `multiple` of tokens: those behind
    the last one are undefined."""
    num_tokens, inputs = x.shape
    groups, padded_tokens = inputs // GROUP, triton.cdiv(num_tokens, multiple) * multiple
    out = x.new_empty(padded_tokens, inputs, dtype=FP8)
    scale = x.new_empty(groups if grouped else 1, padded_tokens, dtype=torch.float32)
    padded, pdl = triton.next_power_of_2(groups), overlaps_launches(x.device)
    _quantise_tokens_kernel[(num_tokens,)](
        x, out, scale, padded_tokens, MAX=FP8_MAX, GROUPS=groups, PADDED=padded, GROUP=GROUP, GROUPED=grouped, PDL=pdl,
        num_warps=8 if padded > 32 else 4, launch_pdl=pdl,
    )  # fmt: skip
    return out, scale
