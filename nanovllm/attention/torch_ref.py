"""Attention in plain PyTorch: the oracle of the other backends, and the default on a CPU.

Sequences with the same number of queries and contexts of similar length form a rectangle: their blocks are gathered
into one padded [B, L] tensor of keys and one of values, and a single call attends for all of them. A decode batch is a
few rectangles with one query a row. There is no loop over tokens, and what does not depend on the layer (which blocks,
which masks) is worked out once per step and kept for the step's other layers. Blocks that no query's window reaches are
not gathered, so that here a context begins with the first block that is gathered. What is gathered from a cache in FP8
is widened to the dtype of the queries.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.interface import UNSCALED, AttentionMetadata, KVScales, Shared
from nanovllm.kernels import FP8

# Contexts of at least half the longest one share its rectangle. So padding is less than half of what is gathered. Finer
# classes would pay more for their calls than they save.
MIN_FILL = 0.5
# What a rectangle gathers at most, unless one sequence alone has more: so it is still in a CPU's cache when it is read.
MAX_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class _Rectangle:
    """B sequences with n queries each, padded to L keys; P is L rounded up to whole blocks."""

    tokens: Tensor | None  # [B * n] rows of q; None: all rows, in order
    num_queries: int
    num_keys: int  # L
    blocks: Tensor  # [B * P / block_size] int64, which to gather
    padding: Tensor | None  # rows of the gathered [B * P] between a sequence's context and L, and before its windows
    is_causal: bool  # whole prompts of one length, for which PyTorch's own mask is right
    bias: Tensor | None  # else [B, 1, n, L] float, -inf where a query must not look; None: all queries see all


class TorchRefBackend:
    """Works on every device, with any block size, head_dim and dtype that PyTorch has; see `AttentionBackend`."""

    name = "torch_ref"
    capturable = False
    eager_prefill = False

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
        shared = {} if shared is None else shared
        rectangles = shared.get(("rectangles", window))
        if rectangles is None:
            rectangles = shared["rectangles", window] = _rectangles(q, kv, meta, window)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)  # [T, Hq, D]
        for rectangle in rectangles:
            if rectangle.tokens is None:
                out = _attend_rectangle(q, kv, rectangle, scale, scales)
            else:
                out[rectangle.tokens] = _attend_rectangle(q[rectangle.tokens], kv, rectangle, scale, scales)
        return out


def _rectangles(q: Tensor, kv: Tensor, meta: AttentionMetadata, window: int) -> list[_Rectangle]:
    """Which sequences share a rectangle. Reads the lengths on the host."""
    query_start, context_len = meta.query_start.tolist(), meta.context_len.tolist()
    query_len = [end - start for start, end in pairwise(query_start)]
    skipped = [0] * len(context_len)  # blocks of each sequence
    if window:
        block_size = kv.shape[2]
        before = [max(0, context - n + 1 - window) for context, n in zip(context_len, query_len, strict=True)]
        skipped = [keys // block_size for keys in before]
        context_len = [context - n * block_size for context, n in zip(context_len, skipped, strict=True)]
    max_keys = MAX_BYTES // (2 * kv[0, 0, 0].numel() * q.element_size())
    order = sorted(range(len(context_len)), key=lambda s: (query_len[s], context_len[s]), reverse=True)
    members: list[list[int]] = []
    for s in order:
        if query_len[s] == 0:
            continue
        if members:
            n, longest = query_len[members[-1][0]], context_len[members[-1][0]]
            room = max_keys // longest > len(members[-1])
            if query_len[s] == n and context_len[s] >= MIN_FILL * longest and room:
                members[-1].append(s)
                continue
        members.append([s])
    if len(members) == 1:
        members[0].sort()  # the tokens are then all of q, in order
    return [_rectangle(m, query_start, context_len, skipped, q, kv, meta.block_table, window) for m in members]


def _rectangle(
    members: list[int],
    query_start: list[int],
    context_len: list[int],
    skipped: list[int],
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    window: int,
) -> _Rectangle:
    device, block_size = block_table.device, kv.shape[2]
    n = query_start[members[0] + 1] - query_start[members[0]]
    length = max(context_len[s] for s in members)
    num_blocks = -(-length // block_size)
    starts = torch.tensor([query_start[s] for s in members], device=device)  # [B]
    tokens = (starts[:, None] + torch.arange(n, device=device)).flatten()  # [B * n]
    if any(skipped):
        column = torch.tensor([skipped[s] for s in members], device=device)[:, None]  # [B, 1]
        column = (column + torch.arange(num_blocks, device=device)).clamp(max=block_table.shape[1] - 1)
        blocks = block_table[members].gather(1, column).long()  # [B, P / block_size]
    else:
        blocks = block_table[members, :num_blocks].long()
    context = torch.tensor([context_len[s] for s in members], device=device)  # [B]

    padding = bias = None
    is_ragged = any(context_len[s] != length for s in members)
    is_windowed = 0 < window < length  # else all queries see to the beginning of what is gathered
    if is_ragged or is_windowed:
        key = torch.arange(num_blocks * block_size, device=device)  # [P]
        blocks = torch.where(key[::block_size] < context[:, None], blocks, 0)  # some block that exists
        unseen = (key >= context[:, None]) & (key < length)  # [B, P]
        if is_windowed:
            unseen |= key <= context[:, None] - n - window
        # What lies there may be NaN, which neither a mask nor a probability of 0 would stop. So it is overwritten.
        padding = unseen.flatten().nonzero().flatten()
    is_causal = 1 < n == length and not is_windowed
    if is_ragged or is_windowed or 1 < n < length:
        position = context[:, None] - n + torch.arange(n, device=device)  # [B, n]
        key = torch.arange(length, device=device)
        hidden = key > position[:, :, None]  # [B, n, L]
        if is_windowed:
            hidden |= key <= position[:, :, None] - window
        bias = torch.zeros(hidden.shape, dtype=q.dtype, device=device).masked_fill_(hidden, float("-inf"))[:, None]
    return _Rectangle(
        tokens=None if len(tokens) == query_start[-1] else tokens,
        num_queries=n,
        num_keys=length,
        blocks=blocks.flatten(),
        padding=padding,
        is_causal=is_causal,
        bias=bias,
    )


def _gather(kv: Tensor, blocks: Tensor, dtype: torch.dtype, scales: KVScales) -> Tensor:
    """Blocks of the cache [2, len(blocks), block_size, Hkv, D] in a dtype, with the scales applied if it is in FP8."""
    if kv.dtype != FP8:
        return kv.index_select(1, blocks)
    gathered = kv.view(torch.uint8).index_select(1, blocks).view(FP8).to(dtype)
    for part, scale in zip(gathered, scales, strict=True):
        if scale != 1:
            part.mul_(scale)
    return gathered


def _attend_rectangle(q: Tensor, kv: Tensor, rectangle: _Rectangle, scale: float, scales: KVScales) -> Tensor:
    """q: [B * n, Hq, D] -> [B * n, Hq, D]."""
    n = rectangle.num_queries
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv.shape[3]
    batch = q.shape[0] // n
    gathered = _gather(kv, rectangle.blocks, q.dtype, scales)  # [2, B * P / block_size, block_size, Hkv, D]
    if rectangle.padding is not None:
        gathered.flatten(1, 2).index_fill_(1, rectangle.padding, 0)
    gathered = gathered.view(2, batch, -1, num_kv_heads, head_dim)[:, :, : rectangle.num_keys]  # [2, B, L, Hkv, D]
    k, v = gathered.transpose(2, 3)  # [B, Hkv, L, D] each
    if n == 1:
        # All heads of a group look at the same keys with the same mask. So they can be "queries" of one head, and each
        # key is read once for all of them.
        grouped = q.view(batch, num_kv_heads, -1, head_dim)  # [B, Hkv, Hq / Hkv, D]
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=rectangle.bias, scale=scale)
        return out.reshape(batch, num_heads, head_dim)
    rows = q.view(batch, n, num_heads, head_dim).transpose(1, 2)  # [B, Hq, n, D]
    out = F.scaled_dot_product_attention(
        rows, k, v, attn_mask=rectangle.bias, is_causal=rectangle.is_causal, scale=scale, enable_gqa=True
    )
    if not out.isfinite().all():
        out = _without_later_keys(out, rows, k, v, rectangle, scale)
    return out.transpose(1, 2).reshape(batch * n, num_heads, head_dim)


def _without_later_keys(
    out: torch.Tensor, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rectangle: _Rectangle, scale: float
) -> torch.Tensor:
    """Repair `out` [B, Hq, n, D], rows of which are not finite: a query must not feel keys that come after it, such as
    guesses behind it. A mask alone cannot see to that, since 0 * NaN is NaN."""
    n, length = rows.shape[2], k.shape[2]
    visible = torch.ones(n, length, dtype=torch.bool, device=k.device).tril_()  # [n, L], of whole prompts
    if rectangle.bias is not None:
        visible = rectangle.bias == 0  # [B, 1, n, L]
    bad = ~(k.isfinite() & v.isfinite()).all(-1).all(1)[:, None, :, None]  # [B, 1, L, 1]
    k, v = k.masked_fill(bad, 0), v.masked_fill(bad, 0)
    repaired = F.scaled_dot_product_attention(rows, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
    sees_bad = (visible & bad.transpose(2, 3)).any(-1, keepdim=True)  # [B, 1, n, 1]
    return torch.where(sees_bad, out, repaired)
