"""The gate of the MLP."""

import torch.nn.functional as F
from torch import Tensor

from nanovllm import kernels


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, "GLU Variants Improve Transformer", 2020). gate_up [T, 2 I] -> [T, I]"""
    fused = kernels.fused_kernels(gate_up.device).silu_and_mul
    if fused is not None:
        return fused(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)  # [T, I] each
    return F.silu(gate) * up
