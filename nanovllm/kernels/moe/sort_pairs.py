"""The pairs of a token and one of its experts, sorted by expert, without a wait for the device.

Pairs whose expert is on another rank come last.

A pair's place is the number of pairs that come before it. For few pairs each is simply compared with all others, which
is one launch. For many the library sorts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import overlaps_launches

MAX_COMPARED = 8192  # pairs; the comparisons grow with the square
OWN, OTHERS = 8, 512  # pairs that a program places, and those that it compares them with at a time


@triton.jit
def own_expert(expert, first, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of an expert among those of this rank, which are EXPERTS from `first` on; EXPERTS for all others."""
    own = expert.to(tl.int32) - first
    return tl.where((own >= 0) & (own < EXPERTS), own, EXPERTS)


@triton.jit(do_not_specialize=["first", "num_pairs"])
def _sort_kernel(  # type: ignore[no-untyped-def]
    experts_ptr, order_ptr, ends_ptr, first, num_pairs, EXPERTS: tl.constexpr, OWN: tl.constexpr,
    OTHERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # Behind the pairs come the experts themselves. The place of one is where its pairs end.
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    is_pair = own < num_pairs
    expert = own_expert(tl.load(experts_ptr + own, mask=is_pair, other=0), first, EXPERTS)
    expert = tl.where(is_pair, expert, own - num_pairs)
    place = tl.zeros([OWN], tl.int32)
    for start in range(0, num_pairs, OTHERS):
        other = start + tl.arange(0, OTHERS)
        theirs = own_expert(tl.load(experts_ptr + other, mask=other < num_pairs, other=-1), first, EXPERTS)
        is_equal = (theirs[None, :] == expert[:, None]) & (other[None, :] < own[:, None])
        comes_before = (theirs[None, :] < expert[:, None]) | is_equal
        place += tl.sum(comes_before.to(tl.int32), 1)
    tl.store(order_ptr + place, own, mask=is_pair)
    tl.store(ends_ptr + own - num_pairs, place, mask=(own >= num_pairs) & (own < num_pairs + EXPERTS))


def sort_pairs(experts: Tensor, num_experts: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """experts [T, K] int64, contiguous -> order [T K] and ends [E], both int32.

    first: the number of the first of the rank's E experts.
    order: the pairs, numbered token * K + choice, by expert. Those of one expert keep their order. Last come the pairs
        whose expert is on another rank.
    ends: the place after each expert's last pair.
    """
    pairs = experts.flatten()
    if len(pairs) > MAX_COMPARED:
        own = pairs - first
        # In 16 bits: the time of the library's sort grows with the bits of a number
        own = own.where((own >= 0) & (own < num_experts), num_experts).short()
        ascending, order = own.sort(stable=True)
        every = torch.arange(num_experts, device=pairs.device, dtype=own.dtype)
        return order.int(), torch.searchsorted(ascending, every, right=True, out_int32=True)
    order, ends = (pairs.new_empty(size, dtype=torch.int32) for size in (len(pairs), num_experts))
    pdl = overlaps_launches(pairs.device)
    _sort_kernel[(triton.cdiv(len(pairs) + num_experts, OWN),)](
        pairs, order, ends, first, len(pairs), EXPERTS=num_experts, OWN=OWN, OTHERS=OTHERS, PDL=pdl, launch_pdl=pdl
    )
    return order, ends
