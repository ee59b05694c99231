"""Linear layers whose weights are in FP8, which has half the bytes of bf16.

A weight is its stored value, an e4m3 number of 8 bits (Micikevicius et al., "FP8 Formats for Deep Learning", 2022),
times a scale in float32. An output channel shares a scale, or a block of R x C weights does.
"""

from collections.abc import Callable
from functools import partial as bind
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm import kernels
from nanovllm.kernels import FP8, FP8_MAX
from nanovllm.layers.linear import Linear, MergedLinear, silu_and_mul

GRAIN = 128, 64  # for the kernels, a layer's inputs are a multiple of the first, each part's outputs of the second


def widen(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [out, in] in FP8, scale [out / R, in / C], each for R x C weights -> [out, in] float32."""
    rows, columns = (whole // parts for whole, parts in zip(weight.shape, scale.shape, strict=True))
    cells = weight.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # [out / R, R, in / C, C]
    return (cells * scale[:, None, :, None]).view(weight.shape)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [..., out, in] -> the same in FP8, and a scale for each output channel [..., out, 1] float32.

    A channel's largest weight becomes the largest number of FP8. A channel of zeros has the scale 1.
    """
    largest = weight.float().abs().amax(-1, keepdim=True)  # [..., out, 1]
    # Not by a number: for that, a GPU multiplies by its inverse, which rounds differently from a division on a CPU
    scale = torch.where(largest > 0, largest / torch.full_like(largest, FP8_MAX), 1.0)
    return (weight.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def can_stay(layer: Linear) -> bool:
    """Whether the kernels can read the weights of `layer` in FP8, by its sizes."""
    return layer.weight.shape[1] % GRAIN[0] == 0 and all(rows % GRAIN[1] == 0 for rows in parts_of(layer))


def parts_of(layer: Linear) -> list[int]:
    return list(layer.parts.values()) if isinstance(layer, MergedLinear) else [layer.weight.shape[0]]


class Fp8Linear(Linear):
    """A linear layer with its weight in FP8: weight [out, in], scale [out / R, in / C] float32. The loader fills both.

    block: the rows and columns that share a scale in the checkpoint; None: R = 1 and C = in. A part of a layer, and a
    rank's share, may begin within a block. So R is the largest size that divides the block's rows and the outputs of
    all parts, and C is the same for the columns. Each cell of R x C then has one scale, the checkpoint's own.
    """

    def __init__(self, layer: Linear, block: tuple[int, int] | None) -> None:
        """Make what takes the place of `layer`, on its device. The values of its weights do not matter."""
        nn.Module.__init__(self)
        outputs, inputs = layer.weight.shape
        rows, columns = (1, inputs) if block is None else (gcd(block[0], *parts_of(layer)), gcd(block[1], inputs))
        device = layer.weight.device
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=FP8, device=device), requires_grad=False)
        scale = torch.empty(outputs // rows, inputs // columns, device=device)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias, self.group = layer.bias, layer.group

    def product(self, x: Tensor, bias: Tensor | None = None, *, partial: bool = False) -> Tensor:
        kernel = fp8_kernel(x)
        if kernel is not None:
            return kernel(x, self.weight, self.scale, bias, partial=partial)
        return F.linear(x, widen(self.weight, self.scale).to(x.dtype), bias)


class Fp8MergedLinear(Fp8Linear, MergedLinear):
    def __init__(self, layer: MergedLinear, block: tuple[int, int] | None) -> None:
        super().__init__(layer, block)
        self.parts = layer.parts

    def gated(self, x: Tensor) -> Tensor:
        kernel = fp8_kernel(x) if self.bias is None else None
        return silu_and_mul(self(x)) if kernel is None else kernel(x, self.weight, self.scale, gated=True)

    def norm_kernel(self, residual: Tensor, *, gated: bool) -> Callable[..., tuple[Tensor, Tensor]] | None:
        kernel = None if residual.dtype == torch.float32 else super().norm_kernel(residual, gated=gated)
        return None if kernel is None else bind(kernel, scale=self.scale)


def fp8_kernel(x: Tensor) -> Callable[..., Tensor] | None:
    """Our kernel for x [T, in], or None where it cannot run or x is in float32. Without it the library multiplies, by
    weights that are widened at each step."""
    return None if x.dtype == torch.float32 else kernels.fused_kernels(x.device).fp8_linear
