"""Attention by our kernels in Triton and Gluon: the default on a GPU. Nothing has to be built beforehand."""

import torch

from nanovllm.attention.interface import AttentionMetadata, Shared
from nanovllm.kernels.attention.kv_write import kv_write
from nanovllm.kernels.attention.paged_decode import (
    MAX_ROWS,
    DecodeWorkspace,
    decode_config,
    paged_decode,
    plan_decode,
)
from nanovllm.kernels.attention.paged_prefill import paged_prefill, prefill_config
from nanovllm.kernels.hopper.ring_layout import ring_layout
from nanovllm.kernels.hopper.warp_layout import fits_warp_prefill
from nanovllm.kernels.launch import is_hopper


class TritonBackend:
    """See `AttentionBackend`. Block sizes are powers of two from 16 on, and so are head dimensions.

    Args:
        num_sms: multiprocessors of the GPU, to which some kernels share their work out themselves.
    """

    name = "triton"
    capturable = True

    def __init__(self, num_sms: int) -> None:
        self._num_sms = num_sms
        self._workspaces: dict[tuple[int, ...], DecodeWorkspace] = {}
        self._taken: torch.Tensor | None = None  # by the programs of `warp_prefill`

    def write(self, kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        kv_write(kv, k, v, slots)

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata, scale: float, shared: Shared | None = None
    ) -> torch.Tensor:
        num_sequences = meta.context_len.shape[0]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)  # [T, Hq, D]
        group = q.shape[1] // kv.shape[3]
        # Sequences that verify a few draft tokens are decodes too: what they cost is the reading of their context.
        few_queries = meta.max_query_len * group <= MAX_ROWS
        num_decodes = num_sequences if few_queries else meta.num_decodes
        if num_decodes:
            # One kernel for any few of them: each number of its own would be compiled when it first comes up.
            max_queries = MAX_ROWS // group if few_queries and meta.max_query_len > 1 else 1
            self._decode(q, kv, meta, scale, out, num_decodes, max_queries, {} if shared is None else shared)
        if num_decodes < num_sequences:
            self._prefill(q, kv, meta, scale, out, num_decodes)
        return out

    def _decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        out: torch.Tensor,
        num_decodes: int,
        max_queries: int,
        shared: Shared,
    ) -> None:
        _, _, _, num_kv_heads, head_dim = kv.shape
        ring = ring_layout(q, kv, num_decodes)  # None: by `paged_decode`
        config = decode_config(head_dim, q.element_size()) if ring is None else ring.config
        pieces = max(1, self._num_sms * config.programs_per_sm // num_kv_heads)
        key = pieces, max_queries, q.shape[1], head_dim
        if key not in self._workspaces:
            self._workspaces[key] = DecodeWorkspace.allocate(*key, device=q.device)
        context_len = meta.context_len[:num_decodes]
        planned = "decode plan" in shared
        if not planned:
            shared["decode plan"] = plan_decode(context_len, pieces, config)
        inputs = (
            q, kv, meta.block_table, meta.query_start, context_len, scale, out,
            self._workspaces[key], shared["decode plan"],
        )  # fmt: skip
        if ring is None:
            paged_decode(*inputs, config, overlap=planned)
        else:
            from nanovllm.kernels.hopper.ring_decode import (
                ring_decode,  # `ring_layout` has seen that it can be imported
            )

            ring_decode(*inputs, ring, overlap=planned)

    def _prefill(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        out: torch.Tensor,
        first_sequence: int,
    ) -> None:
        inputs = q, kv, meta.block_table, meta.query_start, meta.context_len, scale, out
        if fits_warp_prefill(q, kv):
            from nanovllm.kernels.hopper.warp_prefill import warp_prefill  # it can be imported: that was looked at

            if self._taken is None:
                self._taken = torch.zeros(2, dtype=torch.int32, device=q.device)
            warp_prefill(*inputs, self._taken, self._num_sms, first_sequence=first_sequence)
        else:
            config = prefill_config(kv.shape[-1], q.element_size(), kv.shape[2], is_hopper(q.device))
            paged_prefill(*inputs, config, first_sequence=first_sequence)
