"""Find the likeliest tokens of each row and their log-probabilities, without a sort: the raw logits are read once.

There are two kernels. In the first, many programs per row read parts of 512 logits. Of each part they keep the best
logit, the sum of exponentials relative to the best, and the number of logits above the sampled token's. In the second,
a single warp per row adds these up, and runs a tournament. The best of the parts' best is the best of the row. Only the
part that it came from must be read again, for its next best. So the n-th turn finds the n-th likeliest token, whatever
the logits are.

Among equal logits, the lowest id comes first, as for a greedy row. So the token of a greedy row has rank 1 and comes
first. For this, a logit and its id are compared as a single integer. (PyTorch's topk leaves the order of equals open.
In bfloat16 there are many equals.) Parts are cut in the same way whatever the batch, so no row can change what is found
in another row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.fused.search import EVERY_ID, key_of, score_of
from nanovllm.kernels.launch import overlaps_launches

PART = 512  # logits
PARTS = 8  # per program of the first kernel
LAST = tl.constexpr(-(2**63))  # after every place
LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _place(score, token):  # type: ignore[no-untyped-def]
    """The place of a score and its token, int64: larger for a larger score, and among equal scores for a lower id."""
    return (key_of(score, 1).to(tl.int64) << 32) | (token ^ EVERY_ID).to(tl.int64)


@triton.jit
def _placed(place):  # type: ignore[no-untyped-def]
    """The score and the token id that have this place."""
    return score_of((place >> 32).to(tl.int32), 1), place.to(tl.int32) ^ EVERY_ID


@triton.jit
def _load(logits_ptr, token, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load logits as float32. A NaN becomes -inf, so that every logit has a place. What lies behind the end is -inf,
    too; its ids come after all others."""
    score = tl.load(logits_ptr + token, mask=token < SIZE, other=float("-inf")).to(tl.float32)
    return tl.where(score == score, score, float("-inf"))


@triton.jit
def _exp_of_difference(score, largest):  # type: ignore[no-untyped-def]
    """exp(score - largest); 0 for a score of -inf, even if `largest` is -inf as well."""
    return tl.exp2((score - tl.where(largest > float("-inf"), largest, 0.0)) * LOG2_E)


@triton.jit
def _asks(rows_ptr, num_wanted_ptr, n, SOME_ASK: tl.constexpr):  # type: ignore[no-untyped-def]
    asks = True
    if SOME_ASK:
        asks = tl.load(num_wanted_ptr + tl.load(rows_ptr + n)) >= 0
    return asks


@triton.jit(do_not_specialize_on_alignment=["sampled_ptr", "rows_ptr", "num_wanted_ptr"])
def _parts_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, row_stride, sampled_ptr, rows_ptr, num_wanted_ptr, best_ptr, sums_ptr, num_above_ptr,
    SIZE: tl.constexpr, NUM_PARTS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    SOME_ASK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find, for each part, the place of its best, the sum of exp(logit - best), and how many are above the sampled."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0).to(tl.int64)
    if _asks(rows_ptr, num_wanted_ptr, n, SOME_ASK):
        logits_ptr += n * row_stride
        part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
        tokens = PART * part[:, None] + tl.arange(0, PART)[None, :]  # [PARTS, PART]
        scores = _load(logits_ptr, tokens, SIZE)
        of_sampled = tl.load(logits_ptr + tl.maximum(tl.load(sampled_ptr + n), 0)).to(tl.float32)
        largest = tl.max(scores, 1)  # [PARTS]
        token = tl.min(tl.where(scores == largest[:, None], tokens, EVERY_ID), 1)
        here = n * NUM_PARTS + part
        tl.store(best_ptr + here, _place(largest, token))
        tl.store(sums_ptr + here, tl.sum(_exp_of_difference(scores, largest[:, None]), 1))
        tl.store(num_above_ptr + here, tl.sum((scores > of_sampled).to(tl.int32), 1))


@triton.jit(
    do_not_specialize=["num_top"],
    do_not_specialize_on_alignment=[
        *("sampled_ptr", "rows_ptr", "num_wanted_ptr"),
        *("values_ptr", "top_ids_ptr", "ranks_ptr"),
    ],
)
def _tournament_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, row_stride, sampled_ptr, rows_ptr, num_wanted_ptr, best_ptr, sums_ptr, num_above_ptr,
    top_ids_ptr, values_ptr, ranks_ptr, num_top,
    SIZE: tl.constexpr, NUM_PARTS: tl.constexpr, PART: tl.constexpr, ALL_PARTS: tl.constexpr,
    SOME_ASK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0).to(tl.int64)
    if _asks(rows_ptr, num_wanted_ptr, n, SOME_ASK):
        logits_ptr += n * row_stride
        part = tl.arange(0, ALL_PARTS)
        there, here = part < NUM_PARTS, n * NUM_PARTS + part
        best = tl.load(best_ptr + here, mask=there, other=LAST)  # [ALL_PARTS]
        sums = tl.load(sums_ptr + here, mask=there, other=0.0)
        rank = 1 + tl.sum(tl.load(num_above_ptr + here, mask=there, other=0))
        tl.store(ranks_ptr + n, rank.to(tl.int64))
        largest, _ = _placed(tl.max(best))
        of_part, _ = _placed(best)
        log_of_sum = tl.log2(tl.sum(sums * _exp_of_difference(of_part, largest))) * LOG_2
        top_ids_ptr += n * (num_top + 1)
        values_ptr += n * (num_top + 1)
        sampled = tl.maximum(tl.load(sampled_ptr + n), 0)
        tl.store(top_ids_ptr, sampled)
        tl.store(values_ptr, tl.load(logits_ptr + sampled).to(tl.float32) - largest - log_of_sum)
        for i in range(num_top):
            first = tl.max(best)
            score, token = _placed(first)
            tl.store(top_ids_ptr + 1 + i, token.to(tl.int64))
            tl.store(values_ptr + 1 + i, score - largest - log_of_sum)
            origin = token // PART
            tokens = origin * PART + tl.arange(0, PART)
            place = _place(_load(logits_ptr, tokens, SIZE), tokens)
            following = tl.max(tl.where(place < first, place, LAST))
            best = tl.where(part == origin, following, best)


def top_logprobs(
    logits: Tensor, sampled: Tensor, n: int, asking: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`sampling.logprobs.top_logprobs` in two launches. The host never waits, so a recorded step can contain it.

    Args:
        logits: [N, V] of any float dtype. Rows may lie apart, so that padding can be cut off by a view.
        sampled: [N] int64, contiguous; -1 in a bad row, whose numbers mean nothing.
        n: how many of the likeliest tokens, at most V. Each of them takes a turn of somewhat less than a microsecond.
        asking: rows [N] of some state, and how many tokens each row of the state wants [R]. Where that number is
            negative, nothing is computed, and the result is left over from other uses of the memory. None: all rows
            ask.

    Returns:
        Token ids [N, 1 + n] int64 and log-probabilities [N, 1 + n] float32, the sampled token's first; and the rank of
        the sampled token [N] int64, from 1. Accurate to 1e-5 or better, as long as logits are below 100.
    """
    num_rows, width = logits.shape
    num_top = min(n, width)
    num_programs = triton.cdiv(width, PART * PARTS)  # per row
    num_parts = num_programs * PARTS  # the last may be empty: rows of even length are read faster
    ids, ranks = sampled.new_empty(num_rows, 1 + num_top), sampled.new_empty(num_rows)
    values = torch.empty(num_rows, 1 + num_top, dtype=torch.float32, device=logits.device)
    best = sampled.new_empty(num_rows, num_parts)  # int64
    sums = values.new_empty(num_rows, num_parts)
    counts = sampled.new_empty(num_rows, num_parts, dtype=torch.int32)
    shared = logits, logits.stride(0), sampled, *(asking or (sampled, sampled)), best, sums, counts
    pdl = overlaps_launches(logits.device)
    sizes = {"SIZE": width, "NUM_PARTS": num_parts, "PART": PART, "SOME_ASK": asking is not None, "PDL": pdl}
    _parts_kernel[(num_rows, num_programs)](*shared, PARTS=PARTS, **sizes, num_warps=4, launch_pdl=pdl)
    all_parts = triton.next_power_of_2(num_parts)
    _tournament_kernel[(num_rows,)](
        *shared, ids, values, ranks, num_top, ALL_PARTS=all_parts, **sizes, num_warps=1, launch_pdl=pdl
    )
    return ids, values, ranks
