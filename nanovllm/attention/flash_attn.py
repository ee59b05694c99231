"""Attention by the flash-attn library for prefill, by our kernels for decode. Optional: the extra `flash` installs it.

Two packages go by that name. `flash-attn-4` is pure Python over NVIDIA's CuTe DSL and installs from wheels. Version 2,
`flash-attn`, has to be compiled. On Hopper flash-attn-4 has no split-KV, which decode needs. So either is used for
what it is best at: long chunks of queries.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nanovllm.attention.interface import UNSCALED, AttentionMetadata, KVScales, Shared
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.kernels.attention.paged_tile import PagedInputs

logger = logging.getLogger(__name__)

# (q [T, Hq, D], kv, metadata of these queries alone, scale, keyword arguments for the window) -> [T, Hq, D]
Prefill = Callable[[Tensor, Tensor, AttentionMetadata, float, dict[str, Any]], Tensor]

# Why a library cannot serve a GPU or a block size
FLASH_4 = "has no paged KV cache for compute capability {}.{}"
FLASH_2 = "needs a kvcache_block_size that is a multiple of 256, not {}"
FLASH_4_PAGE = 128  # keys. As many as flash-attn-4's tiles have, so that the copy engine can fetch a page whole
MAX_TILE = 128  # keys of a tile of either library, at most


def make_backend(num_sms: int, device: torch.device, block_size: int, dtype: torch.dtype) -> "FlashAttnBackend":
    """The backend with the library that serves this GPU and block size; logs which one. num_sms: as of `TritonBackend`.

    Raises:
        ValueError: for float32, or if there is no such library: for each of the two why not, and what to do.
    """
    if dtype == torch.float32:
        raise ValueError("attention_backend='flash_attn' works in 16 bits; take dtype='bfloat16' or the triton backend")
    major, minor = torch.cuda.get_device_capability(device)
    reasons = []
    for library, module, prefill, serves, obstacle in (
        ("flash-attn-4", "flash_attn.cute.interface", _prefill_4, major in (9, 10, 11), FLASH_4.format(major, minor)),
        ("flash-attn 2", "flash_attn", _prefill_2, block_size % 256 == 0, FLASH_2.format(block_size)),
    ):
        if serves:
            try:
                own = partial(prefill, import_module(module).flash_attn_varlen_func)
            except (ImportError, AttributeError) as error:  # flash-attn-4 alone leaves an empty package flash_attn
                obstacle = f"cannot be imported ({error})"
            else:
                logger.info("attention_backend='flash_attn' uses %s for prefill and Triton for decode", library)
                return FlashAttnBackend(num_sms, own)
        reasons.append(f"{library} {obstacle}")
    raise ValueError(
        f"attention_backend='flash_attn' finds no library: {'; '.join(reasons)}. "
        "Install one (pip install 'nanovllm[flash]') or take attention_backend='triton'"
    )


def _prefill_4(
    flash_attn_varlen_func: Any, q: Tensor, kv: Tensor, meta: AttentionMetadata, scale: float, window: dict[str, Any]
) -> Tensor:
    pages, page_table = kv, meta.block_table  # [2, num_pages, page size, Hkv, D], [S, pages of a sequence]
    per_block, rest = divmod(kv.shape[2], FLASH_4_PAGE)
    if per_block > 1 and rest == 0:
        # A block is then several whole pages, one after the other. The cache need not be moved to be seen so.
        pages = kv.unflatten(2, (per_block, FLASH_4_PAGE)).flatten(1, 2)
        page = torch.arange(per_block, dtype=torch.int32, device=kv.device)
        page_table = (meta.block_table[:, :, None] * per_block + page).flatten(1)  # [S, M * per_block]
    out = flash_attn_varlen_func(
        q,
        pages[0],
        pages[1],
        cu_seqlens_q=meta.query_start,
        seqused_k=meta.context_len,
        page_table=page_table,
        max_seqlen_q=meta.max_query_len,
        max_seqlen_k=meta.max_context_len,
        softmax_scale=scale,
        causal=True,
        **window,
    )
    return out[0] if isinstance(out, tuple) else out  # some versions return the log-sum-exp as well


def _prefill_2(
    flash_attn_varlen_func: Any, q: Tensor, kv: Tensor, meta: AttentionMetadata, scale: float, window: dict[str, Any]
) -> Tensor:
    key_start = torch.nn.functional.pad(meta.context_len.cumsum(0, dtype=torch.int32), (1, 0))  # [S + 1]
    return flash_attn_varlen_func(
        q,
        kv[0],
        kv[1],
        meta.query_start,
        key_start,
        meta.max_query_len,
        meta.max_context_len,
        softmax_scale=scale,
        causal=True,
        block_table=meta.block_table,
        **window,
    )


class FlashAttnBackend(TritonBackend):
    """Prefill through the library; decode and capture as `TritonBackend` does.

    Args:
        num_sms: multiprocessors of the GPU.
        prefill: the library's function, from `make_backend`.
    """

    name = "flash_attn"
    eager_prefill = True  # the library decides on the host how much there is to do

    def __init__(self, num_sms: int, prefill: Prefill) -> None:
        super().__init__(num_sms)
        self._library = prefill

    def attend(
        self,
        q: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        scale: float,
        shared: Shared | None = None,
        window: int = 0,
        scales: KVScales = UNSCALED,
    ) -> Tensor:
        if meta.max_query_len > 1:
            shared = {} if shared is None else shared
            if "slots behind" not in shared:
                shared["slots behind"] = slots_behind(kv, meta)
            # The library loads V there, too. What an earlier owner left may be NaN, and 0 * NaN is NaN.
            kv[1].flatten(0, 1).index_fill_(0, shared["slots behind"], 0)
        return super().attend(q, kv, meta, scale, shared, window, scales)

    def _prefill(self, inputs: PagedInputs, meta: AttentionMetadata, first_sequence: int, window: int) -> None:
        q, kv = inputs.q, inputs.kv
        if window and kv.shape[2] % MAX_TILE:
            # The library loads V in whole tiles. What lies before a window may be another sequence's, and NaN.
            return super()._prefill(inputs, meta, first_sequence, window)
        # Each sequence before `first_sequence` has one token, so the number is that of its first token as well.
        own = replace(
            meta,
            block_table=meta.block_table[first_sequence:],
            query_start=meta.query_start[first_sequence:] - first_sequence,
            context_len=meta.context_len[first_sequence:],
        )
        kept = {"window_size": (window - 1, 0)} if window else {}  # keys to the left and to the right of a query's own
        inputs.out[first_sequence:] = self._library(q[first_sequence:], kv, own, inputs.scale, kept)


def slots_behind(kv: Tensor, meta: AttentionMetadata) -> Tensor:
    """The slots [S * block_size] int64 behind the context in its last block, of the S sequences with several queries.
    In the place of slots that belong to the context stands one of the scratch block."""
    num_blocks, block_size = kv.shape[1:3]
    last = meta.context_len[meta.num_decodes :].long() - 1  # [S]
    block = meta.block_table[meta.num_decodes :].gather(1, (last // block_size)[:, None]).long()  # [S, 1]
    offset = torch.arange(block_size, device=kv.device)
    behind = offset > (last % block_size)[:, None]  # [S, block_size]
    return torch.where(behind, block * block_size + offset, num_blocks * block_size - 1).flatten()
