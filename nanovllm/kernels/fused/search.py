"""Find the threshold of top_k and top_p in a row of logits, or in a list of candidates, bit by bit ("radix select").

The bits of a score, taken as an integer (its *key*), have the order of the scores. A search sets the bits of a key from
the highest to the lowest. So the number of its steps depends on the row alone. Probabilities are summed in fixed point,
in units of 2**-40 of the likeliest token's probability, so that neither order nor batch can change a sum. Among equal
scores the lowest ids are kept, as by a stable sort.

The time of a single row is limited by its code: a GPU fetches instructions that it has not run before from memory. So
loops over bits stay loops: their number of steps is an argument, so the compiler cannot unroll them.
"""

import triton
import triton.language as tl

SMALLEST = tl.constexpr(-(2**31))
EVERY_ID = tl.constexpr(2**31 - 1)


@triton.jit
def key_of(score, unit):  # type: ignore[no-untyped-def]
    """float32 -> int32 in the same order, a multiple of `unit`: 2**16 for scores that were bfloat16, else 1."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) & -unit


@triton.jit
def score_of(key, unit):  # type: ignore[no-untyped-def]
    """The score that has this key. The lowest keys, which belong to no number, give -inf."""
    bits = tl.where(key < 0, (key | (unit - 1)) ^ 0x7FFFFFFF, key)
    score = bits.to(tl.float32, bitcast=True)
    return tl.where(score != score, float("-inf"), score)


@triton.jit
def bit_of(step):  # type: ignore[no-untyped-def]
    """The bit of a key that a search tries in this step, from the sign on down. Step 0 takes SMALLEST to 0."""
    return (tl.full([], 1, tl.uint32) << (31 - step)).to(tl.int32, bitcast=True)


@triton.jit
def only_allowed(scores, mask_ptr, ids, there):  # type: ignore[no-untyped-def]
    """The scores, with -inf for tokens that the row's mask forbids. NaN and infinity stay, to show a bad row."""
    allowed = (tl.load(mask_ptr + ids // 32, mask=there, other=0) >> (ids % 32)) & 1 == 1
    return tl.where(allowed | (scores != scores) | (scores == float("inf")), scores, float("-inf"))


@triton.jit
def read_tile(source, start, size, unit, TILE: tl.constexpr, IN_ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read a tile of a list or of a row: keys, ids, and which of them exist.

    A list has scores and ids. A row has its logits, padded to a multiple of TILE, and behind them the list of its
    edited scores. The id of a logit is its place. What a mask rules out is -inf.
    """
    place = start + tl.arange(0, TILE)
    there = place < size
    if IN_ROW:
        logits_ptr, width, mask_ptr, masked, edits_ptr, edited_ids_ptr = source
        edits_at = tl.cdiv(width, TILE) * TILE
        ids = place
        if start < edits_at:
            there = place < width
            scores = tl.load(logits_ptr + place, mask=there, other=0.0).to(tl.float32)
            if masked:
                scores = only_allowed(scores, mask_ptr, place, there)
        else:
            scores = tl.load(edits_ptr + place - edits_at, mask=there, other=0.0)
            ids = tl.load(edited_ids_ptr + place - edits_at, mask=there, other=0)
    else:
        scores_ptr, ids_ptr = source
        scores = tl.load(scores_ptr + place, mask=there, other=0.0)
        ids = tl.load(ids_ptr + place, mask=there, other=0)
    return key_of(scores, unit), ids, there


@triton.jit
def sharpness_of(temperature):  # type: ignore[no-untyped-def]
    """The factor from a difference of scores to an exponent of 2: log2(e) / temperature, bounded to be finite."""
    return tl.minimum(1.4426950408889634 / temperature, 3e38)


@triton.jit
def mass_of(score, largest, sharpness):  # type: ignore[no-untyped-def]
    """The probability relative to the likeliest token's, int64 in units of 2**-40."""
    return (tl.exp2((score - largest) * sharpness) * 1099511627776.0).to(tl.int64)


@triton.jit
def count_from(source, size, lowest, unit, TILE: tl.constexpr, IN_ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many scores have a key of at least `lowest`."""
    count = 0
    for start in range(0, size, TILE):
        keys, _, there = read_tile(source, start, size, unit, TILE, IN_ROW)
        count += tl.sum((there & (keys >= lowest)).to(tl.int32))
    return count


@triton.jit
def mass_from(  # type: ignore[no-untyped-def]
    source, size, lowest, border, last_id, largest, sharpness, unit, TILE: tl.constexpr, IN_ROW: tl.constexpr
):
    """The mass of the scores with a key of at least `lowest` that `border` and `last_id` keep, float64."""
    mass = tl.zeros([], tl.int64)
    for start in range(0, size, TILE):
        keys, ids, there = read_tile(source, start, size, unit, TILE, IN_ROW)
        inside = (keys > border) | ((keys == border) & (ids <= last_id))
        counts = there & (keys >= lowest) & inside
        mass += tl.sum(tl.where(counts, mass_of(score_of(keys, unit), largest, sharpness), 0))
    return mass.to(tl.float64)


@triton.jit
def nth_id(source, size, key, n, unit, id_bits, TILE: tl.constexpr, IN_ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """The n-th lowest id of the scores with this key; the largest possible id if there are fewer than n."""
    nth = 0  # fewer than n have an id below this
    for bit in range(id_bits):
        middle = nth + (1 << (id_bits - 1 - bit))
        below = 0
        for start in range(0, size, TILE):
            keys, ids, there = read_tile(source, start, size, unit, TILE, IN_ROW)
            below += tl.sum((there & (keys == key) & (ids < middle)).to(tl.int32))
        if below < n:
            nth = middle
    return nth


@triton.jit
def find_threshold(  # type: ignore[no-untyped-def]
    source, size, low, lowest, top_k, top_p, total, largest, sharpness, unit, steps, id_bits,
    SIZE: tl.constexpr, TILE: tl.constexpr, IN_ROW: tl.constexpr,
):  # fmt: skip
    """Find what top_k and then top_p keep of the keys from `lowest` on.

    low: a key that is at most the k-th largest. total: the mass that top_p is a part of; 0: the mass that top_k leaves.

    Returns a border and a last id: kept are all keys above the border, and at the border the ids up to the last id. The
    third result says whether the scores of `source` are enough to find them.
    """
    border, last_id, high = lowest, EVERY_ID, key_of(largest, unit)
    if top_k < SIZE:
        kth = SMALLEST
        for step in range(steps):
            key = kth ^ bit_of(step)
            if key <= low:
                kth = key
            elif key <= high:  # noqa: SIM102 (Triton would compute both sides of an `and`)
                if count_from(source, size, key, unit, TILE, IN_ROW) >= top_k:
                    kth = key
        if kth >= lowest:
            border = kth
            if count_from(source, size, kth, unit, TILE, IN_ROW) > top_k:
                above = count_from(source, size, kth + 1, unit, TILE, IN_ROW)
                last_id = nth_id(source, size, kth, top_k - above, unit, id_bits, TILE, IN_ROW)
    enough = True
    if top_p < 1:
        held = mass_from(source, size, lowest, border, last_id, largest, sharpness, unit, TILE, IN_ROW)
        target = top_p.to(tl.float64) * tl.where(total > 0, total, held)
        enough = held >= target
        if enough:
            nucleus = SMALLEST
            for step in range(steps):
                key = nucleus ^ bit_of(step)
                if key <= border:
                    nucleus = key
                elif key <= high:
                    part = mass_from(source, size, key, border, last_id, largest, sharpness, unit, TILE, IN_ROW)
                    if part >= target:
                        nucleus = key
            above = mass_from(source, size, nucleus + 1, border, last_id, largest, sharpness, unit, TILE, IN_ROW)
            each = mass_of(score_of(nucleus, unit), largest, sharpness).to(tl.float64)
            room = tl.maximum(tl.ceil((target - above) / each), 1.0).to(tl.int32)
            reach = count_from(source, size, nucleus, unit, TILE, IN_ROW) - count_from(
                source, size, nucleus + 1, unit, TILE, IN_ROW
            )
            if room < reach:
                nth = nth_id(source, size, nucleus, room, unit, id_bits, TILE, IN_ROW)
                last_id = tl.where(nucleus > border, nth, tl.minimum(nth, last_id))
            elif nucleus > border:
                last_id = EVERY_ID
            border = nucleus
    return border, last_id, enough
