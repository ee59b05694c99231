"""Plain sampling in one pass over the logits: argmax(logit + temperature * noise), the noise made where it is used.

In separate operations the noise alone is read and written a dozen times, 156 MB each at 256 rows of 151,936; here the
logits are read once, in the dtype they have, and nothing else travels. A row of temperature 0 computes no noise.
The noise is that of `runner/gumbel.py`, bit for bit in its integers; logarithms differ by some 1e-6.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import overlaps_launches

TILE = 2048  # logits of a program


@triton.jit
def _mix64(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _log(x, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """A GPU has an instruction for the binary logarithm, exact to 2**-22; a library's logf takes ten times as long.
    All arguments are normal numbers: with ".ftz" the others need no care."""
    if FAST:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return log2 * 0.6931471805599453
    else:
        return tl.log(x)


@triton.jit
def _uniform(low, high, token_ids):  # type: ignore[no-untyped-def]
    """`mix32(mix32(token_ids ^ low) + high)` made a number in (0, 1]; low, high: the halves of a row's key, uint32.

    In the fewest instructions: a row's own part of the first step is worked out once, up to three bitwise operations
    are a single one of the GPU's, and of an even number "plus a half, times 2**-31" is one multiply-add, because powers
    of two round nothing.
    """
    x = (token_ids ^ (token_ids >> 16) ^ (low ^ (low >> 16))) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = (x ^ (x >> 16)) + high
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    even = (x ^ (x >> 16)) & 0xFFFFFFFE
    return tl.fma(even.to(tl.float32), 2.3283064365386963e-10, 2.3283064365386963e-10)  # 2**-32


@triton.jit
def _gumbel(seed, index, token_ids, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """seed, index: uint64 scalars; token_ids: uint32 vector -> float32 vector."""
    key = _mix64(_mix64(seed) + (index + 1) * 0x9E3779B97F4A7C15)
    uniform = _uniform((key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32), token_ids)
    uniform = tl.minimum(uniform, 0.99999994)
    # -log(1 - u): where u is small, and winners have a small u, 1 - u would round it away
    series = 1 + uniform * (0.5 + uniform * (0.33333333 + uniform * (0.25 + uniform * (0.2 + uniform * 0.16666667))))
    exponential = tl.where(uniform < 0.0625, uniform * series, -_log(1 - uniform, FAST))
    return -_log(exponential, FAST)


@triton.jit(
    do_not_specialize=["first_id", "num_tiles"],
    do_not_specialize_on_alignment=["rows_ptr", "positions_ptr", "id_ptr"],
)
def _best_of_tile_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, rows_ptr, positions_ptr, temperature_ptr, seed_ptr, num_prompt_ptr, score_ptr, id_ptr, first_id,
    num_tiles, ROW: tl.constexpr, IDS: tl.constexpr, TILE: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0)
    row = tl.load(rows_ptr + n)
    temperature = tl.load(temperature_ptr + row)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    score = tl.load(logits_ptr + n.to(tl.int64) * ROW + place, mask=place < IDS, other=float("-inf")).to(tl.float32)
    token_ids = first_id + place
    if temperature > 0:
        seed = tl.load(seed_ptr + row).to(tl.uint64)
        index = (tl.load(positions_ptr + n) - tl.load(num_prompt_ptr + row)).to(tl.uint64)
        score += temperature * _gumbel(seed, index, token_ids.to(tl.uint32), FAST)
    score = tl.where(score != score, float("inf"), score)  # so that the maximum shows a NaN
    best = tl.max(score, 0)
    winner = tl.min(tl.where(score == best, token_ids, 2147483647), 0)  # among equals the lowest id
    tl.store(score_ptr + n * num_tiles + tl.program_id(1), best)
    tl.store(id_ptr + n * num_tiles + tl.program_id(1), winner)


@triton.jit(
    do_not_specialize=["num_tiles", "row_stride"],
    do_not_specialize_on_alignment=["rows_ptr", "positions_ptr", "id_ptr"],
)
def _best_of_row_kernel(  # type: ignore[no-untyped-def]
    score_ptr, id_ptr, rows_ptr, positions_ptr, token_ids_ptr, tokens_ptr, num_tiles, row_stride,
    RANKS: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0)
    tile = tl.arange(0, TILES)  # of all ranks
    rank = tile // num_tiles
    place = (2 * rank * tl.num_programs(0) + n) * num_tiles + tile % num_tiles  # in [R, 2, N, tiles]
    score = tl.load(score_ptr + place, mask=rank < RANKS, other=float("-inf"))
    ids = tl.load(id_ptr + place, mask=rank < RANKS, other=2147483647)
    best = tl.max(score, 0)
    winner = tl.min(tl.where(score == best, ids, 2147483647), 0)
    finite = (best < float("inf")) & (best > float("-inf"))
    tl.store(tokens_ptr + n, tl.where(finite, winner, -1).to(tl.int64))
    row = tl.load(rows_ptr + n).to(tl.int64)
    tl.store(token_ids_ptr + row * row_stride + tl.load(positions_ptr + n), tl.where(finite, winner, 0))


def sample_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    next_positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    num_prompt_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    first_id: int = 0,
    num_ids: int | None = None,
    all_gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Draw a token for each row of logits, and write it where the next step looks for it.

    Of several ranks each has the logits of some tokens, and they exchange the best of each tile: some hundred bytes.

    Args:
        logits: [N, V] of any float dtype, contiguous.
        rows: [N] integers: the row of persistent state that each belongs to.
        next_positions: [N] integers: where in its row the new token goes.
        temperature: [R] float32. seeds: [R] int64. num_prompt_tokens: [R] int32.
        token_ids: [R, L] int32, written: the new token, or 0 where it is -1.
        first_id: the token of the first logit. num_ids: how many of the V are logits; None: all. The rest is padding.
        all_gather: makes of each rank's tensor [...] that of all ranks [ranks, ...]; None: there is one rank.

    Returns:
        [N] int64: the tokens; -1 for a row whose largest score is not finite.
    """
    num_rows, width = logits.shape
    num_tiles = triton.cdiv(width, TILE)
    best = rows.new_empty(2, num_rows, num_tiles, dtype=torch.int32)  # the bits of the scores [N, tiles], and the ids
    tokens = rows.new_empty(num_rows, dtype=torch.int64)  # [N]
    pdl = overlaps_launches(logits.device)
    _best_of_tile_kernel[(num_rows, num_tiles)](
        logits, rows, next_positions, temperature, seeds, num_prompt_tokens, best[0].view(torch.float32), best[1],
        first_id, num_tiles, ROW=width, IDS=width if num_ids is None else num_ids, TILE=TILE, FAST=logits.is_cuda,
        PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    of_all = best[None] if all_gather is None else all_gather(best)  # [R, 2, N, tiles]
    _best_of_row_kernel[(num_rows,)](
        of_all.view(torch.float32), of_all[:, 1:], rows, next_positions, token_ids, tokens, num_tiles,
        token_ids.stride(0), RANKS=len(of_all), TILES=triton.next_power_of_2(len(of_all) * num_tiles), PDL=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return tokens
