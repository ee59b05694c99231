"""Attention over the paged KV cache: one interface, three backends, and the choice among them."""

import logging

import torch

from nanovllm.attention.interface import AttentionBackend, AttentionMetadata
from nanovllm.attention.torch_ref import TorchRefBackend
from nanovllm.kernels import FP8, has_fp8, why_no_kernels

__all__ = ["AttentionBackend", "AttentionMetadata", "select_backend"]

logger = logging.getLogger(__name__)

HEAD_DIMS = (16, 32, 64, 128, 256)


def select_backend(
    name: str,
    device: torch.device,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """Make the backend called `name`. "auto" is "triton" where its kernels can run, else "torch_ref"; the log says why.

    Args:
        name: "auto", "torch_ref", "triton" or "flash_attn".
        device: where the KV cache is.
        head_dim: elements per head.
        block_size: tokens per block of the KV cache.
        dtype: of the queries.
        kv_dtype: of the KV cache; None: the same as `dtype`.

    Raises:
        ValueError: if that backend cannot serve this device, shape or dtype. The message says why and what to do.
    """
    if kv_dtype == FP8 and why_no_kernels(device) is None and not has_fp8(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise ValueError(
            f"kv_cache_dtype='fp8' needs compute capability 8.9 or more, and {str(device)!r} has {major}.{minor}; take "
            "kv_cache_dtype='auto'"
        )
    if name == "auto":
        reason = _why_not_triton(device, head_dim, block_size, dtype)
        name = "torch_ref" if reason else "triton"
        logger.info("attention_backend='auto' chose %s: %s", name, reason or f"{device} can run its kernels")
    if name == "torch_ref":
        return TorchRefBackend()
    if name not in ("triton", "flash_attn"):
        raise ValueError(f"attention_backend must be auto, torch_ref, triton or flash_attn; got {name!r}")

    reason = _why_not_triton(device, head_dim, block_size, dtype)  # flash_attn decodes by our kernels
    if reason:
        raise ValueError(f"attention_backend={name!r} cannot be used: {reason}; take attention_backend='torch_ref'")
    if name == "flash_attn" and kv_dtype == FP8:
        raise ValueError(
            "attention_backend='flash_attn' cannot read kv_cache_dtype='fp8'; take attention_backend='triton'"
        )
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    if name == "triton":
        from nanovllm.attention.triton_backend import TritonBackend

        return TritonBackend(num_sms)
    from nanovllm.attention.flash_attn import make_backend

    return make_backend(num_sms, device, block_size, dtype)


def _why_not_triton(device: torch.device, head_dim: int, block_size: int, dtype: torch.dtype) -> str | None:
    reason = why_no_kernels(device)
    if reason is not None:
        return reason
    if block_size < 16 or block_size & (block_size - 1):
        return f"its kernels need a kvcache_block_size that is a power of two of at least 16, not {block_size}"
    if head_dim not in HEAD_DIMS:
        return f"its kernels need a head_dim of {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its kernels work in float32, float16 and bfloat16, not {dtype}"
    return None
