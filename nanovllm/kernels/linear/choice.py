"""Which kernel computes a linear layer for few tokens: one of ours, or the library's.

The borders lie where one kernel began to beat the next by more than a few percent on an H200. They were measured on the
layers of models of 0.6 and 8 billion parameters, the latter also cut in two and in four, by
`benchmarks/kernels/linears.py`; docs/kernels.md has the table.

A layer is of one of three kinds. *plain*: x W^T + b. *gated*: the weight holds a gate above an up projection, and the
result is silu(gate) * up. *partial*: the result may come in parts, which the norm that follows sums. A layer is narrow
if the model's hidden size is at most `NARROW`. Within a kind the first row that fits is taken.
"""

from collections.abc import Callable
from functools import cache
from functools import partial as bind
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.launch import capability, is_hopper, shared_memory
from nanovllm.kernels.linear.skinny_linear import skinny_linear
from nanovllm.kernels.linear.tiled_linear import Tile, tiled_linear

LinearKernel = Callable[..., Tensor]  # f(x [T, in], weight [out, in], bias=None)

NARROW = 2048  # hidden size
SMALL = 2**24  # bytes of weights
ANY = 2**60  # bytes of weights
TILED_SHARED = 200 * 1024  # bytes of shared memory that the tiles below were chosen for; not every GPU has them


class OnHopper(NamedTuple):
    """A range in which `weight_prefetch_linear` is the fastest."""

    tokens: range
    max_bytes: int  # of weights, inclusive
    tile_tokens: int  # the most tokens of a program


ON_HOPPER = {  # by kind, and by whether the layer is narrow
    ("plain", True): [OnHopper(range(1, 129), SMALL, 64), OnHopper(range(129, 257), SMALL, 128)],
    ("plain", False): [
        OnHopper(range(1, 257), SMALL, 64),
        OnHopper(range(1, 129), 2 * SMALL, 64),
        OnHopper(range(1, 33), ANY, 32),
    ],
    ("gated", True): [OnHopper(range(1, 65), SMALL, 64), OnHopper(range(65, 257), SMALL, 128)],
    ("gated", False): [OnHopper(range(1, 65), 4 * SMALL, 64), OnHopper(range(17, 33), ANY, 32)],
    ("partial", True): [OnHopper(range(2, 257), SMALL, 64)],
    ("partial", False): [OnHopper(range(1, 65), ANY, 64)],
}
MAX_TOKENS = 256  # of any row; `ON_ANY_GPU` ends earlier


class OnAnyGpu(NamedTuple):
    """Up to so many tokens, and below so many bytes of weights: which kernel."""

    max_tokens: int
    below_bytes: int
    kernel: LinearKernel


def tiled(columns: int, inner: int, num_stages: int, *, swapped: bool) -> LinearKernel:
    return bind(tiled_linear, tile=Tile(columns, inner, num_stages, swapped))


PARTIAL = [
    OnAnyGpu(16, SMALL, skinny_linear),
    OnAnyGpu(32, ANY, tiled(64, 256, 3, swapped=True)),
    OnAnyGpu(64, SMALL, tiled(32, 256, 3, swapped=False)),
    OnAnyGpu(64, ANY, tiled(64, 128, 4, swapped=False)),
]
PLAIN = [
    OnAnyGpu(16, 2 * SMALL, skinny_linear),
    OnAnyGpu(16, ANY, tiled(64, 256, 3, swapped=True)),
    OnAnyGpu(32, SMALL, tiled(64, 256, 3, swapped=True)),
    OnAnyGpu(64, SMALL, tiled(32, 256, 3, swapped=False)),
]
GATED = [
    OnAnyGpu(16, SMALL, skinny_linear),
    OnAnyGpu(16, ANY, tiled(32, 128, 4, swapped=False)),
    OnAnyGpu(32, SMALL, tiled(64, 128, 4, swapped=True)),
    OnAnyGpu(64, SMALL, tiled(32, 128, 4, swapped=False)),
]
ON_ANY_GPU = {  # by kind, and by whether the layer is narrow
    ("plain", True): PLAIN,
    ("plain", False): PLAIN,
    ("gated", True): GATED,
    ("gated", False): GATED,
    ("partial", False): PARTIAL,
    ("partial", True): [
        *PARTIAL,
        OnAnyGpu(128, SMALL, tiled(32, 128, 4, swapped=False)),
        OnAnyGpu(128, ANY, tiled(64, 128, 4, swapped=False)),
    ],
}


@cache
def hopper_linear(device: torch.device) -> ModuleType | None:
    """`kernels/hopper/weight_prefetch_linear.py`; None where it cannot run: on other GPUs, if Triton has no Gluon where
    we look for it, or without the folder."""
    if not is_hopper(device):
        return None
    try:
        from nanovllm.kernels.hopper import weight_prefetch_linear
    except (ImportError, AttributeError):
        return None
    return weight_prefetch_linear


def choose_linear(
    num_tokens: int, weight: Tensor, *, gated: bool = False, partial: bool = False
) -> LinearKernel | None:
    """The kernel for `weight` [out, in] and x [num_tokens, in], called as f(x, weight, bias=None).

    gated, partial: the kind of the layer, as in `tiled_linear`. None: the library is faster, or our kernels cannot take
    the shape or the dtype.
    """
    if num_tokens > MAX_TOKENS:
        return None
    outputs, inputs = weight.shape
    columns = outputs // 2 if gated else outputs
    if weight.dtype == torch.float32 or inputs % 128 or columns % 32:
        return None
    if (capability(weight.device) or (9, 0)) < (8, 0):
        return None  # `skinny_linear` would spill all its weights
    if columns % 64 == 0:
        for row in ON_HOPPER[kind_of(weight, gated, partial)]:
            if num_tokens in row.tokens and weight.nbytes <= row.max_bytes:
                hopper = hopper_linear(weight.device)
                if hopper is None:
                    break
                tile = hopper.choose_tile(num_tokens, columns, inputs, row.tile_tokens, gated, partial)
                return bind(hopper.weight_prefetch_linear, tile=tile, gated=gated, partial=partial)
    return choose_on_any_gpu(num_tokens, weight, gated=gated, partial=partial)


def choose_on_any_gpu(
    num_tokens: int, weight: Tensor, *, gated: bool = False, partial: bool = False
) -> LinearKernel | None:
    """`choose_linear` without the kernel for Hopper, for a shape and dtype that our kernels can take."""
    for row in ON_ANY_GPU[kind_of(weight, gated, partial)]:
        if num_tokens <= row.max_tokens and weight.nbytes < row.below_bytes:
            columns = weight.shape[0] // 2 if gated else weight.shape[0]
            if row.kernel is not skinny_linear and (columns % 64 or shared_memory(weight.device) < TILED_SHARED):
                return None
            return bind(row.kernel, gated=gated, partial=partial)
    return None


def kind_of(weight: Tensor, gated: bool, partial: bool) -> tuple[str, bool]:
    """The key of both tables."""
    kind = "gated" if gated else "partial" if partial else "plain"
    return kind, weight.shape[0 if partial else 1] <= NARROW
