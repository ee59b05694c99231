"""Decode attention over the paged KV cache: one or a few queries per sequence, each against its whole context.

There is little to compute here, and much memory to read: for every key 2 * D elements of K and V, with a handful of
multiply-adds each. So the kernel is built for one thing, to keep every multiprocessor reading until the last byte.

*Equal shares.* Contexts differ by a factor of ten or more within a batch, and with one program per sequence the GPU
would wait for the longest. Instead the key tiles of all sequences are laid end to end, and that line is cut into equal
pieces, as many as programs fit on the GPU at once (stream-K, Osama et al. 2023; lean attention, Sanovar et al. 2024).
A piece may begin and end in mid-sequence. For a sequence that lies within one piece the answer is final. For others
each piece leaves a partial result (m, denom, acc), and a second, small kernel merges these, as flash-decoding does. The
grid depends on nothing but the GPU and the number of KV heads. So it can be captured in a CUDA graph and serve every
context length. Where the pieces begin is worked out once per step (`plan_decode`), not by each program of each layer.

*Neighbours read neighbours.* In the cache the heads of a token lie side by side, and the programs of one piece, one for
each KV head, are adjacent in the grid. They walk the same tokens at the same pace.

*Grouped queries.* The query heads that share a KV head are rows of one tile, padded to the 16 rows that tl.dot needs.
A key is read once for all of them. The few queries of a sequence that verifies guesses are rows of that tile too.

*Windows.* In a layer with a sliding window the line has only the tiles in which some query may still see a key. The
window is a constant of the compiled kernel. A kernel without a window has none of this in its code.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.attention.paged_tile import (
    LOG2_E,
    PagedInputs,
    as_computed,
    ask_for_keys,
    attend_keys,
    keys_per_tile,
    locate,
    padded_sequences,
    tiles_before,
)
from nanovllm.kernels.cards import choose
from nanovllm.kernels.launch import CACHE_LINE, capability, overlaps_launches, shared_memory_of_sm

MAX_ROWS = 16  # queries of a sequence times query heads of a KV head; with more of them the prefill kernel is better
FEW_SEQUENCES = 16  # fewer sequences are cut into many parts each
MANY_PARTS, FEW_PARTS = 16, 4  # parts that are merged at once
PREFETCHED_TILES = 2  # of each program: 25 MB on an H100, half of its L2 cache


@dataclass(frozen=True)
class DecodeConfig:
    """The layout of the kernel: keys of a tile, warps of a program, tiles in flight, programs per multiprocessor."""

    keys: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


@cache
def decode_config(device: torch.device, head_dim: int, element_size: int) -> DecodeConfig:
    """The layout for a device, by the table of cards. Where `device` is no GPU: for Triton's interpreter.

    In general tiles are of 16 KiB, K and V: 64 keys at a head_dim of 128 in 16 bits. By Little's law an H100 must have
    3.1 TB/s * 0.8 microseconds = 2.5 MB on its way to stay busy, 19 KB for each of its 132 multiprocessors. Three
    programs, each with a tile of K and one of V on their way, cover that even while two of them compute. There are no
    registers for a fourth. Measured alone, some other layouts are as fast on an H200
    (`benchmarks/results/kernels.h200.json`). Those that were tried in a recorded step were slower (docs/kernels.md).
    """
    found = choose(device, "decode", head_dim=head_dim, itemsize=element_size)
    return decode_layout(found, device, head_dim, element_size)


def decode_layout(gives: dict[str, int], device: torch.device, head_dim: int, element_size: int) -> DecodeConfig:
    """What a row of the table gives. All programs should run at once: where shared memory is short, there are fewer."""
    keys = keys_per_tile(head_dim, element_size, 1024 * gives["tile_kib"])
    before_ampere = (capability(device) or (8, 0)) < (8, 0)
    rows = 2 * keys + MAX_ROWS * (2 if before_ampere else 1)  # of K and V, of Q, and before Ampere of the result, too
    program = rows * head_dim * element_size + 4 * 1024  # what is small, and the system's share
    programs = max(1, min(gives["programs_per_sm"], shared_memory_of_sm(device) // program))
    return DecodeConfig(keys, gives["num_warps"], gives["num_stages"], programs)


@triton.jit(do_not_specialize=["num_sequences", "pieces"], do_not_specialize_on_alignment=["context_len_ptr"])
def _plan_kernel(  # type: ignore[no-untyped-def]
    context_len_ptr, piece_ptr, num_sequences, pieces,
    KEYS: tl.constexpr, SEQUENCES: tl.constexpr, QUERIES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    index = tl.arange(0, SEQUENCES)
    context_len = tl.load(context_len_ptr + index, mask=index < num_sequences, other=0)
    tiles = tl.cdiv(context_len, KEYS) - tiles_before(context_len, KEYS, QUERIES, WINDOW)
    total = tl.sum(tiles)
    tile = piece * total // pieces
    sequence, begin = locate(tile, tiles, index)
    tl.store(piece_ptr + piece * 4, tile)
    tl.store(piece_ptr + piece * 4 + 1, (piece + 1) * total // pieces)
    tl.store(piece_ptr + piece * 4 + 2, sequence)
    tl.store(piece_ptr + piece * 4 + 3, begin)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_table_ptr", "query_start_ptr", "context_len_ptr"],
)
def _decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr, kv_ptr, out_ptr, m_ptr, denom_ptr, acc_ptr, block_table_ptr, query_start_ptr, context_len_ptr, piece_ptr,
    scale, v_scale, q_stride, v_offset, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, LINES: tl.constexpr, PREFETCHED: tl.constexpr,
    WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    piece = tl.program_id(1)
    tile = tl.load(piece_ptr + piece * 4)
    last = tl.load(piece_ptr + piece * 4 + 1)
    sequence = tl.load(piece_ptr + piece * 4 + 2)
    begin = tl.load(piece_ptr + piece * 4 + 3)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    token_stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    context_len = tl.load(context_len_ptr + sequence, mask=tile < last, other=0)
    query_start = tl.load(query_start_ptr + sequence, mask=tile < last, other=0)
    query_end = tl.load(query_start_ptr + sequence + 1, mask=tile < last, other=0)
    if PDL:
        # Keys of earlier steps can be asked for before this layer has written the step's own keys. Plan, lengths and
        # tables may be read: they are older than the last kernel that was launched without overlap.
        start = begin - tiles_before(context_len, KEYS, QUERIES, WINDOW)
        stop_key = tl.minimum(context_len, (tl.minimum(last, tile + PREFETCHED) - start) * KEYS)
        ask_for_keys(
            kv_ptr, v_offset, block_table_ptr + sequence * table_stride, (tile - start) * KEYS, stop_key, context_len,
            kv_head, HEAD_DIM, token_stride, BLOCK_SIZE, KEYS, LINES,
        )  # fmt: skip
        gdc_wait()
    while tile < last:
        query_len = query_end - query_start
        start = begin - tiles_before(context_len, KEYS, QUERIES, WINDOW)  # where the tile of key 0 would be
        end = start + tl.cdiv(context_len, KEYS)
        stop = tl.minimum(end, last)
        used = (row < QUERIES * GROUP) & (query < query_len)
        position = context_len - query_len + query  # query i sees the keys up to its own position
        token = (query_start + query).to(tl.int64)
        q = tl.load(q_ptr + (token * q_stride + head * HEAD_DIM)[:, None] + dim[None, :], mask=used[:, None], other=0.0)
        m, denom, acc = attend_keys(
            as_computed(q, kv_ptr), kv_ptr, v_offset, block_table_ptr + sequence * table_stride,
            (tile - start) * KEYS, (stop - start) * KEYS, context_len, kv_head, position, context_len - query_len,
            scale, ROWS, HEAD_DIM, token_stride, BLOCK_SIZE, KEYS, WINDOW,
        )  # fmt: skip
        if v_scale is not None:
            acc *= v_scale

        if (tile == begin) & (stop == end):
            offset = (token * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
            out = acc / denom[:, None]
            tl.store(out_ptr + offset[:, None] + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=used[:, None])
        else:
            # A piece can leave two partial results: slot 1 for a sequence that an earlier piece began, else slot 0.
            slot = ((piece * 2 + (tile > begin).to(tl.int32)) * QUERIES + query) * (NUM_KV_HEADS * GROUP) + head
            tl.store(m_ptr + slot, m, mask=used)
            tl.store(denom_ptr + slot, denom, mask=used)
            tl.store(acc_ptr + slot[:, None] * HEAD_DIM + dim[None, :], acc, mask=used[:, None])
        tile = stop
        begin = end
        sequence += 1
        context_len = tl.load(context_len_ptr + sequence, mask=tile < last, other=0)
        query_start = query_end
        query_end = tl.load(query_start_ptr + sequence + 1, mask=tile < last, other=0)


@triton.jit
def _piece_of(part, first, begin, total, pieces):  # type: ignore[no-untyped-def]
    """The piece that left a part of a sequence. The pieces of a sequence follow each other. But with fewer tiles than
    pieces some pieces are empty and have left nothing; then every tile is a part."""
    return ((begin + part + 1) * pieces - 1) // total if total < pieces else first + part


@triton.jit
def _merge_parts(m_ptr, denom_ptr, acc_ptr, slot, used, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """m, denom and acc [D] of the parts in `slot` [PARTS], as far as `used` [PARTS] says; the first part always is."""
    part_m = tl.load(m_ptr + slot, mask=used, other=float("-inf"))
    part_denom = tl.load(denom_ptr + slot, mask=used, other=0.0)
    pointer = acc_ptr + slot[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    part_acc = tl.load(pointer, mask=used[:, None], other=0.0)  # [PARTS, D]
    m = tl.max(part_m, 0)
    weight = tl.exp2(part_m - m)  # [PARTS]
    return m, tl.sum(weight * part_denom, 0), tl.sum(weight[:, None] * part_acc, 0)


@triton.jit(do_not_specialize=["pieces"], do_not_specialize_on_alignment=["query_start_ptr", "context_len_ptr"])
def _merge_kernel(  # type: ignore[no-untyped-def]
    out_ptr, m_ptr, denom_ptr, acc_ptr, query_start_ptr, context_len_ptr, piece_ptr, pieces,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
    WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for each border between pieces, query and head: it merges the sequence that is first cut there.

    The whole layer waits for this kernel. So it works out where the parts lie before it waits for its predecessor.
    """
    head = tl.program_id(0)
    first = tl.program_id(1) // QUERIES
    query = tl.program_id(1) % QUERIES
    if PDL:
        gdc_launch_dependents()
    first_tile = tl.load(piece_ptr + first * 4)
    border = tl.load(piece_ptr + first * 4 + 4)
    sequence = tl.load(piece_ptr + first * 4 + 6)
    begin = tl.load(piece_ptr + first * 4 + 7)
    total = tl.load(piece_ptr + pieces * 4 - 3)  # where the last piece ends
    crossed = (first_tile <= begin) & (begin < border)
    context_len = tl.load(context_len_ptr + sequence, mask=crossed, other=1)
    tiles = tl.cdiv(context_len, KEYS) - tiles_before(context_len, KEYS, QUERIES, WINDOW)
    query_start = tl.load(query_start_ptr + sequence, mask=crossed, other=0)
    query_len = tl.load(query_start_ptr + sequence + 1, mask=crossed, other=0) - query_start
    last = ((begin + tiles) * pieces - 1) // total  # the last piece that begins before its end
    parts = tl.minimum(last - first + 1, tiles)
    part = tl.arange(0, PARTS)
    piece = _piece_of(part, first, begin, total, pieces)
    slot = ((piece * 2 + (part > 0).to(tl.int32)) * QUERIES + query) * NUM_HEADS + head
    if PDL:
        gdc_wait()
    if query >= query_len:
        return  # no such query, or no sequence that has its first border here

    m, denom, acc = _merge_parts(m_ptr, denom_ptr, acc_ptr, slot, part < parts, HEAD_DIM)
    for start in range(PARTS, parts, PARTS):
        later = start + part
        piece = _piece_of(later, first, begin, total, pieces)
        slot = ((piece * 2 + 1) * QUERIES + query) * NUM_HEADS + head
        later_m, later_denom, later_acc = _merge_parts(m_ptr, denom_ptr, acc_ptr, slot, later < parts, HEAD_DIM)
        new_m = tl.maximum(m, later_m)
        repair = tl.exp2(m - new_m)
        weight = tl.exp2(later_m - new_m)
        denom = denom * repair + later_denom * weight
        acc = acc * repair + later_acc * weight
        m = new_m
    offset = ((query_start + query).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(out_ptr + offset + tl.arange(0, HEAD_DIM), (acc / denom).to(out_ptr.dtype.element_ty))


@dataclass(frozen=True)
class DecodeWorkspace:
    """Partial results between the two kernels, two slots per piece. All layers use the same, since they run in turn."""

    m: Tensor  # [pieces, 2, QUERIES, Hq] float32
    denom: Tensor  # [pieces, 2, QUERIES, Hq] float32
    acc: Tensor  # [pieces, 2, QUERIES, Hq, D] float32

    @classmethod
    def allocate(
        cls, pieces: int, queries: int, num_heads: int, head_dim: int, device: torch.device
    ) -> "DecodeWorkspace":
        shape = pieces, 2, queries, num_heads
        return cls(*(torch.empty(s, dtype=torch.float32, device=device) for s in (shape, shape, (*shape, head_dim))))


def plan_decode(
    context_len: Tensor, pieces: int, config: DecodeConfig, max_queries: int = 1, window: int = 0
) -> Tensor:
    """Cut the key tiles of S sequences into equal pieces; context_len [S] int32, at least 1 each.

    window: keys that a query sees at most, its own included; 0 is no limit. Tiles before the window of a sequence's
    oldest query are left out. The sequence is taken to have `max_queries` queries, so that none is left out too many.

    Returns [pieces, 4] int32. When the tiles of all sequences are laid end to end, a piece has those from its first
    number up to its second. The third number is the sequence that the piece begins in, the fourth is that sequence's
    first tile.
    """
    num_sequences = context_len.shape[0]
    plan = context_len.new_empty(pieces, 4)
    _plan_kernel[(pieces,)](
        context_len, plan, num_sequences, pieces,
        KEYS=config.keys, SEQUENCES=padded_sequences(num_sequences), QUERIES=max_queries if window else 1,
        WINDOW=window,
    )  # fmt: skip
    return plan


def paged_decode(
    inputs: PagedInputs,
    workspace: DecodeWorkspace,
    plan: Tensor,
    config: DecodeConfig,
    overlap: bool = False,
    window: int = 0,
) -> None:
    """Causal attention of sequences with few queries each; writes their rows of `inputs.out`.

    Args:
        inputs: no sequence has more queries than the workspace has room for.
        workspace: its `pieces` is the number of programs for each KV head.
        plan: `plan_decode` of these contexts, for as many pieces, the workspace's number of queries and this window.
        config: of `decode_config`.
        overlap: the decode kernel may start while its predecessor runs. Then plan, lengths and tables must be older
            than the last kernel that was launched without overlap.
        window: keys that a query sees at most, its own included; 0 is no limit.
    """
    q, kv, block_table, query_start, context_len, scale, out, v_scale = inputs
    _, _, block_size, num_kv_heads, head_dim = kv.shape
    num_heads = q.shape[1]
    pieces, _, queries, _ = workspace.m.shape
    group = num_heads // num_kv_heads
    early = overlap and overlaps_launches(q.device)
    _decode_kernel[(num_kv_heads, pieces)](
        q, kv, out, workspace.m, workspace.denom, workspace.acc, block_table, query_start, context_len,
        plan, scale * LOG2_E, v_scale, q.stride(0), kv.stride(0), block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, QUERIES=queries,
        ROWS=max(16, triton.next_power_of_2(queries * group)), KEYS=config.keys,
        LINES=max(1, head_dim * kv.element_size() // CACHE_LINE), PREFETCHED=PREFETCHED_TILES, WINDOW=window,
        PDL=early, num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=early,
    )  # fmt: skip
    merge_pieces(inputs, workspace, plan, config.keys, window)


def merge_pieces(inputs: PagedInputs, workspace: DecodeWorkspace, plan: Tensor, keys: int, window: int = 0) -> None:
    """Write the rows of `inputs.out` of sequences that were cut. keys: per tile of the plan."""
    pieces, _, queries, num_heads = workspace.m.shape
    pdl = overlaps_launches(inputs.out.device)
    if pieces > 1:
        _merge_kernel[(num_heads, (pieces - 1) * queries)](
            inputs.out, workspace.m, workspace.denom, workspace.acc, inputs.query_start, inputs.context_len,
            plan, pieces,
            NUM_HEADS=num_heads, HEAD_DIM=inputs.out.shape[2], QUERIES=queries, KEYS=keys,
            PARTS=MANY_PARTS if inputs.context_len.shape[0] < FEW_SEQUENCES else FEW_PARTS, WINDOW=window, PDL=pdl,
            num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
