"""Which kernel computes a linear layer for few tokens: one of ours, or the library's.

The borders are where one began to beat the other by more than a few percent on an H200, on the layers of models of 0.6
and 8 billion parameters, the latter also cut in two and in four. `benchmarks/kernels/linears.py` measures them,
docs/kernels.md has the table.
"""

from collections.abc import Callable
from functools import cache
from functools import partial as bind
from typing import NamedTuple

import torch
import triton

from nanovllm.kernels.launch import gluon_kernel, shared_memory
from nanovllm.kernels.linear.skinny_linear import skinny_linear
from nanovllm.kernels.linear.tiled_linear import MAX_SPLITS, PROGRAMS, Tile, num_splits, tiled_linear

MAX_SKINNY_TOKENS = 16  # for `skinny_linear`; for `tiled_linear` too, if the layer is neither small nor partial
SMALL_BYTES = 2**24  # the most bytes of weights of a layer that is called small
MAX_TILED_TOKENS = 64  # for `tiled_linear` if it is; twice as many if it is narrow and partial
NARROW_COLUMNS = 2048  # the most of a layer that is called narrow; for `early_linear` the model's hidden size counts
TILED_SHARED = 200 * 1024  # bytes of shared memory that `tiled_linear`'s tiles were chosen for; not every GPU has them

EARLY_ROWS = 64  # rows of the weights of a program of `early_linear`: as many output columns, half of them if gated
EARLY_SHARED = 224 * 1024  # bytes of shared memory for all its programs on a multiprocessor
EARLY_STAGES = 3, 6  # steps under way, least and most: fewer keep the memory too little busy, more have not been of use


class EarlyRange(NamedTuple):
    """A range in which `early_linear` is the fastest."""

    kind: str  # of the call: plain, gated or partial
    narrow: bool  # whether the hidden size is at most NARROW_COLUMNS
    max_bytes: int  # of weights
    min_tokens: int
    max_tokens: int  # inclusive
    tile_tokens: int  # the most tokens of a program


EARLY_RANGES = [  # the first that fits
    EarlyRange("plain", True, SMALL_BYTES, 1, 128, 64),
    EarlyRange("plain", True, SMALL_BYTES, 129, 256, 128),
    EarlyRange("gated", True, SMALL_BYTES, 1, 64, 64),
    EarlyRange("gated", True, SMALL_BYTES, 65, 256, 128),
    EarlyRange("partial", True, SMALL_BYTES, 2, 256, 64),
    EarlyRange("plain", False, SMALL_BYTES, 1, 256, 64),
    EarlyRange("plain", False, 2 * SMALL_BYTES, 1, 128, 64),
    EarlyRange("plain", False, 2**40, 1, 32, 32),
    EarlyRange("gated", False, 4 * SMALL_BYTES, 1, 64, 64),
    EarlyRange("gated", False, 2**40, 17, 32, 32),
    EarlyRange("partial", False, 2**40, 1, 64, 64),
]
MAX_EARLY_TOKENS = max(row.max_tokens for row in EARLY_RANGES)


class EarlyTile(NamedTuple):
    """Tokens of a program, inputs of a step of its loop, steps under way, parts that the inputs are cut into."""

    tokens: int
    inner: int
    stages: int
    splits: int


def few_tokens(
    num_tokens: int, weight: torch.Tensor, *, gated: bool = False, partial: bool = False
) -> Callable[..., torch.Tensor] | None:
    """The kernel for `weight` [out, in] and x [num_tokens, in], called as f(x, weight, bias=None); gated and partial as
    of `skinny_linear`. None: the library is faster, or our kernels cannot take the shape or dtype.
    """
    if num_tokens > MAX_EARLY_TOKENS:
        return None
    outputs, inputs = weight.shape
    columns = outputs // 2 if gated else outputs
    if weight.dtype == torch.float32 or inputs % 128 or columns % 32:
        return None
    if columns % 64 == 0 and (tile_tokens := early_tile_tokens(num_tokens, weight, gated, partial)):
        early_linear = gluon_kernel("early_linear", weight.device)
        if early_linear is not None:
            tile = early_tile(num_tokens, columns, inputs, tile_tokens, gated, partial)
            return bind(early_linear, tile=tile, gated=gated, partial=partial)
    return on_any_gpu(num_tokens, weight, gated=gated, partial=partial)


def early_tile_tokens(num_tokens: int, weight: torch.Tensor, gated: bool, partial: bool) -> int:
    """The most tokens of a program of `early_linear`; 0 where another kernel is better."""
    kind = "gated" if gated else "partial" if partial else "plain"
    narrow = weight.shape[0 if partial else 1] <= NARROW_COLUMNS
    for row in EARLY_RANGES:
        fits = weight.nbytes <= row.max_bytes and row.min_tokens <= num_tokens <= row.max_tokens
        if row[:2] == (kind, narrow) and fits:
            return row.tile_tokens
    return 0


@cache
def early_tile(
    num_tokens: int, columns: int, inputs: int, max_tile_tokens: int, gated: bool, partial: bool
) -> EarlyTile:
    """The layout of `early_linear`, with as many steps under way as still let all its programs run at once: a second
    wave of programs would wait for the first. columns: of the result. max_tile_tokens: of a program."""
    tokens = min(max_tile_tokens, max(16, triton.next_power_of_2(num_tokens)))
    tiles = columns // (EARLY_ROWS // 2 if gated else EARLY_ROWS) * triton.cdiv(num_tokens, tokens)
    # The norm reads every part of every token, so with many tokens there are at most two parts.
    splits = min(num_splits(inputs, tiles, 128), MAX_SPLITS if num_tokens <= MAX_TILED_TOKENS else 2) if partial else 1
    min_stages, max_stages = EARLY_STAGES
    shared = EARLY_SHARED // min(3, triton.cdiv(tiles * splits, PROGRAMS))
    input_bytes = 2 * (EARLY_ROWS + tokens)  # of a step, for each of its inputs
    inner = 128 if shared >= min_stages * 128 * input_bytes else 64
    return EarlyTile(tokens, inner, max(min_stages, min(max_stages, shared // (inner * input_bytes))), splits)


def on_any_gpu(
    num_tokens: int, weight: torch.Tensor, *, gated: bool = False, partial: bool = False
) -> Callable[..., torch.Tensor] | None:
    """`few_tokens` without `early_linear`, for a shape and dtype that our kernels can take."""
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    small = weight.nbytes < SMALL_BYTES
    if num_tokens <= MAX_SKINNY_TOKENS and weight.nbytes < (SMALL_BYTES if partial or gated else 2 * SMALL_BYTES):
        return bind(skinny_linear, gated=gated, partial=partial)
    max_tokens = MAX_TILED_TOKENS if small or partial else MAX_SKINNY_TOKENS
    if num_tokens > (2 * MAX_TILED_TOKENS if partial and columns <= NARROW_COLUMNS else max_tokens):
        return None
    if columns % 64 or shared_memory(weight.device) < TILED_SHARED:
        return None
    return bind(tiled_linear, tile=choose_tile(num_tokens, small, gated, partial), gated=gated, partial=partial)


def choose_tile(num_tokens: int, small: bool, gated: bool, partial: bool) -> Tile:
    """The layout of `tiled_linear` that was the fastest of a dozen on an H200."""
    if gated:
        return Tile(64, 128, 4, swapped=True) if 16 < num_tokens <= 32 else Tile(32, 128, 4, swapped=False)
    if num_tokens <= 32:
        return Tile(64, 256, 3, swapped=True)
    if num_tokens <= MAX_TILED_TOKENS and small:
        return Tile(32, 256, 3, swapped=False)
    return Tile(32 if small else 64, 128, 4, swapped=False)
