"""Attention by our kernels in Triton and Gluon: the default on a GPU. Nothing has to be built beforehand."""

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.attention.interface import UNSCALED, AttentionMetadata, KVScales, Shared
from nanovllm.kernels import FP8
from nanovllm.kernels.attention.paged_decode import MAX_ROWS, DecodeWorkspace, decode_config, paged_decode, plan_decode
from nanovllm.kernels.attention.paged_prefill import paged_prefill, prefill_config
from nanovllm.kernels.attention.paged_tile import PagedInputs
from nanovllm.kernels.attention.prefill_pieces import PrefillWorkspace
from nanovllm.kernels.launch import is_hopper


class HopperKernels(NamedTuple):
    """The modules of `kernels/hopper/` for attention. None: the kernel for any GPU is used."""

    ring_decode: ModuleType | None = None
    warp_specialized_prefill: ModuleType | None = None


@cache
def hopper_kernels(device: torch.device) -> HopperKernels:
    """Both on a Hopper GPU; none on others, if Triton has no Gluon where we look for it, or without the folder."""
    if not is_hopper(device):
        return HopperKernels()
    try:
        from nanovllm.kernels.hopper import ring_decode, warp_specialized_prefill
    except (ImportError, AttributeError):
        return HopperKernels()
    return HopperKernels(ring_decode, warp_specialized_prefill)


class TritonBackend:
    """See `AttentionBackend`. Block sizes are powers of two from 16 on, and so are head dimensions.

    Layers with a sliding window use the kernels for any GPU. So does the prefill with a KV cache in FP8.

    Args:
        num_sms: multiprocessors of the GPU. Some kernels share their work out to them.
    """

    name = "triton"
    capturable = True
    eager_prefill = False

    def __init__(self, num_sms: int) -> None:
        self._num_sms = num_sms
        self._workspaces: dict[tuple[int, ...], DecodeWorkspace] = {}
        self._prefill_workspaces: dict[tuple[int, ...], PrefillWorkspace] = {}
        self._taken: Tensor | None = None  # counters that the programs of `warp_specialized_prefill` share

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
        num_sequences = meta.context_len.shape[0]
        k_scale, v_scale = scales if kv.dtype == FP8 else (1.0, None)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)  # [T, Hq, D]
        group = q.shape[1] // kv.shape[3]
        # Sequences that verify a few guesses are decodes too: what they cost is the reading of their context.
        few_queries = meta.max_query_len * group <= MAX_ROWS
        num_decodes = num_sequences if few_queries else meta.num_decodes
        if num_decodes:
            # One compiled kernel serves any few queries. Otherwise each number would be compiled when it first comes.
            max_queries = MAX_ROWS // group if few_queries and meta.max_query_len > 1 else 1
            lengths = meta.context_len[:num_decodes]
            tables = meta.block_table, meta.query_start, lengths
            inputs = PagedInputs(q, kv, *tables, scale * k_scale, out, v_scale)
            self._decode(inputs, max_queries, {} if shared is None else shared, window)
        if num_decodes < num_sequences:
            tables = meta.block_table, meta.query_start, meta.context_len
            inputs = PagedInputs(q, kv, *tables, scale * k_scale, out, v_scale)
            self._prefill(inputs, meta, num_decodes, window)
        return out

    def _decode(self, inputs: PagedInputs, max_queries: int, shared: Shared, window: int) -> None:
        q, kv, context_len = inputs.q, inputs.kv, inputs.context_len
        _, _, _, num_kv_heads, head_dim = kv.shape
        hopper = None if window else hopper_kernels(q.device).ring_decode
        ring = None if hopper is None else hopper.ring_layout(q, kv, context_len.shape[0])
        config = None if ring is None else ring.config
        if config is None:
            config = decode_config(q.device, head_dim, kv.element_size())
        pieces = max(1, self._num_sms * config.programs_per_sm // num_kv_heads)
        key = pieces, max_queries, q.shape[1], head_dim
        if key not in self._workspaces:
            self._workspaces[key] = DecodeWorkspace.allocate(*key, device=q.device)
        plan = shared.get(("decode plan", window))
        planned = plan is not None
        if plan is None:
            plan = shared["decode plan", window] = plan_decode(context_len, pieces, config, max_queries, window)
        if hopper is None or ring is None:
            paged_decode(inputs, self._workspaces[key], plan, config, overlap=planned, window=window)
        else:
            hopper.ring_decode(inputs, self._workspaces[key], plan, ring, overlap=planned)

    def _prefill(self, inputs: PagedInputs, meta: AttentionMetadata, first_sequence: int, window: int) -> None:
        q, kv = inputs.q, inputs.kv
        hopper = None if window or meta.long_context else hopper_kernels(q.device).warp_specialized_prefill
        if hopper is not None and hopper.fits(q, kv):
            if self._taken is None:
                self._taken = torch.zeros(2, dtype=torch.int32, device=q.device)
            hopper.warp_specialized_prefill(inputs, self._taken, self._num_sms, first_sequence=first_sequence)
        else:
            config = prefill_config(q.device, kv.shape[-1], kv.element_size(), kv.shape[2])
            workspace = self._prefill_workspace(kv, config.rows) if meta.long_context else None
            paged_prefill(inputs, config, workspace, first_sequence=first_sequence, window=window)

    def _prefill_workspace(self, kv: Tensor, rows: int) -> PrefillWorkspace:
        key = self._num_sms, kv.shape[3], rows, kv.shape[4]
        if key not in self._prefill_workspaces:
            self._prefill_workspaces[key] = PrefillWorkspace.allocate(*key, device=kv.device)
        return self._prefill_workspaces[key]
