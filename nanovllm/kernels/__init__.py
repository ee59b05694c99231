"""Triton kernels, each beside its plain-PyTorch reference, and the choice between the two."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.launch import why_no_kernels


class FusedKernels(NamedTuple):
    """Kernels that do several operations of a step in one pass. None: PyTorch does one after the other."""

    add_rms_norm: Callable[..., tuple[Tensor, Tensor]] | None = None
    norm_rope_write: Callable[..., Tensor] | None = None
    silu_and_mul: Callable[[Tensor], Tensor] | None = None
    choose_linear: Callable[..., Callable[..., Tensor] | None] | None = None
    sample_rows: Callable[..., Tensor] | None = None
    decode_inputs: Callable[..., None] | None = None


@cache
def fused_kernels(device: torch.device) -> FusedKernels:
    """All of them where Triton runs, none elsewhere. The first call for a GPU imports Triton."""
    if why_no_kernels(device) is not None:
        return FusedKernels()
    from nanovllm.kernels.fused.add_rms_norm import add_rms_norm
    from nanovllm.kernels.fused.decode_inputs import decode_inputs
    from nanovllm.kernels.fused.norm_rope_write import norm_rope_write
    from nanovllm.kernels.fused.sample import sample_rows
    from nanovllm.kernels.fused.silu_and_mul import silu_and_mul
    from nanovllm.kernels.linear.choice import choose_linear

    return FusedKernels(add_rms_norm, norm_rope_write, silu_and_mul, choose_linear, sample_rows, decode_inputs)
