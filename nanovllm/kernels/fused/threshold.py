"""min_p, top_k and top_p without a sort: finds, per row, the lowest score whose tokens may be drawn.

A program has a row of logits to itself, so no other row can change what it finds. It reads the row once and keeps the
largest logit of each of thousands of cells. The k-th largest of these is a lower bound of the k-th largest logit, and
few other logits reach it. So a second pass collects all that do, and the search goes on among these candidates. Where
there are too many of them (many equal logits, a large top_k, a top_p that they do not fill) the row itself is searched.

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

CELLS = 8192  # per row; also how many logits a program looks at together
CANDIDATES = 1024  # that there is room for
NUCLEUS = tl.constexpr(512)  # as many cells bound the candidates of a row that has top_p alone
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
def _mass(keys, largest, temperature, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Probability relative to the likeliest token's, int64 in units of 2**-40."""
    exponent = tl.div_rn(_score(keys, UNIT) - largest, temperature) * 1.4426950408889634
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
        mass += tl.sum(tl.where(counts, _mass(keys, largest, temperature, UNIT), 0))
    return mass.to(tl.float64)


@triton.jit
def _nth_id(scores_ptr, ids_ptr, size, key, n, TILE: tl.constexpr, UNIT: tl.constexpr, IN_ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The n-th lowest id of the scores with this key. Ids ascend from tile to tile: candidates fill a single tile."""
    nth = EVERY_ID
    before = 0
    for start in range(0, size, TILE):
        keys, ids, there = _tile(scores_ptr, ids_ptr, start, size, TILE, UNIT, IN_ROW)
        equal = there & (keys == key)
        after = before + tl.sum(equal.to(tl.int32))
        if (before < n) & (n <= after):
            nth = tl.max(tl.where(equal, ids, 0))
            if n < after:
                nth = 0  # as many as are wanted have an id below that with the next bit set
                for bit in range(31):
                    middle = nth + (1 << (30 - bit))
                    if before + tl.sum((equal & (ids < middle)).to(tl.int32)) < n:
                        nth = middle
        before = after
    return nth


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    scores_ptr, ids_ptr, size, low, lowest, top_k, top_p, total, largest, temperature,
    SIZE: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr, IN_ROW: tl.constexpr,
):  # fmt: skip
    """What top_k and then top_p leave of the keys from `lowest` on: all above a border, and at the border ids up to the
    last; and whether these scores are enough to say so.

    low: a key that is at most the k-th largest. total: the mass of all from `lowest` on, in the whole row; it is used
    if there is no top_k.
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
            if _count(scores_ptr, ids_ptr, size, kth, TILE, UNIT, IN_ROW) > top_k:
                above = _count(scores_ptr, ids_ptr, size, kth + 1, TILE, UNIT, IN_ROW)
                last_id = _nth_id(scores_ptr, ids_ptr, size, kth, top_k - above, TILE, UNIT, IN_ROW)
    enough = True
    if top_p < 1:
        held = _sum(
            scores_ptr, ids_ptr, size, lowest, border, last_id, largest, temperature, TILE, UNIT, IN_ROW
        )  # fmt: skip
        target = top_p.to(tl.float64) * tl.where(top_k < SIZE, held, total)
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
            each = _mass(nucleus, largest, temperature, UNIT).to(tl.float64)
            room = tl.maximum(tl.ceil((target - above) / each), 1.0).to(tl.int32)
            nth = _nth_id(scores_ptr, ids_ptr, size, nucleus, room, TILE, UNIT, IN_ROW)
            last_id = tl.where(nucleus > border, nth, tl.minimum(nth, last_id))
            border = nucleus
    return border, last_id, enough


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _threshold_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, scores_ptr, ids_ptr, counts_ptr,
    border_ptr, last_id_ptr,
    SIZE: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
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
        logits_ptr += n * SIZE
        lane = tl.arange(0, TILE)
        cells = tl.full([TILE], float("-inf"), tl.float32)
        for start in range(0, SIZE, TILE):
            tile = tl.load(logits_ptr + start + lane, mask=start + lane < SIZE, other=float("-inf"))
            cells = tl.maximum(cells, tile.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
        largest = tl.max(tl.where(cells == cells, cells, float("inf")))
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
                keys = _key(cells, UNIT)
                wanted = tl.minimum(tl.where(top_k < SIZE, top_k, NUCLEUS), TILE)
                bound = SMALLEST
                for step in range(12):  # sign, exponent and three bits more: it need only be near
                    key = bound ^ _bit(step)
                    if key <= _key(largest, UNIT):  # noqa: SIM102
                        if tl.sum((keys >= key).to(tl.int32)) >= wanted:
                            bound = key
                bound = tl.maximum(bound, lowest)  # fewer than top_k may reach min_p's
                scores_ptr, ids_ptr, counts_ptr = scores_ptr + n * CANDIDATES, ids_ptr + n * CANDIDATES, counts_ptr + n
                tl.store(counts_ptr, 0)
                tl.debug_barrier()
                mass = tl.zeros([], tl.int64)
                for start in range(0, SIZE, TILE):
                    keys, ids, there = _tile(logits_ptr, ids_ptr, start, SIZE, TILE, UNIT, True)
                    reaches = there & (keys >= bound)
                    place = tl.atomic_add(counts_ptr + tl.zeros([TILE], tl.int32), 1, mask=reaches)
                    fits = reaches & (place < CANDIDATES)
                    tl.store(scores_ptr + place, _score(keys, UNIT), mask=fits)
                    tl.store(ids_ptr + place, ids, mask=fits)
                    if (top_k >= SIZE) & (top_p < 1):
                        counts = there & (keys >= lowest)
                        mass += tl.sum(tl.where(counts, _mass(keys, largest, temperature, UNIT), 0))
                tl.debug_barrier()
                found = tl.load(counts_ptr)
                total = mass.to(tl.float64)
                # A bound that fewer cells than top_k reach is none; min_p's may well be reached by fewer.
                enough = (found <= CANDIDATES) & ((top_k >= SIZE) | (top_k <= TILE))
                if enough:
                    border, last_id, enough = _search(
                        scores_ptr, ids_ptr, found, bound, lowest, top_k, top_p, total, largest, temperature,
                        SIZE, CANDIDATES, UNIT, False,
                    )  # fmt: skip
                if not enough:
                    border, last_id, enough = _search(
                        logits_ptr, ids_ptr, SIZE, SMALLEST, lowest, top_k, top_p, total, largest, temperature,
                        SIZE, TILE, UNIT, True,
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
    border = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    last_id = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    scores = torch.empty(num_rows, CANDIDATES, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, CANDIDATES, dtype=torch.int32, device=logits.device)
    counts = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    pdl = overlaps_launches(logits.device)
    tile = min(CELLS, triton.next_power_of_2(width))
    _threshold_kernel[(num_rows,)](
        logits, rows, temperature, top_k, top_p, log_min_p, scores, ids, counts, border, last_id,
        SIZE=width, TILE=tile, CANDIDATES=CANDIDATES, UNIT=1 << 16 if logits.dtype == torch.bfloat16 else 1, PDL=pdl,
        num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return border, last_id
