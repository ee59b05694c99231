"""How `weight_prefetch_linear` divides a layer: what a program computes, and how much it orders ahead of time."""

from functools import cache
from typing import NamedTuple

import triton

from nanovllm.kernels.linear.tiled_linear import MAX_SPLITS, PROGRAMS, num_splits

WEIGHT_ROWS = 64  # rows of the weights of a program: as many output columns, half of them if gated
SHARED_BYTES = 224 * 1024  # of shared memory, for all programs on a multiprocessor
MIN_TOKENS = 8  # columns of the matrix instruction, at least
MIN_STAGES, MAX_STAGES = 3, 6  # steps under way: fewer leave the memory idle, more were no faster
MAX_CUTS = 8  # then the matrix instruction has eight columns for each token, the fewest that there are
MAX_NORM_NUMBERS = 4096  # tokens times inputs, all in registers: with more a kernel for the norm is faster
MAX_NORM_STAGES = 8  # all weights of a program
HANDFUL, NARROW = 4, 2048  # tokens, and the hidden size of a small model
FEW_TOKENS = 64  # with more the inputs are cut in two at most: the norm reads every part of every token


class PrefetchTile(NamedTuple):
    """Tokens of a program, inputs of a step of its loop, steps under way, and two ways of cutting the inputs.

    splits: parts of the inputs, each for a program of its own. cuts: parts of the inputs within a program.
    """

    tokens: int
    inner: int
    stages: int
    splits: int
    cuts: int = 1


@cache
def choose_tile(
    num_tokens: int, columns: int, inputs: int, max_tile_tokens: int, gated: bool, partial: bool,
    *, handful: bool = False, norm: bool = False, num_stages: int | None = None,
) -> PrefetchTile:  # fmt: skip
    """The layout with as many steps under way as still let all programs run at once.

    A second wave of programs would wait for the first. columns: of the result. max_tile_tokens: of a program. handful:
    inputs may be cut within programs. norm: the norm is inside; then all inputs are in shared memory. num_stages: steps
    under way at most.
    """
    cuts = num_cuts(columns, inputs) if handful and not gated else 1
    least = MIN_TOKENS // cuts if norm or cuts > 1 else 16
    tokens = min(max_tile_tokens, max(least, triton.next_power_of_2(num_tokens)))
    tiles = columns * cuts // (WEIGHT_ROWS // 2 if gated else WEIGHT_ROWS) * triton.cdiv(num_tokens, tokens)
    splits = 1
    if partial and cuts == 1:
        splits = min(num_splits(inputs, tiles, 128), MAX_SPLITS if num_tokens <= FEW_TOKENS else 2)
    shared = SHARED_BYTES // min(3, triton.cdiv(tiles * splits, PROGRAMS))
    input_bytes = 2 * (WEIGHT_ROWS + tokens * cuts)  # of a step, for each of its inputs
    most = num_stages or MAX_STAGES
    if norm:
        shared, input_bytes, most = shared - 2 * tokens * inputs, 2 * WEIGHT_ROWS, MAX_NORM_STAGES
    inner = 128 if shared >= MIN_STAGES * 128 * input_bytes else 64
    stages = max(MIN_STAGES, min(most, shared // (inner * input_bytes)))
    return PrefetchTile(tokens, inner, stages, splits, cuts)


def num_cuts(columns: int, inputs: int) -> int:
    """Into how many parts to cut the inputs within programs: until there is about one program for each multiprocessor.
    A power of two; each part is a multiple of 128."""
    cuts = 1
    while cuts < MAX_CUTS and 2 * cuts * columns <= WEIGHT_ROWS * PROGRAMS and inputs % (256 * cuts) == 0:
        cuts *= 2
    return cuts


def norm_in_fp8(columns: int, inputs: int, gated: bool) -> bool:
    """Whether weights in FP8 are faster with the norm inside: if rows are long, and shared memory has room for them.
    Asked only where the kernel `can_have_norm`."""
    programs = columns // (WEIGHT_ROWS // 2 if gated else WEIGHT_ROWS)
    shared = SHARED_BYTES // min(3, triton.cdiv(programs, PROGRAMS)) - 2 * MIN_TOKENS * inputs
    return inputs >= NARROW and shared >= MIN_STAGES * 256 * WEIGHT_ROWS


def can_have_norm(num_tokens: int, inputs: int) -> bool:
    """Whether the kernel can compute the norm of `num_tokens` tokens with `inputs` numbers each."""
    return num_tokens * inputs <= MAX_NORM_NUMBERS and inputs & (inputs - 1) == 0


@cache
def choose_fp8_tile(
    num_tokens: int, columns: int, inputs: int, gated: bool, partial: bool, *, norm: bool = False
) -> PrefetchTile:
    """`choose_tile` for weights in FP8: the longest steps of which three have room, of 512 inputs at most.

    Widening takes nearly as long as reading. So barriers have to be rare, and there is one for each step. If the parts
    of the inputs are long, they are cut once more, so that a multiprocessor has two programs.
    norm: as in `choose_tile`.
    """
    handful = num_tokens <= HANDFUL and (columns if partial else inputs) <= NARROW
    cuts = num_cuts(columns, inputs) if handful and not gated else 1
    tokens = min(64, max(MIN_TOKENS // cuts, triton.next_power_of_2(num_tokens)))
    tiles = columns * cuts // (WEIGHT_ROWS // 2 if gated else WEIGHT_ROWS) * triton.cdiv(num_tokens, tokens)
    splits = num_splits(inputs, tiles, 128) if partial and cuts == 1 else 1
    if partial and cuts == 1 and splits < MAX_SPLITS and inputs // splits >= 4096 and num_tokens <= FEW_TOKENS:
        splits *= 2
    shared = SHARED_BYTES // min(3, triton.cdiv(tiles * splits, PROGRAMS))
    depth, inner, input_bytes = inputs // (splits * cuts), 512, WEIGHT_ROWS + 2 * tokens * cuts
    if norm:
        shared, input_bytes = shared - 2 * tokens * inputs, WEIGHT_ROWS
    while inner > 128 and (depth % inner or depth < 4 * inner or MIN_STAGES * inner * input_bytes > shared):
        inner //= 2
    return PrefetchTile(
        tokens, inner, max(MIN_STAGES, min(max(4, 1024 // inner), shared // (inner * input_bytes))), splits, cuts
    )
