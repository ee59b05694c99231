"""Edit the scores of single tokens in a recorded step: allowed tokens, bad words, min_tokens, biases and penalties.

`constrain` in `sampling/filters.py` is the reference.

A row names few of 151,936 tokens: the tokens of its prompt and output, and those in its lists. One program per row
makes a list of the tokens whose score changes, in the order of their ids. It writes -inf in the places of these tokens
in the row. The kernels that follow take the row without these tokens, and the list, as the scores of the row. A row
that asks for nothing costs a single load.

The list is made in two passes over the tokens that the row names. A row may name a token many times. The first pass
sets a bit for each token. The number of bits before a token's own bit is its place in the list. At that place the
second pass notes what happens to the token: how often it was in the output, what is added, whether it is ruled out. The
time is linear. Only integers are summed, so that the order cannot matter. (Counts for the whole vocabulary would take
311 MB for 512 rows.)

Nothing is kept from step to step: there is nothing to undo for a rejected guess, or to rebuild after a preemption.
"""

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import overlaps_launches

TILE = 1024  # tokens, or words of bits, that a program reads together
# The note of a token is how often it was in the output, plus these bits.
IN_PROMPT = tl.constexpr(1 << 30)
RULED_OUT = tl.constexpr(1 << 29)
MARK, NOTE = tl.constexpr(0), tl.constexpr(1)  # the two passes


class Edits(NamedTuple):
    """The tokens whose score is edited, for N rows of logits: the first counts[n] of row n, in ascending order."""

    ids: Tensor  # [N, E] int32
    raw: Tensor  # [N, E] float32, the model's logits
    scores: Tensor  # [N, E] float32, -inf where a token is ruled out
    counts: Tensor  # [N] int32


class EditState(Protocol):
    """What R rows ask for, as `SamplingState` has it. All are contiguous. Behind a list's end, values are left over."""

    token_ids: Tensor  # [R, L] int32: prompt and output, and guesses
    num_prompt_tokens: Tensor  # [R] int32
    edited: Tensor  # [R] int64: 0 where a row asks for nothing
    repetition_penalty: Tensor  # [R] float32
    presence_penalty: Tensor  # [R] float32
    frequency_penalty: Tensor  # [R] float32
    min_tokens: Tensor  # [R] int64
    num_stop_ids: Tensor  # [R] int64
    stop_ids: Tensor  # [R, S] int32: what min_tokens holds back
    num_biased: Tensor  # [R] int64
    biased_ids: Tensor  # [R, B] int32, each once
    bias: Tensor  # [R, B] float32
    num_bad_words: Tensor  # [R] int64
    bad_ends: Tensor  # [R, W] int32: where each spelling ends in `bad_tokens`
    bad_tokens: Tensor  # [R, T] int32: one spelling after another
    masked: Tensor  # [R] int64: 0 where the mask does not count
    mask: Tensor  # [R, ceil(V / 32)] int32: a set bit for each token that is allowed


@triton.jit
def _popcount(bits):  # type: ignore[no-untyped-def]
    """uint32 -> the number of bits that are set, int32."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    bits = bits + (bits >> 8)
    return ((bits + (bits >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def _bit(local):  # type: ignore[no-untyped-def]
    """The bit of a token in its word, uint32."""
    return tl.full(local.shape, 1, tl.uint32) << (local % 32).to(tl.uint32)


@triton.jit
def _visit(words_ptr, places_ptr, ids_ptr, local, there, PASS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Visit named tokens, given as places in the row of logits. The second pass returns their places in the list."""
    word = tl.where(there, local // 32, 0)
    if PASS == MARK:
        tl.atomic_or(words_ptr + word, _bit(local).to(tl.int32, bitcast=True), mask=there, sem="relaxed")
        return local
    else:
        bits = tl.load(words_ptr + word, mask=there, other=0).to(tl.uint32, bitcast=True)
        place = tl.load(places_ptr + word, mask=there, other=0) + _popcount(bits & (_bit(local) - 1))
        tl.store(ids_ptr + place, local, mask=there)
        return place


@triton.jit
def _visit_all(  # type: ignore[no-untyped-def]
    row, num_prompt, position, first_id, penalized, repeats,
    token_ids_ptr, min_tokens_ptr, num_stop_ids_ptr, stop_ids_ptr, num_biased_ptr, biased_ids_ptr, biases_ptr,
    num_bad_words_ptr, bad_ends_ptr, bad_tokens_ptr, words_ptr, places_ptr, ids_ptr, notes_ptr, scores_ptr,
    KNOWN: tl.constexpr, STOP_IDS: tl.constexpr, BIASED: tl.constexpr, BAD_WORDS: tl.constexpr,
    BAD_TOKENS: tl.constexpr, IDS: tl.constexpr, TILE: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    """Visit all tokens that the row names. With several ranks, each rank visits the tokens whose logits it has."""
    lane = tl.arange(0, TILE)
    token_ids_ptr += row * KNOWN
    if penalized:
        for start in range(tl.where(repeats, 0, num_prompt), position, TILE):
            column = start + lane
            local = tl.load(token_ids_ptr + column, mask=column < position, other=-1) - first_id
            there = (column < position) & (local >= 0) & (local < IDS)
            place = _visit(words_ptr, places_ptr, ids_ptr, local, there, PASS)
            if PASS == NOTE:
                in_output = column >= num_prompt
                tl.atomic_add(notes_ptr + place, 1, mask=there & in_output, sem="relaxed")
                tl.atomic_or(notes_ptr + place, IN_PROMPT, mask=there & (in_output == 0), sem="relaxed")
    num_biased = tl.load(num_biased_ptr + row).to(tl.int32)
    for start in range(0, num_biased, TILE):
        entry = start + lane
        local = tl.load(biased_ids_ptr + row * BIASED + entry, mask=entry < num_biased, other=-1) - first_id
        there = (entry < num_biased) & (local >= 0) & (local < IDS)
        place = _visit(words_ptr, places_ptr, ids_ptr, local, there, PASS)
        if PASS == NOTE:
            tl.store(scores_ptr + place, tl.load(biases_ptr + row * BIASED + entry, mask=there, other=0.0), mask=there)
    num_output = position - num_prompt
    if num_output < tl.load(min_tokens_ptr + row):
        num_stop_ids = tl.load(num_stop_ids_ptr + row).to(tl.int32)
        for start in range(0, num_stop_ids, TILE):
            entry = start + lane
            local = tl.load(stop_ids_ptr + row * STOP_IDS + entry, mask=entry < num_stop_ids, other=-1) - first_id
            there = (entry < num_stop_ids) & (local >= 0) & (local < IDS)
            place = _visit(words_ptr, places_ptr, ids_ptr, local, there, PASS)
            if PASS == NOTE:
                tl.atomic_or(notes_ptr + place, RULED_OUT, mask=there, sem="relaxed")
    num_bad_words = tl.load(num_bad_words_ptr + row).to(tl.int32)
    bad_ends_ptr += row * BAD_WORDS
    bad_tokens_ptr += row * BAD_TOKENS
    for start in range(0, num_bad_words, TILE):
        entry = start + lane
        end = tl.load(bad_ends_ptr + entry, mask=entry < num_bad_words, other=1)
        begin = tl.load(bad_ends_ptr + entry - 1, mask=(entry < num_bad_words) & (entry > 0), other=0)
        num_before = end - 1 - begin  # tokens of the word before its last
        matches = (entry < num_bad_words) & (num_before <= num_output)
        longest = tl.max(tl.where(matches, num_before, 0))
        for distance in range(1, longest + 1):
            known = tl.load(token_ids_ptr + position - distance)
            compared = matches & (distance <= num_before)
            matches &= (tl.load(bad_tokens_ptr + end - 1 - distance, mask=compared, other=0) == known) | (compared == 0)
        local = tl.load(bad_tokens_ptr + end - 1, mask=matches, other=-1) - first_id
        there = matches & (local >= 0) & (local < IDS)
        place = _visit(words_ptr, places_ptr, ids_ptr, local, there, PASS)
        if PASS == NOTE:
            tl.atomic_or(notes_ptr + place, RULED_OUT, mask=there, sem="relaxed")


@triton.jit(do_not_specialize=["first_id"], do_not_specialize_on_alignment=["rows_ptr", "positions_ptr"])
def _edit_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, rows_ptr, positions_ptr, first_id, token_ids_ptr, num_prompt_ptr, edited_ptr, repetition_ptr,
    presence_ptr, frequency_ptr, min_tokens_ptr, num_stop_ids_ptr, stop_ids_ptr, num_biased_ptr, biased_ids_ptr,
    biases_ptr, num_bad_words_ptr, bad_ends_ptr, bad_tokens_ptr, masked_ptr, mask_ptr, words_ptr, places_ptr, ids_ptr,
    notes_ptr, raw_ptr, scores_ptr, counts_ptr,
    ROW: tl.constexpr, IDS: tl.constexpr, LIST: tl.constexpr, WORDS: tl.constexpr, KNOWN: tl.constexpr,
    STOP_IDS: tl.constexpr, BIASED: tl.constexpr, BAD_WORDS: tl.constexpr, BAD_TOKENS: tl.constexpr,
    MASK: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + n).to(tl.int64)
    total = 0
    if tl.load(edited_ptr + row) != 0:
        logits_ptr += n * ROW
        words_ptr, places_ptr = words_ptr + n * WORDS, places_ptr + n * WORDS
        ids_ptr, notes_ptr = ids_ptr + n * LIST, notes_ptr + n * LIST
        raw_ptr, scores_ptr = raw_ptr + n * LIST, scores_ptr + n * LIST
        position = tl.load(positions_ptr + n).to(tl.int32)
        num_prompt = tl.load(num_prompt_ptr + row)
        repetition = tl.load(repetition_ptr + row)
        presence, frequency = tl.load(presence_ptr + row), tl.load(frequency_ptr + row)
        repeats = repetition != 1
        penalized = repeats | (presence != 0) | (frequency != 0)
        masked = tl.load(masked_ptr + row) != 0
        lane = tl.arange(0, TILE)

        for start in range(0, WORDS, TILE):
            tl.store(words_ptr + start + lane, 0, mask=start + lane < WORDS)
        tl.debug_barrier()
        _visit_all(
            row, num_prompt, position, first_id, penalized, repeats,
            token_ids_ptr, min_tokens_ptr, num_stop_ids_ptr, stop_ids_ptr, num_biased_ptr, biased_ids_ptr, biases_ptr,
            num_bad_words_ptr, bad_ends_ptr, bad_tokens_ptr, words_ptr, places_ptr, ids_ptr, notes_ptr, scores_ptr,
            KNOWN, STOP_IDS, BIASED, BAD_WORDS, BAD_TOKENS, IDS, TILE, MARK,
        )  # fmt: skip
        tl.debug_barrier()
        for start in range(0, WORDS, TILE):
            there = start + lane < WORDS
            bits = tl.load(words_ptr + start + lane, mask=there, other=0).to(tl.uint32, bitcast=True)
            number = _popcount(bits)
            tl.store(places_ptr + start + lane, total + tl.cumsum(number, 0) - number, mask=there)
            total += tl.sum(number)
        for start in range(0, total, TILE):
            there = start + lane < total
            tl.store(notes_ptr + start + lane, 0, mask=there)
            tl.store(scores_ptr + start + lane, 0.0, mask=there)
        tl.debug_barrier()
        _visit_all(
            row, num_prompt, position, first_id, penalized, repeats,
            token_ids_ptr, min_tokens_ptr, num_stop_ids_ptr, stop_ids_ptr, num_biased_ptr, biased_ids_ptr, biases_ptr,
            num_bad_words_ptr, bad_ends_ptr, bad_tokens_ptr, words_ptr, places_ptr, ids_ptr, notes_ptr, scores_ptr,
            KNOWN, STOP_IDS, BIASED, BAD_WORDS, BAD_TOKENS, IDS, TILE, NOTE,
        )  # fmt: skip
        tl.debug_barrier()
        for start in range(0, total, TILE):
            entry = start + lane
            there = entry < total
            local = tl.load(ids_ptr + entry, mask=there, other=0)
            notes = tl.load(notes_ptr + entry, mask=there, other=0)
            raw = tl.load(logits_ptr + local, mask=there, other=0.0).to(tl.float32)
            score = raw + tl.load(scores_ptr + entry, mask=there, other=0.0)
            ruled_out = (notes & RULED_OUT) != 0
            known = (notes & (RULED_OUT - 1 | IN_PROMPT)) != 0
            count = notes & (RULED_OUT - 1)
            repeated = tl.where(score > 0, tl.div_rn(score, repetition), score * repetition)
            score = tl.where(known, repeated, score)
            score = score - frequency * count.to(tl.float32)
            score = score - presence * (count > 0).to(tl.float32)
            if masked:
                token = first_id + local
                allowed = tl.load(mask_ptr + row * MASK + token // 32, mask=there, other=0) >> (token % 32)
                ruled_out |= (allowed & 1) == 0
            score = tl.where(ruled_out, float("-inf"), score)
            score = tl.where((raw != raw) | (raw == float("inf")), raw, score)  # even if the token is ruled out
            tl.debug_barrier()  # other threads must have read what is overwritten now
            tl.store(ids_ptr + entry, first_id + local, mask=there)
            tl.store(raw_ptr + entry, raw, mask=there)
            tl.store(scores_ptr + entry, score, mask=there)
            tl.store(logits_ptr + local, float("-inf"), mask=there)
    tl.store(counts_ptr + n, total)


@triton.jit(do_not_specialize=["first_id"])
def _restore_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, ids_ptr, raw_ptr, counts_ptr, first_id,
    ROW: tl.constexpr, LIST: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + n)
    for start in range(0, count, TILE):
        entry = start + tl.arange(0, TILE)
        local = tl.load(ids_ptr + n * LIST + entry, mask=entry < count, other=0) - first_id
        raw = tl.load(raw_ptr + n * LIST + entry, mask=entry < count, other=0.0)
        tl.store(logits_ptr + n * ROW + local, raw, mask=entry < count)


def edit_logits(
    logits: Tensor, rows: Tensor, positions: Tensor, state: EditState, first_id: int = 0, num_ids: int | None = None
) -> Edits:
    """Edit the scores that decide the tokens for `positions` of `rows`. Nothing waits for the device.

    Args:
        logits: [N, V] of any float dtype, contiguous. Written: -inf for each token in the result.
        rows: [N] integers: the row of persistent state that each row of logits belongs to.
        positions: [N] integers: where in its row the new token goes; the tokens before this position count.
        state: what the rows ask for.
        first_id: the token of the first logit. num_ids: how many of the V are logits; None: all. The rest is padding.

    Returns:
        The edited tokens of these logits. Those of them that the row's mask forbids have the score -inf, too; no token
        is in the list for the mask alone. A raw logit that is NaN or infinity is its own score, even if the token is
        ruled out, so that a bad row still shows.
    """
    num_rows, width = logits.shape
    num_ids = width if num_ids is None else num_ids
    # E: as many tokens as a row can name. `sampling_bytes` in `runner/memory.py` counts the memory taken here.
    named = state.token_ids, state.stop_ids, state.biased_ids, state.bad_ends
    longest, num_words = min(num_ids, sum(ids.shape[1] for ids in named)), triton.cdiv(num_ids, 32)
    words = torch.empty(2, num_rows, num_words, dtype=torch.int32, device=logits.device)
    lists = torch.empty(3, num_rows, longest, dtype=torch.int32, device=logits.device)
    counts = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    ids, notes, scores = lists[0], lists[1], lists[2].view(torch.float32)
    edits = Edits(ids, notes.view(torch.float32), scores, counts)  # the raw logits replace the notes in the end
    pdl = overlaps_launches(logits.device)
    _edit_kernel[(num_rows,)](
        logits, rows, positions, first_id, state.token_ids, state.num_prompt_tokens, state.edited,
        state.repetition_penalty, state.presence_penalty, state.frequency_penalty, state.min_tokens, state.num_stop_ids,
        state.stop_ids, state.num_biased, state.biased_ids, state.bias, state.num_bad_words, state.bad_ends,
        state.bad_tokens, state.masked, state.mask, words[0], words[1], ids, notes, edits.raw, scores, counts,
        ROW=width, IDS=num_ids, LIST=longest, WORDS=num_words, KNOWN=state.token_ids.shape[1],
        STOP_IDS=state.stop_ids.shape[1], BIASED=state.biased_ids.shape[1], BAD_WORDS=state.bad_ends.shape[1],
        BAD_TOKENS=state.bad_tokens.shape[1], MASK=state.mask.shape[1], TILE=TILE, PDL=pdl,
        num_warps=8, launch_pdl=pdl,
        enable_fp_fusion=False,  # a multiplication and a subtraction are rounded twice, as PyTorch does
    )  # fmt: skip
    return edits


def restore_logits(logits: Tensor, edits: Edits, first_id: int = 0) -> None:
    """Put the raw logits back, for log-probabilities. logits [N, V] and first_id: as for `edit_logits`."""
    pdl = overlaps_launches(logits.device)
    _restore_kernel[(len(logits),)](
        logits, edits.ids, edits.raw, edits.counts, first_id,
        ROW=logits.shape[1], LIST=edits.ids.shape[1], TILE=TILE, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
