"""Plain sampling in one pass over the logits: argmax(logit + temperature * noise), with noise made where it is used.

With separate operations, the noise alone is read and written a dozen times, 156 MB each time for 256 rows of 151,936.
Here the logits are read once, in the dtype they have, and nothing else is read or written. A row with temperature 0
computes no noise. The noise is that of `sampling/noise.py`: the same bit for bit in its integers, while logarithms
differ by some 1e-6.

The limit here is arithmetic. So a program goes through its part of a row tile by tile. It computes the scores of a tile
only if one of them can be the best so far. A bound, which takes a single logarithm, decides this.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.fused.edits import Edits
from nanovllm.kernels.fused.gumbel import fold, gumbel, hash_bits, log2, row_key, uniform_of
from nanovllm.kernels.fused.search import only_allowed
from nanovllm.kernels.fused.threshold import Draw, thresholds
from nanovllm.kernels.launch import overlaps_launches

TILE = 512  # logits that a program, a single warp, reads together
PROGRAMS = 32 * 132  # as many as an H100 or H200 runs at once; the same on all GPUs, so that ranks cut rows equally
EXPONENT = tl.constexpr(32.001)


@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _tile(logits_ptr, place, end):  # type: ignore[no-untyped-def]
    return tl.load(logits_ptr + place, mask=place < end, other=float("-inf"))


@triton.jit
def _best_of_part(  # type: ignore[no-untyped-def]
    logits_ptr, first, end, first_id, low, high, temperature, border, last_id, mask_ptr, masked,
    TILE: tl.constexpr, VECTOR: tl.constexpr, NOISE: tl.constexpr, FILTERED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The best score of logits [first, end) of a row, and its token. Among equal scores the lowest token wins.

    A bound decides whether a tile's scores are computed. For a uniform number u, the noise -log(-log(1 - u)) is at most
    -log(u). So a score is at most logit + temperature * log(2) * (32 - log2(x)), where x = u * 2**32. The bound leaves
    out the hash's last step. That step changes x by at most one part in 65,536. The number is then made odd, which can
    only lower the score. `scale` is at least temperature * log(2), and EXPONENT exceeds 32 by more than all errors of
    logarithms and products. So where a score is above `best`, logit - scale * log2(x) is above best - scale * EXPONENT.
    Each side is rounded once, which keeps their order or makes them equal, however large the logits are. So only what
    is `below` cannot win. Nothing is below or above a NaN.
    """
    best = float("-inf")
    winner = 0  # means nothing as long as no score is finite
    scale = temperature * 0.69314790 + 1e-37
    lanes = tl.arange(0, VECTOR)[None, :]
    place = first + VECTOR * tl.arange(0, TILE // VECTOR)[:, None] + lanes
    following = _tile(logits_ptr, place, end)
    for start in range(first, end, TILE):
        vectors = start + VECTOR * tl.arange(0, TILE // VECTOR)[:, None]
        logits = following.to(tl.float32)
        if FILTERED:
            if masked:
                logits = only_allowed(logits, mask_ptr, vectors + lanes, vectors + lanes < end)
            at_border = (logits == border) & (first_id + vectors + lanes <= last_id)
            logits = tl.where((logits > border) | at_border, logits, float("-inf"))
        following = _tile(logits_ptr, vectors + lanes + TILE, end)  # requested one turn early
        if NOISE:
            # VECTOR divides all of these token ids: the ids within a vector differ in the lowest bits alone
            folded = fold((first_id + vectors).to(tl.uint32)) ^ fold(low)
            x = hash_bits(folded ^ lanes.to(tl.uint32), high)
            at_most = tl.fma(-scale, log2(x.to(tl.float32), FAST), logits)
            needed = tl.fma(-scale, EXPONENT, best)
        else:
            at_most = logits
            needed = best
        below = tl.reduce(at_most, 1, _larger) < needed  # with logits of 16 bits, each thread has whole vectors
        needless = tl.min(below.to(tl.int32), 0) == 1
        if FILTERED:
            needless |= tl.max(logits) == float("-inf")
        if not needless:
            score = logits
            if NOISE:
                score += temperature * gumbel(uniform_of(x), FAST)
            score = tl.where(score != score, float("inf"), score)  # so that the maximum shows a NaN
            top = tl.max(score)
            if top > best:
                best = top
                winner = tl.min(tl.where(score == top, first_id + vectors + lanes, 2147483647))
    return best, winner


@triton.jit
def _best_of_list(  # type: ignore[no-untyped-def]
    scores_ptr, ids_ptr, count, low, high, temperature, border, last_id, TILE: tl.constexpr, FAST: tl.constexpr
):
    """The best score of a row's edited tokens, and its token. Among equal scores the lowest token wins."""
    best = float("-inf")
    winner = 0
    for start in range(0, count, TILE):
        place = start + tl.arange(0, TILE)
        score = tl.load(scores_ptr + place, mask=place < count, other=float("-inf"))
        ids = tl.load(ids_ptr + place, mask=place < count, other=0)
        left = (score > border) | ((score == border) & (ids <= last_id)) | (score != score)
        if temperature > 0:
            score += temperature * gumbel(uniform_of(hash_bits(fold(ids.to(tl.uint32) ^ low), high)), FAST)
        score = tl.where(score != score, float("inf"), score)  # so that the maximum shows a NaN
        score = tl.where(left, score, float("-inf"))
        top = tl.max(score)
        if top > best:  # ids ascend
            best = top
            winner = tl.min(tl.where(score == top, ids, 2147483647))
    return best, winner


@triton.jit(
    do_not_specialize=["first_id", "tiles_of_part"],
    do_not_specialize_on_alignment=["rows_ptr", "positions_ptr", "border_ptr", "last_id_ptr", "id_ptr"],
)
def _best_of_part_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, rows_ptr, positions_ptr, temperature_ptr, seed_ptr, num_prompt_ptr, masked_ptr, mask_ptr, num_edits_ptr,
    edited_ids_ptr, edits_ptr, border_ptr, last_id_ptr, drawn_ptr, score_ptr, id_ptr, first_id, tiles_of_part,
    ROW: tl.constexpr, IDS: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr, MASK: tl.constexpr,
    EDITS: tl.constexpr, FILTERS: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find the best score of a part of a row. If there are edits, the last program takes the row's edited tokens."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows_ptr + n)
    temperature = tl.load(temperature_ptr + row)
    logits_ptr += n.to(tl.int64) * ROW
    first = part * tiles_of_part * TILE
    end = tl.minimum(first + tiles_of_part * TILE, IDS)
    best, winner, drawn = float("-inf"), 0, False
    low, high = row_key(tl.load(seed_ptr + row), tl.load(positions_ptr + n) - tl.load(num_prompt_ptr + row))
    border, last_id, masked, listed = float("-inf"), 2147483647, False, False
    if FILTERS:
        drawn = tl.load(drawn_ptr + n) > 0  # then the best of the row is already in the first part's place
        border, last_id = tl.load(border_ptr + n), tl.load(last_id_ptr + n)
    if MASK > 0:
        masked = tl.load(masked_ptr + row) != 0
        mask_ptr += row.to(tl.int64) * MASK
    if EDITS > 0:
        listed = part == tl.num_programs(1) - 1
    constrained = (border > float("-inf")) | masked
    if drawn:
        winner = 0
    elif listed:
        if EDITS > 0:
            edits_ptr, edited_ids_ptr = edits_ptr + n.to(tl.int64) * EDITS, edited_ids_ptr + n.to(tl.int64) * EDITS
            best, winner = _best_of_list(
                edits_ptr, edited_ids_ptr, tl.load(num_edits_ptr + n), low, high, temperature, border, last_id,
                TILE, FAST,
            )  # fmt: skip
    elif (temperature > 0) & constrained:
        best, winner = _best_of_part(
            logits_ptr, first, end, first_id, low, high, temperature, border, last_id, mask_ptr, masked,
            TILE, VECTOR, True, True, FAST,
        )  # fmt: skip
    elif temperature > 0:
        best, winner = _best_of_part(
            logits_ptr, first, end, first_id, low, high, temperature, 0.0, 0, mask_ptr, False,
            TILE, VECTOR, True, False, FAST,
        )  # fmt: skip
    elif constrained:
        best, winner = _best_of_part(
            logits_ptr, first, end, first_id, 0, 0, 0.0, border, last_id, mask_ptr, masked,
            TILE, VECTOR, False, True, FAST,
        )  # fmt: skip
    else:
        best, winner = _best_of_part(
            logits_ptr, first, end, first_id, 0, 0, 0.0, 0.0, 0, mask_ptr, False, TILE, VECTOR, False, False, FAST
        )
    place = n * tl.num_programs(1) + part
    if not (drawn & (part == 0)):
        tl.store(score_ptr + place, best)
        tl.store(id_ptr + place, winner)


@triton.jit(
    do_not_specialize=["num_parts", "row_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "positions_ptr", "id_ptr"],
)
def _best_of_row_kernel(  # type: ignore[no-untyped-def]
    score_ptr, id_ptr, rows_ptr, positions_ptr, token_ids_ptr, tokens_ptr, num_parts, row_stride,
    RANKS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0)
    part = tl.arange(0, PARTS)  # of all ranks
    rank = part // num_parts
    place = (2 * rank * tl.num_programs(0) + n) * num_parts + part % num_parts  # in [R, 2, N, parts]
    score = tl.load(score_ptr + place, mask=rank < RANKS, other=float("-inf"))
    ids = tl.load(id_ptr + place, mask=rank < RANKS, other=2147483647)
    best = tl.max(score, 0)
    winner = tl.min(tl.where(score == best, ids, 2147483647), 0)
    finite = (best < float("inf")) & (best > float("-inf"))
    tl.store(tokens_ptr + n, tl.where(finite, winner, -1).to(tl.int64))
    row = tl.load(rows_ptr + n).to(tl.int64)
    tl.store(token_ids_ptr + row * row_stride + tl.load(positions_ptr + n), tl.where(finite, winner, 0))


def sample_rows(
    logits: Tensor,
    rows: Tensor,
    next_positions: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    num_prompt_tokens: Tensor,
    token_ids: Tensor,
    first_id: int = 0,
    num_ids: int | None = None,
    all_gather: Callable[[Tensor], Tensor] | None = None,
    filters: tuple[Tensor, Tensor, Tensor] | None = None,
    masks: tuple[Tensor, Tensor] | None = None,
    edits: Edits | None = None,
) -> Tensor:
    """Draw a token for each row of logits, and write it where the next step looks for it.

    With several ranks, each has the logits of some tokens. The ranks exchange the best score of each part of a row.

    Args:
        logits: [N, V] of any float dtype, contiguous.
        rows: [N] integers: the row of persistent state that each row of logits belongs to.
        next_positions: [N] integers: where in its row the new token goes.
        temperature: [R] float32. seeds: [R] int64. num_prompt_tokens: [R] int32.
        token_ids: [R, L] int32, written: the new token, or 0 where the token is -1.
        first_id: the token of the first logit. num_ids: how many of the V are logits; None: all. The rest is padding.
        all_gather: from a rank's tensor [...] to the tensors of all ranks [ranks, ...]; None: there is one rank.
        filters: top_k, top_p and log_min_p [R], as for `thresholds`; None: no row has any. They need all V logits here.
        masks, edits: as for `thresholds`. They need all V logits, too.

    Returns:
        [N] int64: the tokens, or -1 for a row whose largest score is not finite.
    """
    num_rows, width = logits.shape
    num_tiles = triton.cdiv(width, TILE)
    tiles_of_part = triton.cdiv(num_tiles, max(1, PROGRAMS // max(1, num_rows)))
    lists = 0 if edits is None else 1
    num_parts = triton.cdiv(num_tiles, tiles_of_part) + lists
    best = rows.new_empty(2, num_rows, num_parts, dtype=torch.int32)  # the bits of the scores [N, parts], and the ids
    tokens = rows.new_empty(num_rows, dtype=torch.int64)  # [N]
    score, ids = best[0].view(torch.float32), best[1]
    border = last_id = drawn = best  # never used
    if filters is not None:
        draw = Draw(next_positions, seeds, num_prompt_tokens, score, ids)
        border, last_id, drawn = thresholds(logits, rows, temperature, *filters, masks, edits, draw)
    masked, mask = masks or (rows, rows)
    listed = (edits.counts, edits.ids, edits.scores) if edits is not None else (best, best, best)
    pdl = overlaps_launches(logits.device)
    _best_of_part_kernel[(num_rows, num_parts)](
        logits, rows, next_positions, temperature, seeds, num_prompt_tokens, masked, mask, *listed, border, last_id,
        drawn, score, ids, first_id, tiles_of_part, ROW=width, IDS=width if num_ids is None else num_ids, TILE=TILE,
        VECTOR=8 if first_id % 8 == width % 8 == 0 else 1, MASK=0 if masks is None else mask.shape[1],
        EDITS=0 if edits is None else edits.ids.shape[1], FILTERS=filters is not None, FAST=logits.is_cuda, PDL=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    of_all = best[None] if all_gather is None else all_gather(best)  # [R, 2, N, parts]
    _best_of_row_kernel[(num_rows,)](
        of_all.view(torch.float32), of_all[:, 1:], rows, next_positions, token_ids, tokens, num_parts,
        token_ids.stride(0), RANKS=len(of_all), PARTS=triton.next_power_of_2(len(of_all) * (num_tiles + lists)),
        PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return tokens
