"""Which kernel computes a linear layer for few tokens: one of ours, or the library's. The rules are in `cards.toml`.

A layer is of one of three kinds. *plain*: x W^T + b. *gated*: the weight holds a gate above an up projection, and the
result is silu(gate) * up. *partial*: the result may come in parts, which the norm that follows sums.

A row of the table names a kernel. *skinny*: `skinny_linear`. *tiled*: `tiled_linear` with this tile. *weight_prefetch*:
`weight_prefetch_linear` with at most `most` tokens per program; where that kernel cannot run, its rows do not count.
With `cuts` it cuts inputs within programs. With `handful` it can compute the norm before the layer as well
(`norm_linear`). `num_stages`: steps under way at most, instead of the kernel's own number.
*library*: none of ours.
"""

from collections.abc import Callable
from functools import cache
from functools import partial as bind
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.cards import choose
from nanovllm.kernels.launch import is_hopper, shared_memory
from nanovllm.kernels.linear.skinny_linear import skinny_linear
from nanovllm.kernels.linear.tiled_linear import Tile, tiled_linear

LinearKernel = Callable[..., Tensor]  # f(x [T, in], weight [out, in], bias=None)
NormLinearKernel = Callable[..., tuple[Tensor, Tensor]]

MAX_TOKENS = 256  # of a step that one of our kernels is asked for


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


def choose_norm_linear(num_tokens: int, weight: Tensor, *, gated: bool = False) -> NormLinearKernel | None:
    """The kernel for a layer together with the addition and norm before it. None: two kernels are faster, or there is
    no such kernel for this layer.

    Called as f(x, residual, norm_weight, eps, weight, bias=None): first the arguments of `add_rms_norm`. Gives the
    layer's result, and the sum x + residual. With a gate there is no bias. Of a weight in FP8 the scales come last.
    """
    if num_tokens > MAX_TOKENS:
        return None
    hopper = hopper_linear(weight.device)
    return _look_up_norm(hopper, num_tokens, weight.shape, weight.dtype, weight.device, gated)


def choose_linear(
    num_tokens: int, weight: Tensor, *, gated: bool = False, partial: bool = False
) -> LinearKernel | None:
    """The kernel for `weight` [out, in] and x [num_tokens, in], called as f(x, weight, bias=None).

    gated, partial: the kind of the layer, as in `tiled_linear`. None: the library is faster, or our kernels cannot take
    the shape or the dtype.
    """
    return _choose(hopper_linear(weight.device), num_tokens, weight, gated, partial)


def choose_on_any_gpu(
    num_tokens: int, weight: Tensor, *, gated: bool = False, partial: bool = False
) -> LinearKernel | None:
    """`choose_linear` without the kernel for Hopper."""
    return _choose(None, num_tokens, weight, gated, partial)


def _choose(
    hopper: ModuleType | None, num_tokens: int, weight: Tensor, gated: bool, partial: bool
) -> LinearKernel | None:
    if num_tokens > MAX_TOKENS:
        return None
    return _look_up(hopper, num_tokens, weight.shape, weight.dtype, weight.device, gated, partial)


@cache  # a step asks for every layer
def _look_up(
    hopper: ModuleType | None,
    num_tokens: int,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    gated: bool,
    partial: bool,
) -> LinearKernel | None:
    gives = _row_for(hopper, num_tokens, shape, dtype, device, gated, partial)
    outputs, inputs = shape
    columns = outputs // 2 if gated else outputs
    if gives is None or (gives["kernel"] == "tiled" and columns % 64):
        return None
    return kernel_of(gives, hopper, num_tokens, columns, inputs, gated=gated, partial=partial)


@cache
def _look_up_norm(
    hopper: ModuleType | None, num_tokens: int, shape: torch.Size, dtype: torch.dtype, device: torch.device, gated: bool
) -> NormLinearKernel | None:
    outputs, inputs = shape
    columns = outputs // 2 if gated else outputs
    if hopper is None or not hopper.can_have_norm(num_tokens, inputs):
        return None
    if dtype == torch.float8_e4m3fn:
        if not hopper.norm_in_fp8(columns, inputs, gated):
            return None
        tile = hopper.choose_fp8_tile(num_tokens, columns, inputs, gated, False, norm=True)
        return bind(hopper.norm_linear, tile=tile, gated=gated)
    gives = _row_for(hopper, num_tokens, shape, dtype, device, gated, False)
    if gives is None or not gives.get("handful"):
        return None
    tile = hopper.choose_tile(num_tokens, columns, inputs, gives["most"], gated, False, handful=True, norm=True)
    return bind(hopper.norm_linear, tile=tile, gated=gated)


def _row_for(
    hopper: ModuleType | None,
    num_tokens: int,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    gated: bool,
    partial: bool,
) -> dict[str, Any] | None:
    """What the table gives; None for a shape or dtype that no kernel of ours can take."""
    outputs, inputs = shape
    columns = outputs // 2 if gated else outputs
    if dtype.itemsize != 2 or inputs % 128 or columns % 32:
        return None
    return choose(
        device,
        "linear",
        "gated" if gated else "partial" if partial else "plain",
        without=None if hopper and columns % 64 == 0 else "weight_prefetch",
        tokens=num_tokens,
        kib=outputs * inputs * dtype.itemsize / 1024,
        hidden=outputs if partial else inputs,
        shared_kib=shared_memory(device) / 1024,
    )


def kernel_of(
    gives: dict[str, Any], hopper: ModuleType | None, num_tokens: int, columns: int, inputs: int,
    *, gated: bool = False, partial: bool = False,
) -> LinearKernel | None:  # fmt: skip
    """What a row of the table gives, for a result of so many columns; hopper: needed for `weight_prefetch_linear`."""
    kernel, tile = gives["kernel"], {name: value for name, value in gives.items() if name != "kernel"}
    if kernel == "library":
        return None
    if kernel == "skinny":
        return bind(skinny_linear, gated=gated, partial=partial)
    if kernel == "tiled":
        return bind(tiled_linear, tile=Tile(**tile), gated=gated, partial=partial)
    assert hopper is not None
    prefetch = hopper.choose_tile(
        num_tokens, columns, inputs, tile["most"], gated, partial,
        handful=tile.get("handful", tile.get("cuts", False)), num_stages=tile.get("num_stages"),
    )  # fmt: skip
    return bind(hopper.weight_prefetch_linear, tile=prefetch, gated=gated, partial=partial)
