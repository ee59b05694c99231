"""Triton kernels: where they can run at all, and which of them the layers use."""

import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

FP8, FP8_MAX = torch.float8_e4m3fn, 448.0  # the dtype of all that is kept in FP8, and its largest number


def why_no_kernels(device: torch.device) -> str | None:
    """The reason why the Triton kernels cannot run on `device`; None if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"its kernels need an NVIDIA GPU, and {str(device)!r} is none"
    if not sys.platform.startswith("linux") or importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton; Linux only)"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (7, 5):
        return f"its kernels need compute capability 7.5 or more, and this GPU has {major}.{minor}"
    return None


def has_bfloat16(device: torch.device) -> bool:
    """Whether kernels on `device` can compute in bfloat16: NVIDIA GPUs can since Ampere."""
    return device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def has_fp8(device: torch.device) -> bool:
    """Whether kernels on `device` can compute with numbers in FP8: NVIDIA GPUs can since Ada."""
    return why_no_kernels(device) is None and torch.cuda.get_device_capability(device) >= (8, 9)


class FusedKernels(NamedTuple):
    """Kernels that do several operations of a step in one pass. None: PyTorch does one after the other."""

    add_rms_norm: Callable[..., tuple[Tensor, Tensor]] | None = None
    norm_rope_write: Callable[..., Tensor] | None = None
    silu_and_mul: Callable[[Tensor], Tensor] | None = None
    gelu_and_mul: Callable[[Tensor], Tensor] | None = None
    choose_linear: Callable[..., Callable[..., Tensor] | None] | None = None
    choose_norm_linear: Callable[..., Callable[..., tuple[Tensor, Tensor]] | None] | None = None
    fp8_linear: Callable[..., Tensor] | None = None
    sample_rows: Callable[..., Tensor] | None = None
    edit_logits: Callable[..., Any] | None = None
    restore_logits: Callable[..., None] | None = None
    decode_inputs: Callable[..., None] | None = None
    top_logprobs: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
    route: Callable[..., tuple[Tensor, Tensor]] | None = None
    grouped_mlp: Callable[..., Tensor] | None = None


@cache
def fused_kernels(device: torch.device) -> FusedKernels:
    """All of them where Triton runs, none elsewhere. The first call for a GPU imports Triton."""
    if why_no_kernels(device) is not None:
        return FusedKernels()
    from nanovllm.kernels.fp8.fp8_linear import fp8_linear
    from nanovllm.kernels.fused.add_rms_norm import add_rms_norm
    from nanovllm.kernels.fused.decode_inputs import decode_inputs
    from nanovllm.kernels.fused.edits import edit_logits, restore_logits
    from nanovllm.kernels.fused.norm_rope_write import norm_rope_write
    from nanovllm.kernels.fused.sample import sample_rows
    from nanovllm.kernels.fused.silu_and_mul import gelu_and_mul, silu_and_mul
    from nanovllm.kernels.fused.top_logprobs import top_logprobs
    from nanovllm.kernels.linear.choice import choose_linear, choose_norm_linear
    from nanovllm.kernels.moe.grouped_mlp import grouped_mlp
    from nanovllm.kernels.moe.route import route

    return FusedKernels(
        add_rms_norm=add_rms_norm,
        norm_rope_write=norm_rope_write,
        silu_and_mul=silu_and_mul,
        gelu_and_mul=gelu_and_mul,
        choose_linear=choose_linear,
        choose_norm_linear=choose_norm_linear,
        fp8_linear=fp8_linear,
        sample_rows=sample_rows,
        edit_logits=edit_logits,
        restore_logits=restore_logits,
        decode_inputs=decode_inputs,
        top_logprobs=top_logprobs,
        route=route,
        grouped_mlp=grouped_mlp,
    )


def without_launches(device: torch.device) -> AbstractContextManager[None]:
    """Within this context none of our kernels is launched or compiled on `device`, and their results are undefined."""
    if why_no_kernels(device) is not None:
        return nullcontext()
    from nanovllm.kernels.precompile import without_launches

    return without_launches()
