"""RMSNorm (Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019), alone or after a residual addition."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm import kernels
from nanovllm.layers.linear import MergedLinear, PendingAllReduce, SubLayerOutput


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; float32 inside, the result in the dtype of x."""
    # In float32 explicitly, because F.rms_norm has several implementations and does not promise where it rounds.
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), the input of the next half-layer and the residual stream; all [T, H].

    One function, because on a GPU one kernel does both in one pass over memory.
    """
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


class RMSNorm(nn.Module):
    """Normalises a hidden state, or a head (Qwen3). weight [size], uninitialised: the loader fills it."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: SubLayerOutput, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x, residual [T, H] -> (norm(x + residual), x + residual). Without a residual (first layer): (norm(x), x).

        x may also be what `Linear.partial` gives: parts [S, T, H] to be summed, or a sum over the ranks not taken yet.
        """
        if isinstance(x, PendingAllReduce):
            return x.group.all_reduce_add_rms_norm(x.parts, residual, self.weight, self.eps)
        fused = kernels.fused_kernels(x.device).add_rms_norm
        if fused is not None:
            return fused(x, residual, self.weight, self.eps)
        if residual is None:
            return self(x), x
        return add_rms_norm(x, residual, self.weight, self.eps)

    def add_then(
        self, layer: MergedLinear, x: SubLayerOutput, residual: Tensor | None, *, gated: bool = False
    ) -> tuple[Tensor, Tensor]:
        """x, residual [T, H] as for `add` -> (layer(norm(x + residual)), x + residual), or `layer.gated` of the norm.

        For few tokens one kernel may do both: then the norm takes no time of its own.
        """
        if residual is not None and not isinstance(x, PendingAllReduce):
            kernel = layer.norm_kernel(residual, gated=gated)
            if kernel is not None:
                return kernel(x, residual, self.weight, self.eps, layer.weight, layer.bias)
        normed, residual = self.add(x, residual)
        return layer.gated(normed) if gated else layer(normed), residual


class OffsetRMSNorm(RMSNorm):
    """The norm of Gemma. Its checkpoints have the weight minus 1. The loader adds the 1, in float32, as Gemma does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps, dtype=torch.float32)
