"""Prefill attention over the paged KV cache: chunks of many queries, of several sequences, laid end to end.

Here arithmetic is the limit, not memory: a tile of R rows does 4 * R * D operations for the 4 * D bytes of a key and
its value in 16 bits, so R operations per byte. Rows are pairs (query, query head of the KV head): with two query heads
per KV head, 32 queries make 64 rows. Between the two products of a tile lies the softmax, in which the tensor cores
have nothing to do. So programs are small, and several share a multiprocessor: one multiplies while another does that.

A program finds its sequence and its queries from the lengths alone. So the host need not know how many tiles there are:
the grid is an upper bound, and superfluous programs return. Keys beyond the tile's last query are never touched, and
only the last tiles of keys, where the causal border runs, pay for masks. The long tiles of a sequence are its last
ones. They come first, so that the GPU ends on short ones. In a layer with a sliding window, keys before the window of
the tile's first query are not touched either, and the tiles where windows begin are masked, too. Behind a long context
the keys of a tile of queries may be cut into pieces, each for a program of its own (`prefill_pieces.py`).

A tile of keys can be fetched in two ways. By pointers: every thread computes the addresses of what it fetches and keeps
them in registers. By TMA, the copy engine of GPUs since Hopper: where a block holds whole tiles, the keys of a head
are a box [KEYS, D] of the matrix [slots, Hkv * D], and one instruction of one thread fetches the box. Without
addresses, two programs of 128 rows fit into the registers of a multiprocessor, and each key that is read serves twice
the rows. The masked tiles come by pointers in any case: a box cannot leave out what lies beyond the context.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.attention.paged_tile import (
    LOG2_E,
    PagedInputs,
    as_computed,
    attend_tile,
    keys_per_tile,
    locate,
    padded_sequences,
    token_offsets,
)
from nanovllm.kernels.attention.prefill_pieces import (
    MOST_SEQUENCES,
    PrefillWorkspace,
    cut_tiles,
    merge_tiles,
    of_sequence,
)
from nanovllm.kernels.cards import choose
from nanovllm.kernels.launch import overlaps_launches


@dataclass(frozen=True)
class PrefillConfig:
    """The layout of the kernel: rows and keys of a tile, warps of a program, tiles of keys in flight; whether tiles
    come by TMA; and the most registers of a thread, None for the compiler's choice."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    tma: bool = False
    max_registers: int | None = None


@cache
def prefill_config(device: torch.device, head_dim: int, element_size: int, block_size: int) -> PrefillConfig:
    """The layout for a device, by the table of cards. Where `device` is no GPU: for Triton's interpreter.

    At a head_dim of 128 in 16 bits and by pointers a program takes 80 KiB of shared memory: 16 for its queries, and 16
    each for K and V twice (while one tile is computed with, the next is on its way). So two programs fit on a
    multiprocessor of a Hopper GPU, and one on any GPU since Ampere. By TMA a program takes 96 KiB, for twice the rows,
    and two fit as well. On an H200 TMA was faster than pointers, and either was faster than one program with tiles of
    128 x 128 (`benchmarks/results/kernels.h200.json`). GPUs after Hopper have TMA too, but other tensor cores.

    The layouts of other cards are such that no thread spills registers.
    """
    found = choose(device, "prefill", head_dim=head_dim, itemsize=element_size, block_size=block_size)
    return prefill_layout(found, head_dim, element_size)


def prefill_layout(gives: dict[str, Any], head_dim: int, element_size: int) -> PrefillConfig:
    """What a row of the table gives."""
    keys = keys_per_tile(head_dim, element_size, 1024 * gives["tile_kib"])
    return PrefillConfig(keys=keys, **{name: value for name, value in gives.items() if name != "tile_kib"})


@triton.jit
def _masked_tiles(  # type: ignore[no-untyped-def]
    q, head_ptr, v_offset, table_ptr, first, stop, context_len, position, oldest, scale, m, denom, acc,
    TOKEN_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The tiles of keys from `first` to `stop`, which not every query of the tile sees whole."""
    for start in range(first, stop, KEYS):
        key = start + tl.arange(0, KEYS)
        pointer = head_ptr + token_offsets(table_ptr, start, context_len, TOKEN_STRIDE, BLOCK_SIZE, KEYS)[:, None]
        in_context = (key < context_len)[:, None]  # beyond it lies anything: a NaN in V would survive p = 0
        if WINDOW:  # before it, too: blocks that no window reaches any more may be another sequence's
            in_context &= (key > oldest - WINDOW)[:, None]
        k = tl.load(pointer, mask=in_context, other=0.0)
        v = tl.load(pointer + v_offset, mask=in_context, other=0.0)
        visible = key[None, :] <= position[:, None]
        if WINDOW:
            visible &= key[None, :] > position[:, None] - WINDOW
        m, denom, acc = attend_tile(q, k, v, visible, scale, m, denom, acc, True)
    return m, denom, acc


@triton.jit(
    do_not_specialize=["first_sequence", "num_sequences", "table_stride", "programs", "fewest_tiles"],
    do_not_specialize_on_alignment=["block_table_ptr", "query_start_ptr", "context_len_ptr"],
)
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q_ptr, kv_ptr, kv_boxes, out_ptr, block_table_ptr, query_start_ptr, context_len_ptr,
    first_sequence, num_sequences, scale, v_scale, q_stride, v_offset, table_stride, m_ptr, denom_ptr, acc_ptr,
    programs, fewest_tiles,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SEQUENCES: tl.constexpr,
    TMA: tl.constexpr, WINDOW: tl.constexpr, CUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    index = tl.arange(0, SEQUENCES)
    if CUT:
        tiles, pieces = cut_tiles(
            query_start_ptr, context_len_ptr, first_sequence, num_sequences, programs, fewest_tiles, index, QUERIES,
            KEYS, WINDOW,
        )  # fmt: skip
        units = tiles * pieces
    else:
        lengths_ptr = query_start_ptr + first_sequence + index
        exists = index < num_sequences
        lengths = tl.load(lengths_ptr + 1, mask=exists, other=0) - tl.load(lengths_ptr, mask=exists, other=0)
        units = tl.cdiv(lengths, QUERIES)
    unit = tl.sum(units) - 1 - tl.program_id(1)
    if unit < 0:
        return
    sequence, begin = locate(unit, units, index)
    tile = unit - begin  # of the sequence
    if CUT:
        num_pieces, _ = of_sequence(sequence, pieces, index)
        _, slots_before = of_sequence(sequence, tl.where(pieces > 1, units, 0), index)
        result = kv_head * programs + slots_before + tile  # where the workspace has that of this piece
        piece = tile % num_pieces
        tile = tile // num_pieces
    sequence += first_sequence
    first_query = tile * QUERIES
    query_start = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - query_start
    context_len = tl.load(context_len_ptr + sequence)
    before = context_len - query_len + first_query  # keys that precede the tile's first query

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    used = ((row < QUERIES * GROUP) & (query < query_len))[:, None]
    position = before + row // GROUP
    token = (query_start + query).to(tl.int64)
    q = tl.load(q_ptr + (token * q_stride + head * HEAD_DIM)[:, None] + dim[None, :], mask=used, other=0.0)  # [ROWS, D]
    q = as_computed(q, kv_ptr)

    m = tl.full([ROWS], -1e30, tl.float32)
    denom = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    token_stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    table_ptr = block_table_ptr + sequence * table_stride
    head_ptr = kv_ptr + kv_head * HEAD_DIM + dim[None, :]
    all_see = (before + 1) // KEYS * KEYS  # every query of the tile sees these keys: no masks
    v_slot = (v_offset // token_stride).to(tl.int32)  # where V begins in the matrix that boxes are of
    begins = 0
    stop = tl.minimum(context_len, before + QUERIES)
    first = 0
    if WINDOW:
        # The window of the first query begins in the tile `begins`, that of the last one in the tile before `first`.
        begins = tl.maximum(before + 1 - WINDOW, 0) // KEYS * KEYS
        first = tl.minimum(tl.cdiv(tl.maximum(before + QUERIES - WINDOW, 0), KEYS) * KEYS, all_see)
    last = all_see
    if CUT:  # to the tiles of this piece
        length = tl.cdiv(tl.cdiv(stop - begins, KEYS), num_pieces) * KEYS
        begins += piece * length
        stop = tl.minimum(stop, begins + length)
        last = tl.minimum(last, stop)
        if WINDOW:
            first = tl.minimum(first, stop)
    if WINDOW:
        m, denom, acc = _masked_tiles(
            q, head_ptr, v_offset, table_ptr, begins, first, context_len, position, before, scale, m, denom, acc,
            token_stride, BLOCK_SIZE, KEYS, WINDOW,
        )  # fmt: skip
    for start in range(tl.maximum(begins, first), last, KEYS):
        if TMA:
            slot = tl.load(table_ptr + start // BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE
            k = kv_boxes.load([slot, kv_head * HEAD_DIM])  # [KEYS, D]
            v = kv_boxes.load([slot + v_slot, kv_head * HEAD_DIM])  # [KEYS, D]
        else:
            pointer = head_ptr + token_offsets(table_ptr, start, context_len, token_stride, BLOCK_SIZE, KEYS)[:, None]
            k = tl.load(pointer)
            v = tl.load(pointer + v_offset)
        m, denom, acc = attend_tile(q, k, v, None, scale, m, denom, acc, False)
    m, denom, acc = _masked_tiles(
        q, head_ptr, v_offset, table_ptr, tl.maximum(begins, all_see), stop, context_len, position, before, scale, m,
        denom, acc, token_stride, BLOCK_SIZE, KEYS, WINDOW,
    )  # fmt: skip

    if v_scale is not None:
        acc *= v_scale
    if CUT:  # noqa: SIM102 - Triton looks at both sides of an `and`
        if num_pieces > 1:
            place = result * ROWS + row
            tl.store(m_ptr + place, m)
            tl.store(denom_ptr + place, denom)
            tl.store(acc_ptr + place[:, None] * HEAD_DIM + dim[None, :], acc)
            return
    offset = (token * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    out = (acc / denom[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offset[:, None] + dim[None, :], out, mask=used)


def paged_prefill(
    inputs: PagedInputs,
    config: PrefillConfig,
    workspace: PrefillWorkspace | None = None,
    *,
    first_sequence: int = 0,
    window: int = 0,
) -> None:
    """Causal attention of the sequences from `first_sequence` on, any number of queries each, into `inputs.out`.

    config: of `prefill_config`. workspace: if it is given, long contexts are cut. It has as many rows as `config`, and
    there may be `MOST_SEQUENCES` sequences at most. first_sequence: sequences before it have one query each, and their
    tokens come first. window: keys that a query sees at most, its own included; 0 is no limit.
    Raises ValueError if tiles come by TMA and a block is smaller than one, or if there are too many sequences to cut.
    """
    q, kv, block_table, query_start, context_len, scale, out, v_scale = inputs
    _, _, block_size, num_kv_heads, head_dim = kv.shape
    group = q.shape[1] // num_kv_heads
    queries = config.rows // group
    num_sequences = context_len.shape[0] - first_sequence
    boxes = None
    if config.tma:
        if block_size < config.keys:
            raise ValueError(f"a box of {config.keys} keys does not lie in one block of {block_size}")
        # Made for every call: the launch encodes it each time anyway, and one that is kept would keep the cache alive.
        boxes = TensorDescriptor.from_tensor(kv.view(-1, num_kv_heads * head_dim), [config.keys, head_dim])
    # Each sequence fills its tiles but for the last one.
    most_units = (q.shape[0] - first_sequence) // queries + num_sequences
    m = denom = acc = None
    programs = fewest_tiles = 0
    if workspace is not None:
        if num_sequences > MOST_SEQUENCES:
            raise ValueError(f"contexts of at most {MOST_SEQUENCES} sequences can be cut; got {num_sequences}")
        m, denom, acc, programs = workspace.m, workspace.denom, workspace.acc, workspace.m.shape[1]
        most_units, fewest_tiles = most_units + programs, workspace.fewest_keys // config.keys
    _prefill_kernel[(num_kv_heads, most_units)](
        q, kv, boxes, out, block_table, query_start, context_len,
        first_sequence, num_sequences, scale * LOG2_E, v_scale, q.stride(0), kv.stride(0), block_table.stride(0),
        m, denom, acc, programs, fewest_tiles,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        QUERIES=queries, ROWS=config.rows, KEYS=config.keys,
        SEQUENCES=padded_sequences(num_sequences) if workspace is None else MOST_SEQUENCES,
        TMA=config.tma, WINDOW=window, CUT=workspace is not None,
        PDL=workspace is not None and overlaps_launches(q.device), num_warps=config.num_warps,
        num_stages=config.num_stages, maxnreg=config.max_registers,
    )  # fmt: skip
    if workspace is not None:
        merge_tiles(inputs, workspace, config.keys, queries, first_sequence, window)
