"""RMSNorm (Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019), alone or after a residual addition."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm import kernels
from nanovllm.layers.linear import PendingAllReduce, SubLayerOutput


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; float32 inside, the result in the dtype of x."""
    # Explicitly, because F.rms_norm does not promise where it rounds: it has several implementations.
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(x + residual), x + residual): the two things that a layer needs of its residual stream.

    x, residual [T, H]. One function, so that a single kernel can do it in one pass over memory.
    """
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


class RMSNorm(nn.Module):
    """weight [size]. Normalises a hidden state, or a head (Qwen3)."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: SubLayerOutput, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x, residual [T, H] -> (norm(x + residual), x + residual). Without a residual (first layer): (norm(x), x).

        x may also be what `Linear.partial` gives: parts to be summed, or what is still to be summed over the ranks.
        """
        if isinstance(x, PendingAllReduce):
            return x.group.all_reduce_add_rms_norm(x.parts, residual, self.weight, self.eps)
        fused = kernels.fused_kernels(x.device).add_rms_norm
        if fused is not None:
            return fused(x, residual, self.weight, self.eps)
        if residual is None:
            return self(x), x
        return add_rms_norm(x, residual, self.weight, self.eps)
