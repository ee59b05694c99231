"""min_p, top_k and top_p without a sort: finds, per row, the lowest score whose tokens may be drawn.

Two kernels. In the first, many programs share a row, each with a part of it. A program keeps the largest logit of each
of its cells; the k-th largest of these is a lower bound of the k-th largest logit of its part, and few other logits
reach it. Those that do are the part's candidates: together they hold the k largest of the row. In the second kernel a
program per row searches the candidates. Where they are too many or not enough (many equal logits, a large top_k, a
top_p that they do not fill), it searches the row itself. No row can change what is found in another.

A search is a bisection over the bits of a score, which as an integer has the order of the scores ("radix select"); its
number of steps depends on the row alone. Probabilities are summed in fixed point, in units of 2**-40 of the likeliest
token's, so that neither order nor batch can change a sum. To do without a sort is the idea of FlashInfer ("Sorting-Free
GPU Kernels for LLM Sampling", 2025), which draws again until a token is allowed. With a threshold one draw is enough.
Of equal scores the lowest ids are kept, as by a stable sort.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import overlaps_launches

PART = 4096  # logits of a row that a program of the first kernel has
CELLS = 128  # of a part; half of them, or top_k if that is less, bound its candidates
ROOM = 512  # candidates of a part that there is room for
TILE = 1024  # candidates that the second kernel looks at together; of a row that it has to search, eight times as many
SMALLEST = tl.constexpr(-(2**31))
EVERY_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _key(score, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 -> int32 in the same order, a multiple of UNIT: 2**16 for scores that were bfloat16, else 1."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) & -UNIT


@triton.jit
def _score(key, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The score that has this key; that of the lowest keys, which no number has, is -inf."""
    bits = tl.where(key < 0, (key | (UNIT - 1)) ^ 0x7FFFFFFF, key)
    score = bits.to(tl.float32, bitcast=True)
    return tl.where(score != score, float("-inf"), score)


@triton.jit
def _bit(step):  # type: ignore[no-untyped-def]
    """What to change in a key next, from the sign on down: first SMALLEST to 0."""
    return (tl.full([], 1, tl.uint32) << (31 - step)).to(tl.int32, bitcast=True)


@triton.jit
def _tile(scores_ptr, ids_ptr, start, size, TILE: tl.constexpr, UNIT: tl.constexpr, IN_ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys, ids, and which of them exist. In a row, the id of a score is its place."""
    place = start + tl.arange(0, TILE)
    there = place < size
    keys = _key(tl.load(scores_ptr + place, mask=there, other=0.0).to(tl.float32), UNIT)
    if IN_ROW:
        return keys, place, there
    else:
        return keys, tl.load(ids_ptr + place, mask=there, other=0), there


@triton.jit
def _mass(score, largest, temperature):  # type: ignore[no-untyped-def]
    """Probability relative to the likeliest token's, int64 in units of 2**-40."""
    exponent = tl.div_rn(score - largest, temperature) * 1.4426950408889634
    return (tl.exp2(exponent) * 1099511627776.0).to(tl.int64)


@triton.jit
def _count(scores_ptr, ids_ptr, size, lowest, TILE: tl.constexpr, UNIT: tl.constexpr, IN_ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many scores have a key of at least `lowest`."""
    count = 0
    for start in range(0, size, TILE):
        keys, _, there = _tile(scores_ptr, ids_ptr, start, size, TILE, UNIT, IN_ROW)
        count += tl.sum((there & (keys >= lowest)).to(tl.int32))
    return count


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    scores_ptr, ids_ptr, size, lowest, border, last_id, largest, temperature,
    TILE: tl.constexpr, UNIT: tl.constexpr, IN_ROW: tl.constexpr,
):  # fmt: skip
    """The mass of the scores with a key of at least `lowest` that are inside `border` and `last_id`, float64."""
    mass = tl.zeros([], tl.int64)
    for start in range(0, size, TILE):
        keys, ids, there = _tile(scores_ptr, ids_ptr, start, size, TILE, UNIT, IN_ROW)
        inside = (keys > border) | ((keys == border) & (ids <= last_id))
        counts = there & (keys >= lowest) & inside
        mass += tl.sum(tl.where(counts, _mass(_score(keys, UNIT), largest, temperature), 0))
    return mass.to(tl.float64)


@triton.jit
def _nth_id(scores_ptr, ids_ptr, size, key, n, TILE: tl.constexpr, UNIT: tl.constexpr, IN_ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The n-th lowest id of the scores with this key. Ids ascend from tile to tile."""
    nth = EVERY_ID
    before = 0
    for start in range(0, size, TILE):
        keys, ids, there = _tile(scores_ptr, ids_ptr, start, size, TILE, UNIT, IN_ROW)
        equal = there & (keys == key)
        after = before + tl.sum(equal.to(tl.int32))
        if (before < n) & (n <= after):
            place = before + tl.cumsum(equal.to(tl.int32), 0)
            nth = tl.max(tl.where(equal & (place == n), ids, 0))
        before = after
    return nth


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    scores_ptr, ids_ptr, size, low, lowest, top_k, top_p, total, largest, temperature,
    SIZE: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr, IN_ROW: tl.constexpr,
):  # fmt: skip
    """What top_k and then top_p leave of the keys from `lowest` on: all above a border, and at the border ids up to the
    last; and whether these scores are enough to say so.

    low: a key that is at most the k-th largest. total: what top_p is a part of; 0: the mass of what top_k leaves.
    """
    border, last_id, high = lowest, EVERY_ID, _key(largest, UNIT)
    if top_k < SIZE:
        kth = SMALLEST
        for step in range(16 if UNIT > 1 else 32):
            key = kth ^ _bit(step)
            if key <= low:
                kth = key
            elif key <= high:  # noqa: SIM102 (Triton would compute both sides of an `and`)
                if _count(scores_ptr, ids_ptr, size, key, TILE, UNIT, IN_ROW) >= top_k:
                    kth = key
        if kth >= lowest:
            border = kth
            above = _count(scores_ptr, ids_ptr, size, kth + 1, TILE, UNIT, IN_ROW)
            last_id = _nth_id(scores_ptr, ids_ptr, size, kth, top_k - above, TILE, UNIT, IN_ROW)
    enough = True
    if top_p < 1:
        held = _sum(
            scores_ptr, ids_ptr, size, lowest, border, last_id, largest, temperature, TILE, UNIT, IN_ROW
        )  # fmt: skip
        target = top_p.to(tl.float64) * tl.where(total > 0, total, held)
        enough = held >= target
        if enough:
            nucleus = SMALLEST
            for step in range(16 if UNIT > 1 else 32):
                key = nucleus ^ _bit(step)
                if key <= border:
                    nucleus = key
                elif key <= high:
                    part = _sum(
                        scores_ptr, ids_ptr, size, key, border, last_id, largest, temperature, TILE, UNIT, IN_ROW
                    )  # fmt: skip
                    if part >= target:
                        nucleus = key
            above = _sum(
                scores_ptr, ids_ptr, size, nucleus + 1, border, last_id, largest, temperature, TILE, UNIT, IN_ROW
            )  # fmt: skip
            each = _mass(_score(nucleus, UNIT), largest, temperature).to(tl.float64)
            room = tl.maximum(tl.ceil((target - above) / each), 1.0).to(tl.int32)
            nth = _nth_id(scores_ptr, ids_ptr, size, nucleus, room, TILE, UNIT, IN_ROW)
            last_id = tl.where(nucleus > border, nth, tl.minimum(nth, last_id))
            border = nucleus
    return border, last_id, enough


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _candidates_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, maxima_ptr, bounds_ptr, masses_ptr,
    counts_ptr, scores_ptr, ids_ptr,
    SIZE: tl.constexpr, PART: tl.constexpr, CELLS: tl.constexpr, ROOM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The candidates of a part of a row, in ascending order of their ids; one more than there is room for: too many."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + n)
    temperature, log_min_p = tl.load(temperature_ptr + row), tl.load(log_min_p_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row).to(tl.int32), tl.load(top_p_ptr + row)
    ranked = (top_k < SIZE) | (top_p < 1)
    if (temperature > 0) & (ranked | (log_min_p > float("-inf"))):
        ids = part * PART + (PART // CELLS) * tl.arange(0, CELLS)[:, None] + tl.arange(0, PART // CELLS)[None, :]
        scores = tl.load(logits_ptr + n * SIZE + ids, mask=ids < SIZE, other=float("-inf")).to(tl.float32)
        scores = tl.where(scores == scores, scores, float("inf"))  # a NaN is an infinite maximum, which filters nothing
        cells = tl.max(scores, 1)  # [CELLS]
        largest = tl.max(cells)
        here = n * tl.num_programs(1) + part
        tl.store(maxima_ptr + here, largest)
        if ranked:
            wanted = tl.minimum(top_k, CELLS // 2)
            larger = tl.sum((cells[None, :] > cells[:, None]).to(tl.int32), 1)  # [CELLS] how many cells are above each
            # Fewer than `wanted` are above each of these, so at least `wanted` are at or above the least of them.
            bound = tl.min(tl.where(larger < wanted, cells, float("inf")))
            reaches = (scores >= bound) & (scores > float("-inf"))
            in_cell = tl.sum(reaches.to(tl.int32), 1)  # [CELLS]
            count = tl.sum(in_cell)
            tl.store(bounds_ptr + here, bound)
            tl.store(counts_ptr + here, tl.minimum(count, ROOM + 1))
            if count <= ROOM:
                before = tl.cumsum(in_cell, 0) - in_cell
                place = here * ROOM + before[:, None] + tl.cumsum(reaches.to(tl.int32), 1) - 1
                tl.store(scores_ptr + place, scores, mask=reaches)
                tl.store(ids_ptr + place, ids, mask=reaches)
            if (top_k >= SIZE) & (largest > float("-inf")) & (largest < float("inf")):
                tl.store(masses_ptr + here, tl.sum(_mass(scores, largest, temperature)))


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _threshold_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, maxima_ptr, bounds_ptr, masses_ptr,
    counts_ptr, scores_ptr, ids_ptr, found_scores_ptr, found_ids_ptr, border_ptr, last_id_ptr, num_parts,
    SIZE: tl.constexpr, PARTS: tl.constexpr, CELLS: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr,
    UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + n)
    temperature, log_min_p = tl.load(temperature_ptr + row), tl.load(log_min_p_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row).to(tl.int32), tl.load(top_p_ptr + row)
    ranked = (top_k < SIZE) | (top_p < 1)
    lowest, border, last_id = SMALLEST, SMALLEST, EVERY_ID
    if (temperature > 0) & (ranked | (log_min_p > float("-inf"))):
        part = tl.arange(0, PARTS)
        exists, here = part < num_parts, n * num_parts + part
        maxima = tl.load(maxima_ptr + here, mask=exists, other=float("-inf"))
        largest = tl.max(maxima)
        if (largest < float("inf")) & (largest > float("-inf")):  # otherwise the row samples -1, filtered or not
            if log_min_p > float("-inf"):
                # The largest key that min_p rules out: it rules out all that are smaller.
                for step in range(16 if UNIT > 1 else 32):
                    key = lowest ^ _bit(step)
                    score = tl.minimum(_score(key, UNIT), largest)
                    if tl.div_rn(score - largest, temperature) < log_min_p:
                        lowest = key
                lowest += UNIT
            border = lowest
            if ranked:
                bound = _key(tl.max(tl.load(bounds_ptr + here, mask=exists, other=float("-inf"))), UNIT)
                counts = tl.load(counts_ptr + here, mask=exists, other=0)
                behind = tl.cumsum(counts, 0)
                found = tl.sum(counts)
                found_scores_ptr += n * num_parts * ROOM
                found_ids_ptr += n * num_parts * ROOM
                first, total = lowest, tl.zeros([], tl.float64)
                enough = tl.max(counts) <= ROOM
                if enough:
                    # The candidates of all parts, side by side.
                    for start in range(0, found, TILE):
                        place = start + tl.arange(0, TILE)
                        whole = behind[None, :] <= place[:, None]  # [TILE, PARTS] parts that end before each place
                        owner = tl.sum(whole.to(tl.int32), 1)  # [TILE]
                        before = tl.max(tl.where(whole, behind[None, :], 0), 1)
                        source = (n * num_parts + owner) * ROOM + place - before
                        there = place < found
                        tl.store(found_scores_ptr + place, tl.load(scores_ptr + source, mask=there), mask=there)
                        tl.store(found_ids_ptr + place, tl.load(ids_ptr + source, mask=there), mask=there)
                    tl.debug_barrier()
                    # Below the bound of one part, candidates of the others may be missing.
                    if top_k > CELLS // 2:
                        first = tl.maximum(bound, lowest)
                        enough = lowest >= bound
                        if top_k < SIZE:
                            enough |= _count(found_scores_ptr, found_ids_ptr, found, bound, TILE, UNIT, False) >= top_k
                        elif log_min_p == float("-inf"):
                            masses = tl.load(masses_ptr + here, mask=exists, other=0).to(tl.float64)
                            share = tl.exp((maxima - largest).to(tl.float64) / temperature.to(tl.float64))
                            total = tl.sum(tl.where(maxima > float("-inf"), masses * share, 0.0))
                            enough = True
                if enough:
                    border, last_id, enough = _search(
                        found_scores_ptr, found_ids_ptr, found, bound, first, top_k, top_p, total, largest, temperature,
                        SIZE, TILE, UNIT, False,
                    )  # fmt: skip
                if not enough:
                    border, last_id, enough = _search(
                        logits_ptr + n * SIZE, found_ids_ptr, SIZE, SMALLEST, lowest, top_k, top_p,
                        tl.zeros([], tl.float64), largest, temperature, SIZE, 8 * TILE, UNIT, True,
                    )  # fmt: skip
    tl.store(border_ptr + n, _score(border, UNIT))
    tl.store(last_id_ptr + n, last_id)


def thresholds(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What min_p, top_k and top_p leave of each row, in vLLM's order (see `sampling/filters.py`, the reference).

    Args:
        logits: [N, V] of any float dtype, contiguous.
        rows: [N] integers: the row of persistent state that each belongs to.
        temperature: [R] float32; a row of 0 keeps every token.
        top_k: [R] integers, V for none. top_p: [R] float32, 1 for none. log_min_p: [R] float32, -inf for none.

    Returns:
        [N] float32 and [N] int32: a token may be drawn if its logit is above the first, or equal to it and its id is
        at most the second. -inf and 2**31 - 1 where nothing is ruled out, or where a row has no finite maximum.
    """
    num_rows, width = logits.shape
    num_parts = triton.cdiv(width, PART)

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    border, last_id = empty(torch.float32), empty(torch.int32)
    maxima, bounds = empty(torch.float32, num_parts), empty(torch.float32, num_parts)
    masses, counts = empty(torch.int64, num_parts), empty(torch.int32, num_parts)
    scores, found_scores = empty(torch.float32, num_parts, ROOM), empty(torch.float32, num_parts, ROOM)
    ids, found_ids = empty(torch.int32, num_parts, ROOM), empty(torch.int32, num_parts, ROOM)
    parameters = logits, rows, temperature, top_k, top_p, log_min_p
    of_parts = maxima, bounds, masses, counts, scores, ids
    pdl = overlaps_launches(logits.device)
    _candidates_kernel[(num_rows, num_parts)](
        *parameters, *of_parts, SIZE=width, PART=PART, CELLS=CELLS, ROOM=ROOM, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    _threshold_kernel[(num_rows,)](
        *parameters, *of_parts, found_scores, found_ids, border, last_id, num_parts, SIZE=width,
        PARTS=triton.next_power_of_2(num_parts), CELLS=CELLS, ROOM=ROOM, TILE=TILE,
        UNIT=1 << 16 if logits.dtype == torch.bfloat16 else 1, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return border, last_id
