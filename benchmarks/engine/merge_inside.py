"""An experiment for `benchmarks/engine/decode_step.py`: the decode kernel merges its pieces itself.

A sequence that was cut into pieces is merged by a kernel of its own, which has next to nothing to do but costs a launch
and a wait: at small batches it seems to add about a fifth to a layer. Here the program that arrives last at a sequence
merges it: it knows from a counter that the others have written theirs. The counter is back at 0 then, so that a
recording can be replayed.

Prediction for an H200: an atomic and a read of partial results that are in L2 take about 1.5 us, so 3 to 4 us less of
a layer at batch 1, 2 to 3 at batch 128. Measured, it loses at every batch (docs/kernels.md): most of what the small
kernel seems to take it spends waiting beside its predecessor, and it merges all heads at once where the last program to
arrive has them one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from benchmarks.engine.plain_decode import plain_decode
from nanovllm.attention import triton_backend
from nanovllm.kernels.attention.paged_decode import (
    PREFETCHED_TILES,
    DecodeConfig,
    DecodeWorkspace,
    paged_decode,
)
from nanovllm.kernels.attention.paged_tile import LOG2_E, ask_for_keys, attend_keys
from nanovllm.kernels.launch import CACHE_LINE, overlaps_launches

MERGED_AT_ONCE = 16


@triton.jit
def merge_parts(  # type: ignore[no-untyped-def]
    m_ptr, denom_ptr, acc_ptr, first, last, total, pieces, query, head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, MERGED: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """The output [D] of a query and a head from what the pieces `first` to `last` left of its sequence."""
    dim = tl.arange(0, HEAD_DIM)
    m = -1e30
    denom = 0.0
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for start in range(first, last + 1, MERGED):
        piece = start + tl.arange(0, MERGED)
        # With fewer tiles than pieces some pieces are empty, and have written nothing.
        used = (piece <= last) & (piece * total // pieces < (piece + 1) * total // pieces)
        slot = ((piece * 2 + (piece > first).to(tl.int32)) * QUERIES + query) * NUM_HEADS + head
        part_m = tl.load(m_ptr + slot, mask=used, other=float("-inf"), cache_modifier=CACHE)
        part_denom = tl.load(denom_ptr + slot, mask=used, other=0.0, cache_modifier=CACHE)
        pointer = acc_ptr + slot[:, None] * HEAD_DIM + dim[None, :]
        part_acc = tl.load(pointer, mask=used[:, None], other=0.0, cache_modifier=CACHE)
        new_m = tl.maximum(m, tl.max(part_m, 0))
        weight = tl.exp2(part_m - new_m)  # [MERGED]
        repair = tl.exp2(m - new_m)
        denom = denom * repair + tl.sum(weight * part_denom, 0)
        acc = acc * repair + tl.sum(weight[:, None] * part_acc, 0)
        m = new_m
    return acc / denom


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_table_ptr", "query_start_ptr", "context_len_ptr"],
)
def _decode_and_merge_kernel(  # type: ignore[no-untyped-def]
    q_ptr, kv_ptr, out_ptr, m_ptr, denom_ptr, acc_ptr, arrived_ptr, block_table_ptr, query_start_ptr, context_len_ptr,
    piece_ptr, scale, q_stride, v_offset, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, LINES: tl.constexpr, PREFETCHED: tl.constexpr,
    MERGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `paged_decode._decode_kernel` up to where a partial result was written."""
    if PDL:
        gdc_launch_dependents()
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    kv_head = tl.program_id(0)
    piece = tl.program_id(1)
    pieces = tl.num_programs(1)
    tile = tl.load(piece_ptr + piece * 4)
    last = tl.load(piece_ptr + piece * 4 + 1)
    sequence = tl.load(piece_ptr + piece * 4 + 2)
    begin = tl.load(piece_ptr + piece * 4 + 3)
    total = tl.load(piece_ptr + pieces * 4 - 3)  # where the last piece ends

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    token_stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    context_len = tl.load(context_len_ptr + sequence, mask=tile < last, other=0)
    query_start = tl.load(query_start_ptr + sequence, mask=tile < last, other=0)
    query_end = tl.load(query_start_ptr + sequence + 1, mask=tile < last, other=0)
    if PDL:
        stop_key = tl.minimum(context_len, (tl.minimum(last, tile + PREFETCHED) - begin) * KEYS)
        ask_for_keys(
            kv_ptr, v_offset, block_table_ptr + sequence * table_stride, (tile - begin) * KEYS, stop_key, context_len,
            kv_head, HEAD_DIM, token_stride, BLOCK_SIZE, KEYS, LINES,
        )  # fmt: skip
        gdc_wait()
    while tile < last:
        query_len = query_end - query_start
        end = begin + tl.cdiv(context_len, KEYS)
        stop = tl.minimum(end, last)
        used = (row < QUERIES * GROUP) & (query < query_len)
        position = context_len - query_len + query
        token = (query_start + query).to(tl.int64)
        q = tl.load(q_ptr + (token * q_stride + head * HEAD_DIM)[:, None] + dim[None, :], mask=used[:, None], other=0.0)
        m, denom, acc = attend_keys(
            q, kv_ptr, v_offset, block_table_ptr + sequence * table_stride,
            (tile - begin) * KEYS, (stop - begin) * KEYS, context_len, kv_head, position, scale,
            ROWS, HEAD_DIM, token_stride, BLOCK_SIZE, KEYS,
        )  # fmt: skip

        if (tile == begin) & (stop == end):
            offset = (token * NUM_HEADS + head) * HEAD_DIM
            out = acc / denom[:, None]
            tl.store(out_ptr + offset[:, None] + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=used[:, None])
        else:
            slot = ((piece * 2 + (tile > begin).to(tl.int32)) * QUERIES + query) * NUM_HEADS + head
            tl.store(m_ptr + slot, m, mask=used)
            tl.store(denom_ptr + slot, denom, mask=used)
            tl.store(acc_ptr + slot[:, None] * HEAD_DIM + dim[None, :], acc, mask=used[:, None])
            # The pieces with the first and the last tile of the sequence. With fewer tiles than pieces there are empty
            # ones between them, which do not arrive.
            first_piece = ((begin + 1) * pieces - 1) // total
            last_piece = (end * pieces - 1) // total
            expected = tl.minimum(last_piece - first_piece + 1, end - begin)
            tl.debug_barrier()  # all threads have written, and what one of them then releases is the writes of all
            counter = arrived_ptr + first_piece * NUM_KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1:
                tl.store(counter, 0)
                for i in range(0, query_len * GROUP):
                    merged_head = kv_head * GROUP + i % GROUP
                    merged = merge_parts(
                        m_ptr, denom_ptr, acc_ptr, first_piece, last_piece, total, pieces, i // GROUP, merged_head,
                        NUM_HEADS, HEAD_DIM, QUERIES, MERGED, ".cg",
                    )  # fmt: skip
                    offset = ((query_start + i // GROUP).to(tl.int64) * NUM_HEADS + merged_head) * HEAD_DIM
                    tl.store(out_ptr + offset + dim, merged.to(out_ptr.dtype.element_ty))
        tile = stop
        begin = end
        sequence += 1
        context_len = tl.load(context_len_ptr + sequence, mask=tile < last, other=0)
        query_start = query_end
        query_end = tl.load(query_start_ptr + sequence + 1, mask=tile < last, other=0)


COUNTERS: dict[tuple[int, int, torch.device], Tensor] = {}  # [pieces, Hkv] int32, 0 between two calls


def decode_and_merge(
    q: Tensor, kv: Tensor, block_table: Tensor, query_start: Tensor, context_len: Tensor, scale: float, out: Tensor,
    workspace: DecodeWorkspace, plan: Tensor, config: DecodeConfig, overlap: bool = False,
) -> None:  # fmt: skip
    """Stands in for `paged_decode`."""
    _, _, block_size, num_kv_heads, head_dim = kv.shape
    num_heads = q.shape[1]
    pieces, _, queries, _ = workspace.m.shape
    group = num_heads // num_kv_heads
    early = overlap and overlaps_launches(q.device)
    key = pieces, num_kv_heads, q.device
    if key not in COUNTERS:
        COUNTERS[key] = torch.zeros(pieces, num_kv_heads, dtype=torch.int32, device=q.device)
    _decode_and_merge_kernel[(num_kv_heads, pieces)](
        q, kv, out, workspace.m, workspace.denom, workspace.acc, COUNTERS[key], block_table, query_start, context_len,
        plan, scale * LOG2_E, q.stride(0), kv.stride(0), block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, QUERIES=queries,
        ROWS=max(16, triton.next_power_of_2(queries * group)), KEYS=config.keys,
        LINES=max(1, head_dim * q.element_size() // CACHE_LINE), PREFETCHED=PREFETCHED_TILES, MERGED=MERGED_AT_ONCE,
        PDL=early, num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=early,
    )  # fmt: skip


@contextmanager
def merge_inside(_: list[Tensor]) -> Iterator[None]:
    triton_backend.paged_decode = decode_and_merge
    try:
        with plain_decode():
            yield
    finally:
        triton_backend.paged_decode = paged_decode
