"""Which kernel computes a linear layer for few tokens: one of ours, or the library's.

The borders are where one began to beat the other on an H200, on the layers of models of 0.6 and 8 billion parameters,
the latter also cut in two (`benchmarks/linears.py` measures them).
"""

from collections.abc import Callable
from functools import partial as bind

import torch

from nanovllm.kernels.launch import shared_memory
from nanovllm.kernels.skinny_linear import skinny_linear
from nanovllm.kernels.tiled_linear import Tile, tiled_linear

FEW = 16  # tokens that a small layer computes best with all its weights under way at once
SMALL = 2**24  # bytes of weights, of a layer that is small
MOST = 64  # tokens; of a narrow layer that gives parts to be summed twice as many
NARROW = 2048  # columns
TILED_NEEDS = 200 * 1024  # bytes of shared memory, which not every GPU has: its tiles were chosen for one that does


def few_tokens(
    num_tokens: int, weight: torch.Tensor, *, gated: bool = False, partial: bool = False
) -> Callable[..., torch.Tensor] | None:
    """What computes `weight` [out, in] for x [num_tokens, in]: f(x, weight, bias=None); gated and partial as of
    `skinny_linear`. None: the library does it better, or its shape or dtype is none for our kernels.
    """
    if num_tokens > 2 * MOST:
        return None
    outputs, inputs = weight.shape
    columns = outputs // 2 if gated else outputs
    if weight.dtype == torch.float32 or inputs % 128 or columns % 32:
        return None
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
    """The fastest of a dozen."""
    if gated:
        return Tile(64, 128, 4, swapped=True) if 16 < num_tokens <= 32 else Tile(32, 128, 4, swapped=False)
    if num_tokens <= 32:
        return Tile(64, 256, 3, swapped=True)
    if num_tokens <= MOST and small:
        return Tile(32, 256, 3, swapped=False)
    return Tile(32 if small else 64, 128, 4, swapped=False)
