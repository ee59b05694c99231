"""The gate of the MLP."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, "GLU Variants Improve Transformer", 2020). gate_up [T, 2 I] -> [T, I]"""
    gate, up = gate_up.chunk(2, dim=-1)  # [T, I] each
    return F.silu(gate) * up
