"""The sum of all ranks' rows, and the norm that follows it, in one kernel and one exchange.

Every GPU has a buffer that the other GPUs can write to. A program takes one row of this rank's part, writes the row
into the buffers of all others, and waits until their rows have arrived in this rank's buffer. There is no signal that a
row has arrived. Instead an empty buffer holds a number that no row contains (`EMPTY`), and any other number has
arrived. So a sum takes little longer than one write to another GPU. (NCCL's low-latency protocol sends a flag with
every word; TensorRT-LLM's "Lamport" kernels do without, like this kernel.)

*Two places for every row*, used in turns. A row that was read is made empty again at once. Meanwhile a quicker peer may
already send the same row of its next sum, to the other place. The peer comes back to the first place only for the sum
after the next. By then it has finished the next sum, for which it needed our row, and we send that row only after the
kernel that empties the first place has ended. So nothing is ever sent to a place that has still to be emptied.

*All ranks add in the same order*, rank 0 first, so that all go on with the same bits.

A program has the whole row, so it does the residual addition and the norm as well, as `add_rms_norm` would.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import overlaps_launches

ROW_BYTES = 16 * 1024  # of a place in the buffer
MAX_ROWS = 128  # a waiting program takes room on a multiprocessor, and the kernel that would end the wait needs room
MIN_WARPS = 4
EMPTY = -0x7FFF8000  # 0x80008000: -0.0 twice in 16 bits, -5e-41 in float32. Where a row has this number, 0 is sent


@triton.jit
def _sum_over_ranks_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, buffers, turn_ptr, eps,
    RANK: tl.constexpr, RANKS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, PLACE: tl.constexpr,
    ROWS: tl.constexpr, EMPTY: tl.constexpr, SPLITS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = total_ptr.dtype.element_ty
    word: tl.constexpr = buffers[0].dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    column = tl.arange(0, PADDED)
    exists = column < SIZE
    if PDL:
        gdc_launch_dependents()
    if NORM:
        weight = tl.load(weight_ptr + column, mask=exists, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    turn = tl.load(turn_ptr + row)
    x = tl.load(x_ptr + row * SIZE + column, mask=exists, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(x_ptr + (split * num_rows + row) * SIZE + column, mask=exists, other=0.0)
    words = x.to(dtype).to(word, bitcast=True)
    words = tl.where(words == EMPTY, 0, words)
    own = words.to(dtype, bitcast=True).to(tl.float32)  # what the others get
    place = (turn.to(tl.int64) * RANKS * ROWS + row) * PLACE + column  # of rank 0's row
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(buffers[peer] + place + RANK * ROWS * PLACE, words, mask=exists, cache_modifier=".wt")
    if ADD:
        residual = tl.load(residual_ptr + row * SIZE + column, mask=exists, other=0.0).to(tl.float32)

    total = tl.zeros([PADDED], tl.float32)
    waiting = 1
    while waiting > 0:
        missing = tl.zeros([PADDED], tl.int32)
        total = tl.zeros([PADDED], tl.float32)
        for peer in tl.static_range(RANKS):
            if peer == RANK:
                total += own
            else:
                came = tl.load(buffers[RANK] + place + peer * ROWS * PLACE, mask=exists, other=0, volatile=True)
                missing |= (came == EMPTY).to(tl.int32)
                total += came.to(dtype, bitcast=True).to(tl.float32)
        waiting = tl.max(missing, 0)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            nothing = tl.full([PADDED], EMPTY, word)
            tl.store(buffers[RANK] + place + peer * ROWS * PLACE, nothing, mask=exists)
    tl.store(turn_ptr + row, 1 - turn)

    if ADD:
        total += residual
    total = total.to(dtype)
    tl.store(total_ptr + row * SIZE + column, total, mask=exists)
    if NORM:
        total = total.to(tl.float32)
        normed = total * tl.rsqrt(tl.sum(total * total, 0) / SIZE + eps) * weight
        tl.store(out_ptr + row * SIZE + column, normed.to(dtype), mask=exists)


def sum_over_ranks(
    x: Tensor,
    buffers: tuple[Tensor, ...],
    turn: Tensor,
    rank: int,
    dtype: torch.dtype,
    *,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(sum + residual), sum + residual), [T, H] each, for the sum of all ranks' x.

    All ranks call this function with x of the same T and H. The kernel waits for the other ranks for as long as it
    takes. Nothing is checked here: see `OneShotAllReduce.takes`.

    Args:
        x: [T, H], or [S, T, H] float32 to be summed over S, contiguous. At most `MAX_ROWS` rows of at most `ROW_BYTES`.
        buffers: each rank's buffer, mapped here, as words as wide as `dtype`: [2, R, MAX_ROWS, ROW_BYTES / width] int16
            or int32, by place, sending rank and row. At first all `EMPTY` (of int16: its lower half).
        turn: [MAX_ROWS] int32 of this rank alone, at first 0: which of its two places a row uses next.
        dtype: of what is sent and of the results. Each rank's numbers are rounded to it before they are added.
        norm: weight [H] and eps; without it both results are the sum.
        residual: [T, H], added after the sum.
    """
    rows, size = x.shape[-2:]
    splits = x.shape[0] if x.dim() == 3 else 1
    total = torch.empty(rows, size, dtype=dtype, device=x.device)
    out = total if norm is None else torch.empty_like(total)
    weight, eps = norm or (total, 0.0)
    # No two threads look at the same number: the quicker one would empty the place while the other still waits at it.
    padded = max(32 * MIN_WARPS, triton.next_power_of_2(size))
    pdl = overlaps_launches(x.device)
    word = buffers[rank].element_size()
    _sum_over_ranks_kernel[(rows,)](
        x, residual, weight, out, total, buffers, turn, eps,
        RANK=rank, RANKS=len(buffers), SIZE=size, PADDED=padded, PLACE=ROW_BYTES // word, ROWS=MAX_ROWS,
        EMPTY=EMPTY if word == 4 else -0x8000, SPLITS=splits, ADD=residual is not None, NORM=norm is not None, PDL=pdl,
        num_warps=max(MIN_WARPS, min(16, padded // 256)), launch_pdl=pdl,
    )  # fmt: skip
    return out, total
