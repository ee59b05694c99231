"""min_p, top_k and top_p without a sort: finds, per row, the lowest score whose tokens may be drawn, and draws.

There are two kernels. The first reads all logits once, and keeps the maximum of each cell of 32 logits. In the second,
one program per row finds a bound. With top_k, the bound is the k-th largest maximum of a cell, which is at most the
k-th largest logit. With top_p alone, the bound is where the maxima of the cells add up to that probability. Only cells
whose maximum reaches the bound have logits that reach the bound, few more than k. These logits are the candidates of
the row. The program searches the candidates, and draws from what is left. If there are too many candidates (thousands
of equal logits, a large top_k, a flat row with top_p alone), the program searches the row itself, and `sample.py`
draws. No row can change what is found in another row.

The idea of sampling without a sort is FlashInfer's ("Sorting-Free GPU Kernels for LLM Sampling", 2025). FlashInfer
draws again until a token is allowed. With a threshold, one draw is enough. The searches are in `search.py`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.fused.edits import Edits
from nanovllm.kernels.fused.gumbel import fold, gumbel, hash_bits, row_key, uniform_of
from nanovllm.kernels.fused.search import (
    EVERY_ID,
    SMALLEST,
    bit_of,
    find_threshold,
    key_of,
    mass_of,
    only_allowed,
    read_tile,
    score_of,
    sharpness_of,
)
from nanovllm.kernels.launch import overlaps_launches

CELL = 32  # neighbouring logits
CELLS = 128  # per program of the first kernel
ROOM = 4096  # the most candidates of a row, and the most cells that have any
CHUNK = 64  # cells that the second kernel reads together
TILE = 1024  # candidates that the second kernel reads together; when it searches a row, eight times as many logits


class Draw(NamedTuple):
    """What the second kernel needs to draw from the candidates, and where it writes the result."""

    positions: Tensor  # [N]
    seeds: Tensor  # [R] int64
    num_prompt_tokens: Tensor  # [R] int32
    score: Tensor  # [N, parts] float32, written in column 0: the best score
    token_ids: Tensor  # [N, parts] int32, written in column 0: the token with the best score


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _cells_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, masked_ptr, mask_ptr, cells_ptr,
    maxima_ptr, masses_ptr,
    SIZE: tl.constexpr, NUM_CELLS: tl.constexpr, CELL: tl.constexpr, CELLS: tl.constexpr, MASK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Find the maximum of each cell. For top_p alone, also find each program's maximum and the mass relative to it."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + n)
    temperature, log_min_p = tl.load(temperature_ptr + row), tl.load(log_min_p_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row).to(tl.int32), tl.load(top_p_ptr + row)
    if (temperature > 0) & ((top_k < SIZE) | (top_p < 1) | (log_min_p > float("-inf"))):
        cell = part * CELLS + tl.arange(0, CELLS)
        ids = CELL * cell[:, None] + tl.arange(0, CELL)[None, :]  # [CELLS, CELL]
        scores = tl.load(logits_ptr + n * SIZE + ids, mask=ids < SIZE, other=float("-inf")).to(tl.float32)
        if MASK > 0:  # noqa: SIM102
            if tl.load(masked_ptr + row) != 0:
                scores = only_allowed(scores, mask_ptr + row.to(tl.int64) * MASK, ids, ids < SIZE)
        scores = tl.where(scores == scores, scores, float("inf"))  # a NaN is an infinite maximum, which filters nothing
        cells = tl.max(scores, 1)  # [CELLS]
        tl.store(cells_ptr + n * NUM_CELLS + cell, cells, mask=cell < NUM_CELLS)
        if (top_k >= SIZE) & (top_p < 1):
            largest = tl.max(cells)
            here = n * tl.num_programs(1) + part
            tl.store(maxima_ptr + here, largest)
            if (largest > float("-inf")) & (largest < float("inf")):
                tl.store(masses_ptr + here, tl.sum(mass_of(scores, largest, sharpness_of(temperature))))


@triton.jit(
    do_not_specialize=["num_parts", "steps", "id_bits", "best_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "positions_ptr", "best_id_ptr"],
)
def _threshold_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, masked_ptr, mask_ptr, cells_ptr,
    maxima_ptr, masses_ptr, num_edits_ptr, edited_ids_ptr, edits_ptr, found_ptr, scores_ptr, ids_ptr, border_ptr,
    last_id_ptr, drawn_ptr, positions_ptr, seed_ptr, num_prompt_ptr, best_score_ptr, best_id_ptr, best_stride,
    num_parts, steps, id_bits,
    SIZE: tl.constexpr, NUM_CELLS: tl.constexpr, CELL: tl.constexpr, ALL_CELLS: tl.constexpr, PARTS: tl.constexpr,
    ROOM: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, EDITS: tl.constexpr, MASK: tl.constexpr,
    DRAW: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + n)
    temperature, log_min_p = tl.load(temperature_ptr + row), tl.load(log_min_p_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row).to(tl.int32), tl.load(top_p_ptr + row)
    ranked = (top_k < SIZE) | (top_p < 1)
    border_score, last_id, drawn = float("-inf"), EVERY_ID, 0
    if (temperature > 0) & (ranked | (log_min_p > float("-inf"))):
        logits_ptr += n * SIZE
        cell = tl.arange(0, ALL_CELLS)
        cells = tl.load(cells_ptr + n * NUM_CELLS + cell, mask=cell < NUM_CELLS, other=float("-inf"))
        largest = tl.max(cells)
        # The scores of edited tokens are float32, whatever the dtype of the logits.
        num_edits, unit, masked = 0, tl.where(steps < 32, 65536, 1), False
        if EDITS > 0:
            num_edits = tl.load(num_edits_ptr + n)
            edits_ptr, edited_ids_ptr = edits_ptr + n * EDITS, edited_ids_ptr + n * EDITS
            if num_edits > 0:
                unit, steps = 1, 32
            for start in range(0, num_edits, TILE):
                place = start + tl.arange(0, TILE)
                edited = tl.load(edits_ptr + place, mask=place < num_edits, other=float("-inf"))
                largest = tl.maximum(largest, tl.max(tl.where(edited == edited, edited, float("inf"))))
        if MASK > 0:
            masked = tl.load(masked_ptr + row) != 0
            mask_ptr += row.to(tl.int64) * MASK
        if (largest < float("inf")) & (largest > float("-inf")):  # otherwise the row samples -1, filtered or not
            sharpness = sharpness_of(temperature)
            whole = logits_ptr, SIZE, mask_ptr, masked, edits_ptr, edited_ids_ptr
            lowest = key_of(tl.full([], float("-inf"), tl.float32), unit) + unit
            if log_min_p > float("-inf"):
                # Find the largest key that min_p rules out. All smaller keys are ruled out as well.
                lowest = SMALLEST
                for step in range(steps):
                    higher = lowest ^ bit_of(step)
                    if tl.div_rn(tl.minimum(score_of(higher, unit), largest) - largest, temperature) < log_min_p:
                        lowest = higher
                lowest += unit
            border = lowest
            if ranked:
                keys, high = key_of(cells, unit), key_of(largest, unit)
                bound, total = SMALLEST, tl.zeros([], tl.float64)
                if top_k < SIZE:
                    for step in range(tl.minimum(steps, 16)):  # the upper half of the bits: a near bound is enough
                        higher = bound ^ bit_of(step)
                        if higher <= high:  # noqa: SIM102 (Triton would compute both sides of an `and`)
                            if tl.sum((keys >= higher).to(tl.int32)) >= top_k:
                                bound = higher
                elif log_min_p == float("-inf"):  # with min_p, top_p is a part of what min_p leaves: not summed yet
                    part = tl.arange(0, PARTS)
                    exists, here = part < num_parts, n * num_parts + part
                    maxima = tl.load(maxima_ptr + here, mask=exists, other=float("-inf"))
                    masses = tl.load(masses_ptr + here, mask=exists, other=0).to(tl.float64)
                    share = tl.exp2(((maxima - largest) * sharpness).to(tl.float64))
                    total = tl.sum(tl.where(maxima > float("-inf"), masses * share, 0.0))
                    for start in range(0, num_edits, TILE):
                        place = start + tl.arange(0, TILE)
                        edited = tl.load(edits_ptr + place, mask=place < num_edits, other=float("-inf"))
                        total += tl.sum(mass_of(edited, largest, sharpness)).to(tl.float64)
                    for step in range(tl.minimum(steps, 16)):
                        higher = bound ^ bit_of(step)
                        if higher <= high:
                            mass = tl.where(keys >= higher, mass_of(cells, largest, sharpness), 0)
                            if tl.sum(mass).to(tl.float64) >= top_p.to(tl.float64) * total:
                                bound = higher
                first = tl.maximum(bound, lowest)  # all keys from here on are candidates
                reaches = keys >= first
                count = tl.sum(reaches.to(tl.int32))
                found = ROOM + 1
                found_ptr, scores_ptr, ids_ptr = found_ptr + n * ROOM, scores_ptr + n * ROOM, ids_ptr + n * ROOM
                if count <= ROOM:
                    tl.store(found_ptr + tl.cumsum(reaches.to(tl.int32), 0) - 1, cell, mask=reaches)
                    tl.debug_barrier()
                    found = 0
                    for start in range(0, count, CHUNK):
                        place = start + tl.arange(0, CHUNK)
                        own = tl.load(found_ptr + place, mask=place < count, other=NUM_CELLS)
                        ids = CELL * own[:, None] + tl.arange(0, CELL)[None, :]  # [CHUNK, CELL]
                        scores = tl.load(logits_ptr + ids, mask=ids < SIZE, other=float("-inf")).to(tl.float32)
                        if masked:
                            scores = only_allowed(scores, mask_ptr, ids, ids < SIZE)
                        inside = key_of(scores, unit) >= first
                        in_cell = tl.sum(inside.to(tl.int32), 1)
                        before = found + tl.cumsum(in_cell, 0) - in_cell  # [CHUNK]
                        slot = before[:, None] + tl.cumsum(inside.to(tl.int32), 1) - 1
                        tl.store(scores_ptr + slot, scores, mask=inside & (slot < ROOM))
                        tl.store(ids_ptr + slot, ids, mask=inside & (slot < ROOM))
                        found += tl.sum(in_cell)
                    for start in range(0, num_edits, TILE):
                        place = start + tl.arange(0, TILE)
                        edited = tl.load(edits_ptr + place, mask=place < num_edits, other=float("-inf"))
                        token = tl.load(edited_ids_ptr + place, mask=place < num_edits, other=0)
                        inside = key_of(edited, unit) >= first
                        slot = found + tl.cumsum(inside.to(tl.int32), 0) - 1
                        tl.store(scores_ptr + slot, edited, mask=inside & (slot < ROOM))
                        tl.store(ids_ptr + slot, token, mask=inside & (slot < ROOM))
                        found += tl.sum(inside.to(tl.int32))
                    tl.debug_barrier()
                # The maxima of cells give a bound only for a k up to the number of cells.
                enough = (found <= ROOM) & ((top_k >= SIZE) | (top_k <= NUM_CELLS) | (first == lowest))
                candidates = scores_ptr, ids_ptr
                if enough:
                    border, last_id, enough = find_threshold(
                        candidates, found, bound, first, top_k, top_p, total, largest, sharpness, unit, steps, id_bits,
                        SIZE, TILE, False,
                    )  # fmt: skip
                if enough:
                    if DRAW:
                        index = tl.load(positions_ptr + n) - tl.load(num_prompt_ptr + row)
                        key_low, key_high = row_key(tl.load(seed_ptr + row), index)
                        best, winner = float("-inf"), EVERY_ID
                        for start in range(0, found, TILE):
                            key, token, left = read_tile(candidates, start, found, unit, TILE, False)
                            left &= (key > border) | ((key == border) & (token <= last_id))
                            noise = gumbel(uniform_of(hash_bits(fold(token.to(tl.uint32) ^ key_low), key_high)), FAST)
                            score = tl.where(left, score_of(key, unit) + temperature * noise, float("-inf"))
                            top = tl.max(score)
                            lowest_id = tl.min(tl.where(score == top, token, EVERY_ID))
                            if (top > best) | ((top == best) & (lowest_id < winner)):
                                best = top
                                winner = lowest_id
                        tl.store(best_score_ptr + n * best_stride, best)
                        tl.store(best_id_ptr + n * best_stride, winner)
                        drawn = 1
                else:
                    size = tl.cdiv(SIZE, 8 * TILE) * 8 * TILE + num_edits
                    border, last_id, enough = find_threshold(
                        whole, size, SMALLEST, lowest, top_k, top_p, tl.zeros([], tl.float64), largest, sharpness, unit,
                        steps, id_bits, SIZE, 8 * TILE, True,
                    )  # fmt: skip
            border_score = score_of(border, unit)
    tl.store(border_ptr + n, border_score)
    tl.store(last_id_ptr + n, last_id)
    tl.store(drawn_ptr + n, drawn)


def thresholds(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    masks: tuple[Tensor, Tensor] | None = None,
    edits: Edits | None = None,
    draw: Draw | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the lowest score that min_p, top_k and top_p keep in each row, in vLLM's order.

    `filter_scores` in `sampling/filters.py` is the reference.

    Args:
        logits: [N, V] of any float dtype, contiguous.
        rows: [N] integers: the row of persistent state that each row of logits belongs to.
        temperature: [R] float32; a row with temperature 0 keeps every token.
        top_k: [R] integers, V for none. top_p: [R] float32, 1 for none. log_min_p: [R] float32, -inf for none.
        masks: [R] int64, whether a row has a mask, and [R, ceil(V / 32)] int32, a set bit for each token that is
            allowed. None: no row has a mask.
        edits: the edited tokens with their scores; the logits of these tokens are -inf. None: there are none.
        draw: where to put the tokens that can be drawn at once. None: no token is drawn here.

    Returns:
        [N] float32 and [N] int32, a border and a last id: a token may be drawn if its logit is above the border, or if
        its logit is at the border and its id is at most the last id. They are -inf and 2**31 - 1 where nothing is ruled
        out, and where a row has no finite maximum.
        [N] int32: whether the row's token was drawn.
    """
    num_rows, width = logits.shape
    num_cells = triton.cdiv(width, CELL)
    num_parts = triton.cdiv(num_cells, CELLS)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    border, last_id, drawn = empty(torch.float32), empty(torch.int32), empty(torch.int32)
    of_cells = empty(torch.float32, num_cells), empty(torch.float32, num_parts), empty(torch.int64, num_parts)
    found = empty(torch.int32, ROOM), empty(torch.float32, ROOM), empty(torch.int32, ROOM)
    drawing = draw or Draw(rows, of_cells[2], rows, border[:, None], last_id[:, None])  # never used
    listed = (edits.counts, edits.ids, edits.scores) if edits is not None else (last_id, last_id, border)
    masked, mask = masks or (rows, rows)
    parameters = logits, rows, temperature, top_k, top_p, log_min_p, masked, mask
    pdl, bf16 = overlaps_launches(logits.device), logits.dtype == torch.bfloat16
    sizes = {"SIZE": width, "NUM_CELLS": num_cells, "CELL": CELL, "PDL": pdl, "launch_pdl": pdl}
    sizes["MASK"] = 0 if masks is None else mask.shape[1]
    _cells_kernel[(num_rows, num_parts)](*parameters, *of_cells, CELLS=CELLS, num_warps=4, **sizes)
    _threshold_kernel[(num_rows,)](
        *parameters, *of_cells, *listed, *found, border, last_id, drawn, *drawing, drawing.score.stride(0), num_parts,
        16 if bf16 else 32, (width - 1).bit_length(), ALL_CELLS=triton.next_power_of_2(num_cells),
        PARTS=triton.next_power_of_2(num_parts), ROOM=ROOM, CHUNK=CHUNK, TILE=TILE,
        EDITS=0 if edits is None else edits.ids.shape[1], DRAW=draw is not None, FAST=logits.is_cuda, num_warps=8,
        **sizes,
    )  # fmt: skip
    return border, last_id, drawn
