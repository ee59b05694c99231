"""The experts of each token and their weights in one launch: softmax, selection of the best, normalisation."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import overlaps_launches


@triton.jit
def _route_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, experts_ptr, weights_ptr,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr, NORMALISE: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, num_tokens = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    expert, slot = tl.arange(0, PADDED), tl.arange(0, SLOTS)
    exists = expert < EXPERTS
    logits = tl.load(logits_ptr + token * EXPERTS + expert, mask=exists, other=-float("inf")).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        logits += tl.load(logits_ptr + (split * num_tokens + token) * EXPERTS + expert, mask=exists, other=0.0)
    odds = tl.exp(logits - tl.max(logits, 0))
    total = tl.sum(odds, 0)
    # A probability and its expert are one number, so that one maximum finds both: the probability's bits, which are in
    # the order of the probabilities, and behind them the expert, counted down, so that of equals the first is best.
    # What is not a number would be the largest. So such a token goes to the first experts.
    probabilities = tl.where(total == total, odds / total, 0.0)
    left = probabilities.to(tl.int32, bitcast=True).to(tl.int64) << 32 | (PADDED - 1 - expert)
    left = tl.where(exists, left, -1)
    chosen = tl.zeros([SLOTS], tl.int64)
    for i in range(CHOSEN):
        best = tl.max(left, 0)
        chosen = tl.where(slot == i, best, chosen)
        left = tl.where(left == best, -1, left)
    experts = PADDED - 1 - (chosen & 0xFFFFFFFF)
    weights = (chosen >> 32).to(tl.int32).to(tl.float32, bitcast=True) + 0 * total
    if NORMALISE:
        weights /= tl.sum(weights, 0)
    is_chosen = slot < CHOSEN
    tl.store(experts_ptr + token * CHOSEN + slot, experts, mask=is_chosen)
    tl.store(weights_ptr + token * CHOSEN + slot, weights, mask=is_chosen)


def route(logits: Tensor, num_chosen: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E], or parts of them [S, T, E] float32, to be summed over S -> experts [T, K] int64, weights [T, K]
    float32: see `layers/experts.py`. logits: contiguous."""
    num_tokens, num_experts = logits.shape[-2:]
    experts = logits.new_empty(num_tokens, num_chosen, dtype=torch.int64)
    weights = logits.new_empty(num_tokens, num_chosen, dtype=torch.float32)
    pdl = overlaps_launches(logits.device)
    _route_kernel[(num_tokens,)](
        logits, experts, weights,
        EXPERTS=num_experts, PADDED=triton.next_power_of_2(num_experts), CHOSEN=num_chosen,
        SLOTS=triton.next_power_of_2(num_chosen), NORMALISE=normalise,
        SPLITS=len(logits) if logits.dim() == 3 else 1, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return experts, weights
