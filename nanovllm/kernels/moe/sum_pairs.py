"""The sum of the outputs of each token's experts. Those of experts on other ranks are not here and not read."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import overlaps_launches
from nanovllm.kernels.moe.sort_pairs import own_expert

COLUMNS = 1024


@triton.jit(do_not_specialize=["first"])
def _sum_kernel(  # type: ignore[no-untyped-def]
    parts_ptr, experts_ptr, out_ptr, first, SIZE: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, num_tokens = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < SIZE
    total = tl.zeros([COLUMNS], tl.float32)
    for pair in range(CHOSEN):
        is_own = own_expert(tl.load(experts_ptr + token * CHOSEN + pair), first, EXPERTS) < EXPERTS
        part = tl.load(parts_ptr + (pair * num_tokens + token) * SIZE + column, mask=is_column & is_own, other=0.0)
        total += part.to(tl.float32)
    tl.store(out_ptr + token * SIZE + column, total.to(out_ptr.dtype.element_ty), mask=is_column)


def sum_pairs(parts: Tensor, experts: Tensor, num_experts: int, first: int = 0) -> Tensor:
    """parts [K, T, H], experts [T, K] int64, both contiguous -> [T, H]: for each token the sum, in float32, of
    the parts of the `num_experts` experts from `first` on."""
    (num_tokens, chosen), size = experts.shape, parts.shape[2]
    out = parts.new_empty(num_tokens, size)
    columns, pdl = min(COLUMNS, triton.next_power_of_2(size)), overlaps_launches(parts.device)
    _sum_kernel[(num_tokens, triton.cdiv(size, columns))](
        parts, experts, out, first, SIZE=size, EXPERTS=num_experts, CHOSEN=chosen, COLUMNS=columns, PDL=pdl,
        launch_pdl=pdl,
    )  # fmt: skip
    return out
