"""Attention problems with their answers in float64, for the tests of every backend.

Whatever a kernel must not read is NaN: the slots of a block beyond its sequence's context, those before the window of
its first query, blocks that belong to nobody (the unused entries of block tables point at one) and the scratch block.
"""

import dataclasses
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from nanovllm.attention.interface import UNSCALED, AttentionBackend, AttentionMetadata, KVScales, Shared, to_fp8
from nanovllm.kernels import FP8

if TYPE_CHECKING:
    from nanovllm.kernels.attention.paged_tile import PagedInputs

Lengths = list[tuple[int, int]]  # (query_len, context_len) of each sequence, those with one query first


@dataclass
class Case:
    q: torch.Tensor  # [T, Hq, D]
    kv: torch.Tensor  # [2, num_blocks + 1, block_size, Hkv, D]
    meta: AttentionMetadata
    scale: float
    expected: torch.Tensor  # [T, Hq, D] float64
    window: int = 0
    scales: KVScales = UNSCALED


def make_case(
    lengths: Lengths,
    *,
    group: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    window: int = 0,
    scales: KVScales | None = None,
) -> Case:
    """scales: of a cache in FP8. The answer is then that of the rounded keys and values. None: a cache in `dtype`."""
    random = torch.Generator(device).manual_seed(seed)
    scale = head_dim**-0.5

    def normal(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, head_dim, generator=random, device=device).to(dtype)

    needed = [-(-context // block_size) for _, context in lengths]
    num_blocks = sum(needed) + 2
    shuffled = torch.randperm(num_blocks, generator=random, device=device).int()
    nobodys = shuffled[-1].item()
    table = torch.full((len(lengths), max(needed) + 1), nobodys, dtype=torch.int32, device=device)
    shape = 2, num_blocks + 1, block_size, num_kv_heads, head_dim
    kv = torch.full(shape, float("nan"), device=device).to(dtype if scales is None else FP8)
    queries, slots, expected = [], [], []
    for s, (query_len, context) in enumerate(lengths):
        table[s, : needed[s]] = shuffled[sum(needed[:s]) : sum(needed[: s + 1])]
        position = torch.arange(context, device=device)
        slot = table[s, position // block_size].long() * block_size + position % block_size
        q, k, v = normal(query_len, num_kv_heads * group), normal(context, num_kv_heads), normal(context, num_kv_heads)
        stored = [k, v]
        if scales is not None:
            stored = [to_fp8(part, scale) for part, scale in zip(stored, scales, strict=True)]
            k, v = (part.double() * scale for part, scale in zip(stored, scales, strict=True))
        seen = max(0, context - query_len + 1 - window) if window else 0  # the first key that is
        for part, new in zip(kv, stored, strict=True):
            as_bytes(part).view(-1, num_kv_heads, head_dim)[slot[seen:]] = as_bytes(new[seen:])
        queries.append(q)
        slots.append(slot[context - query_len :])
        expected.append(attention_float64(q, k, v, scale, window))
    query_lens = [n for n, _ in lengths]
    meta = AttentionMetadata(
        slots=torch.cat(slots),
        query_start=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device),
        context_len=torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device),
        block_table=table,
        num_decodes=next((s for s, n in enumerate(query_lens) if n != 1), len(lengths)),
        max_query_len=max(query_lens),
        max_context_len=max(context for _, context in lengths),
    )
    return Case(torch.cat(queries), kv, meta, scale, torch.cat(expected), window, scales or UNSCALED)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Numbers of FP8 as bytes, which PyTorch can index everywhere."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def paged_inputs(case: Case, out: torch.Tensor) -> "PagedInputs":
    """The case as a kernel takes it. Needs Triton."""
    from nanovllm.kernels.attention.paged_tile import PagedInputs

    tables = case.meta.block_table, case.meta.query_start, case.meta.context_len
    v_scale = case.scales.v if case.kv.dtype == FP8 else None
    return PagedInputs(case.q, case.kv, *tables, case.scale * case.scales.k, out, v_scale)


def behind_long_contexts(case: Case) -> Case:
    """The case with metadata that say so: then contexts are cut."""
    return dataclasses.replace(case, meta=dataclasses.replace(case.meta, long_context=True))


def as_single_tokens(case: Case) -> Case:
    """The same tokens, each a sequence of its own with one query, as a recorded step has them."""
    meta = case.meta
    query_len = meta.query_start.diff().long()
    row = torch.repeat_interleave(torch.arange(len(query_len), device=query_len.device), query_len)  # [T]
    token = torch.arange(len(row), device=row.device)
    tokens_behind = meta.query_start[1:].long()[row] - 1 - token
    single = dataclasses.replace(
        meta,
        query_start=torch.arange(len(row) + 1, dtype=torch.int32, device=row.device),
        context_len=(meta.context_len[row] - tokens_behind).int(),
        block_table=meta.block_table[row].contiguous(),
        num_decodes=len(row),
        max_query_len=1,
    )
    return dataclasses.replace(case, meta=single)


def attention_float64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int = 0) -> torch.Tensor:
    """Causal attention of the last tokens q [n, Hq, D] of a context k, v [L, Hkv, D], by the definition. A query at p
    sees the keys k with p - k < window."""
    n, context = q.shape[0], k.shape[0]
    group = q.shape[1] // k.shape[1]
    distance = torch.arange(context - n, context, device=q.device)[:, None] - torch.arange(context, device=q.device)
    unseen = (distance < 0) | (distance >= (window or context))  # [n, L]
    heads = []
    for h in range(q.shape[1]):  # one at a time: all scores of a long prompt are gigabytes in float64
        scores = q[:, h].double() @ k[:, h // group].double().T * scale
        heads.append(scores.masked_fill(unseen, float("-inf")).softmax(-1) @ v[:, h // group].double())
    return torch.stack(heads, 1)


def check(backend: AttentionBackend, case: Case, tolerance: float) -> None:
    """Every row's error, relative to the row's own size, is within `tolerance`; no row is an average of others.

    Asked as by the second layer of a step, which finds in `shared` what the first one has worked out.
    """
    shared: Shared = {}
    asked = case.q, case.kv, case.meta, case.scale, shared, case.window, case.scales
    first = backend.attend(*asked)
    out = backend.attend(*asked) if case.q.is_cuda else first
    assert torch.equal(out, first)
    assert out.shape == case.q.shape
    assert out.dtype == case.q.dtype
    error = (out.double() - case.expected).norm(dim=-1) / case.expected.norm(dim=-1)  # [T, Hq]
    worst = error.amax(1).argmax().item()
    assert error.max() <= tolerance, (
        f"token {worst} is off by {error[worst].max():.2e} of its size, not {tolerance:.0e}"
    )
