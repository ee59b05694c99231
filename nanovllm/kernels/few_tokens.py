"""Which kernel computes a linear layer for few tokens: one of ours, or the library's.

The borders are where one began to beat the other on an H200, on the layers of models of 0.6 and 8 billion parameters,
the latter also cut in two and in four. `benchmarks/linears.py` measures them, docs/kernels.md has the table.
"""

from collections.abc import Callable
from functools import cache
from functools import partial as bind
from typing import NamedTuple

import torch
import triton

from nanovllm.kernels.launch import shared_memory
from nanovllm.kernels.skinny_linear import skinny_linear
from nanovllm.kernels.tiled_linear import MAX_SPLITS, PROGRAMS, Tile, num_splits, tiled_linear

FEW = 16  # the most tokens for `skinny_linear`; for `tiled_linear` too, if the layer is neither small nor partial
SMALL = 2**24  # the most bytes of weights of a layer that is called small
MOST = 64  # the most tokens for `tiled_linear` if it is; twice as many if it is narrow and partial
NARROW = 2048  # the most columns of a layer that is called narrow; for `early_linear` the model's hidden size counts
TILED_NEEDS = 200 * 1024  # bytes of shared memory that `tiled_linear`'s tiles were chosen for; not every GPU has them

EARLY_ROWS = 64  # rows of the weights of a program of `early_linear`: as many output columns, half of them if gated
EARLY_SHARED = 224 * 1024  # bytes of shared memory for all its programs on a multiprocessor
EARLY_STAGES = 3, 6  # steps under way, least and most: fewer keep the memory too little busy, more have not been of use


class Early(NamedTuple):
    """A range in which `early_linear` is the fastest."""

    kind: str  # of the call: plain, gated or partial
    narrow: bool  # whether the hidden size is at most NARROW
    most_bytes: int  # of weights
    first: int  # number of tokens, from
    last: int  # to, inclusive
    tile: int  # the most tokens of a program


EARLY = [  # the first that fits
    Early("plain", True, SMALL, 1, 128, 64),
    Early("plain", True, SMALL, 129, 256, 128),
    Early("gated", True, SMALL, 1, 64, 64),
    Early("gated", True, SMALL, 65, 256, 128),
    Early("partial", True, SMALL, 2, 256, 64),
    Early("plain", False, SMALL, 1, 256, 64),
    Early("plain", False, 2 * SMALL, 1, 128, 64),
    Early("plain", False, 2**40, 1, 32, 32),
    Early("gated", False, 4 * SMALL, 1, 64, 64),
    Early("gated", False, 2**40, 17, 32, 32),
    Early("partial", False, 2**40, 1, 64, 64),
]
EARLY_LAST = max(row.last for row in EARLY)


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
    if num_tokens > EARLY_LAST:
        return None
    outputs, inputs = weight.shape
    columns = outputs // 2 if gated else outputs
    if weight.dtype == torch.float32 or inputs % 128 or columns % 32:
        return None
    if columns % 64 == 0 and (most := early_tokens(num_tokens, weight, gated, partial)):
        early_linear = early_kernel(weight.device)
        if early_linear is not None:
            tile = early_tile(num_tokens, columns, inputs, most, gated, partial)
            return bind(early_linear, tile=tile, gated=gated, partial=partial)
    return on_any_gpu(num_tokens, weight, gated=gated, partial=partial)


@cache
def early_kernel(device: torch.device) -> Callable[..., torch.Tensor] | None:
    """`early_linear` if it can run: on Hopper alone, and only while Triton has Gluon where we look for it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        from nanovllm.kernels.early_linear import early_linear
    except ImportError:
        return None
    return early_linear


def early_tokens(num_tokens: int, weight: torch.Tensor, gated: bool, partial: bool) -> int:
    """The most tokens of a program of `early_linear`; 0 where another kernel is better."""
    kind = "gated" if gated else "partial" if partial else "plain"
    narrow = weight.shape[0 if partial else 1] <= NARROW
    for row in EARLY:
        if row[:2] == (kind, narrow) and weight.nbytes <= row.most_bytes and row.first <= num_tokens <= row.last:
            return row.tile
    return 0


@cache
def early_tile(num_tokens: int, columns: int, inputs: int, most: int, gated: bool, partial: bool) -> EarlyTile:
    """The layout of `early_linear`, with as many steps under way as still let all its programs run at once: a second
    wave of programs would wait for the first. columns: of the result. most: tokens of a program."""
    tokens = min(most, max(16, triton.next_power_of_2(num_tokens)))
    tiles = columns // (EARLY_ROWS // 2 if gated else EARLY_ROWS) * triton.cdiv(num_tokens, tokens)
    # The norm reads every part of every token, so with many tokens there are at most two parts.
    splits = min(num_splits(inputs, tiles, 128), MAX_SPLITS if num_tokens <= MOST else 2) if partial else 1
    fewest, most_stages = EARLY_STAGES
    shared = EARLY_SHARED // min(3, triton.cdiv(tiles * splits, PROGRAMS))
    row = 2 * (EARLY_ROWS + tokens)  # bytes of a step that has one input
    inner = 128 if shared >= fewest * 128 * row else 64
    return EarlyTile(tokens, inner, max(fewest, min(most_stages, shared // (inner * row))), splits)


def on_any_gpu(
    num_tokens: int, weight: torch.Tensor, *, gated: bool = False, partial: bool = False
) -> Callable[..., torch.Tensor] | None:
    """`few_tokens` without `early_linear`, for a shape and dtype that our kernels can take."""
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    small = weight.nbytes < SMALL
    if num_tokens <= FEW and weight.nbytes < (SMALL if partial or gated else 2 * SMALL):
        return bind(skinny_linear, gated=gated, partial=partial)
    most = MOST if small or partial else FEW
    if num_tokens > (2 * MOST if partial and columns <= NARROW else most):
        return None
    if columns % 64 or shared_memory(weight.device) < TILED_NEEDS:
        return None
    return bind(tiled_linear, tile=choose_tile(num_tokens, small, gated, partial), gated=gated, partial=partial)


def choose_tile(num_tokens: int, small: bool, gated: bool, partial: bool) -> Tile:
    """The layout of `tiled_linear` that was the fastest of a dozen on an H200."""
    if gated:
        return Tile(64, 128, 4, swapped=True) if 16 < num_tokens <= 32 else Tile(32, 128, 4, swapped=False)
    if num_tokens <= 32:
        return Tile(64, 256, 3, swapped=True)
    if num_tokens <= MOST and small:
        return Tile(32, 256, 3, swapped=False)
    return Tile(32 if small else 64, 128, 4, swapped=False)
