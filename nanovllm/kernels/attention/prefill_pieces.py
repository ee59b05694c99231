"""Long contexts of few queries: the keys of a tile of queries are cut into pieces, one for each of several programs.

The next turn of a conversation has a handful of new tokens behind thousands of cached ones. Its queries fill a tile or
two for each KV head, and a program for each tile would leave most of the GPU idle. So in a step with few tokens behind
a long context, `paged_prefill` shares the tiles of keys out as `paged_decode` does: a program computes a piece, and
leaves a partial result (m, denom, acc). A second, small kernel merges the results of each tile of queries, in the order
of the keys.

How many pieces a tile has follows from the lengths, which are known on the device alone. The fair share of a program is
the work of the step divided by the programs that run at once. A tile with the work of several shares is cut into that
many pieces. So there are never more pieces than programs that run at once, and the grid and the memory for partial
results depend on the GPU and the model only. Tiles with less work than two shares are not cut. In a step where no tile
is cut, the second kernel has nothing to do.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.attention.paged_tile import PagedInputs, locate
from nanovllm.kernels.launch import overlaps_launches

MOST_SEQUENCES = 64  # as many as have a place in the smaller recordings of `graphs/sizes.py`
FEWEST_KEYS = 512  # of a piece: with fewer, to write and merge the result costs as much as to read the keys
PROGRAMS_PER_SM = 2  # that run at once
MERGED_ROWS, MERGED_PIECES = 4, 8  # that a program of the second kernel merges at once


@dataclass(frozen=True)
class PrefillWorkspace:
    """Partial results between the two kernels, for P pieces of each KV head. All layers use the same."""

    m: Tensor  # [Hkv, P, ROWS] float32
    denom: Tensor  # [Hkv, P, ROWS] float32
    acc: Tensor  # [Hkv, P, ROWS, D] float32
    fewest_keys: int  # of a piece

    @classmethod
    def allocate(
        cls, num_sms: int, num_kv_heads: int, rows: int, head_dim: int, device: torch.device
    ) -> "PrefillWorkspace":
        shape = num_kv_heads, max(1, num_sms * PROGRAMS_PER_SM // num_kv_heads), rows
        m, denom, acc = (torch.empty(s, dtype=torch.float32, device=device) for s in (shape, shape, (*shape, head_dim)))
        return cls(m, denom, acc, FEWEST_KEYS)


@triton.jit
def cut_tiles(  # type: ignore[no-untyped-def]
    query_start_ptr, context_len_ptr, first_sequence, num_sequences, programs, fewest_tiles, index,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Of the sequences `first_sequence` + `index` [SEQUENCES]: how many tiles of queries each has, 0 beyond the last
    sequence; and into how many pieces each of these tiles is cut. The tiles that are cut have at most `programs` pieces
    in all."""
    exists = index < num_sequences
    start_ptr = query_start_ptr + first_sequence + index
    lengths = tl.load(start_ptr + 1, mask=exists, other=0) - tl.load(start_ptr, mask=exists, other=0)
    keys = tl.load(context_len_ptr + first_sequence + index, mask=exists, other=0)
    if WINDOW:
        keys = tl.minimum(keys, WINDOW + QUERIES)
    tiles = tl.cdiv(lengths, QUERIES)
    work = tl.cdiv(keys, KEYS)  # tiles of keys of one tile of queries; of the first ones of a long chunk, less
    share = tl.maximum(tl.cdiv(tl.sum(tiles * work), programs), fewest_tiles)
    return tiles, tl.maximum(work // share, 1)


@triton.jit
def of_sequence(sequence, values, index):  # type: ignore[no-untyped-def]
    """values [SEQUENCES] at `sequence`, and the sum of those before it."""
    return tl.sum(tl.where(index == sequence, values, 0)), tl.sum(tl.where(index < sequence, values, 0))


@triton.jit(
    do_not_specialize=["first_sequence", "num_sequences", "programs", "fewest_tiles"],
    do_not_specialize_on_alignment=["query_start_ptr", "context_len_ptr"],
)
def _merge_tiles_kernel(  # type: ignore[no-untyped-def]
    out_ptr, m_ptr, denom_ptr, acc_ptr, query_start_ptr, context_len_ptr, first_sequence, num_sequences, programs,
    fewest_tiles,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SEQUENCES: tl.constexpr,
    WINDOW: tl.constexpr, MERGED: tl.constexpr, PIECES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for MERGED rows of a tile of queries that was cut. It looks up its tile before it waits."""
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0) // (ROWS // MERGED)
    row = tl.program_id(0) % (ROWS // MERGED) * MERGED + tl.arange(0, MERGED)
    tile = tl.program_id(1)
    index = tl.arange(0, SEQUENCES)
    tiles, pieces = cut_tiles(
        query_start_ptr, context_len_ptr, first_sequence, num_sequences, programs, fewest_tiles, index, QUERIES, KEYS,
        WINDOW,
    )  # fmt: skip
    cut = tl.where(pieces > 1, tiles, 0)
    exists = tile < tl.sum(cut)
    sequence, begin = locate(tile, cut, index)
    num_pieces, _ = of_sequence(sequence, pieces, index)
    _, slots_before = of_sequence(sequence, cut * pieces, index)
    first_slot = kv_head * programs + slots_before + (tile - begin) * num_pieces
    start_ptr = query_start_ptr + first_sequence + sequence
    query_start = tl.load(start_ptr, mask=exists, other=0)
    query_len = tl.load(start_ptr + 1, mask=exists, other=0) - query_start
    query = (tile - begin) * QUERIES + row // GROUP
    used = (row < QUERIES * GROUP) & (query < query_len)
    if PDL:
        gdc_wait()
    if tl.sum(used.to(tl.int32)) == 0:
        return

    dim = tl.arange(0, HEAD_DIM)
    m = tl.full([MERGED], -1e30, tl.float32)
    denom = tl.zeros([MERGED], tl.float32)
    acc = tl.zeros([MERGED, HEAD_DIM], tl.float32)
    for start in range(0, num_pieces, PIECES):
        piece = start + tl.arange(0, PIECES)
        place = (first_slot + piece)[:, None] * ROWS + row[None, :]  # [PIECES, MERGED]
        mask = (piece < num_pieces)[:, None]
        piece_m = tl.load(m_ptr + place, mask=mask, other=float("-inf"))
        piece_denom = tl.load(denom_ptr + place, mask=mask, other=0.0)
        pointer = acc_ptr + place[:, :, None] * HEAD_DIM + dim[None, None, :]
        piece_acc = tl.load(pointer, mask=mask[:, :, None], other=0.0)  # [PIECES, MERGED, D]
        new_m = tl.maximum(m, tl.max(piece_m, 0))
        weight = tl.exp2(piece_m - new_m[None, :])
        repair = tl.exp2(m - new_m)
        denom = denom * repair + tl.sum(weight * piece_denom, 0)
        acc = acc * repair[:, None] + tl.sum(weight[:, :, None] * piece_acc, 0)
        m = new_m
    offset = ((query_start + query).to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP) * HEAD_DIM
    out = (acc / denom[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offset[:, None] + dim[None, :], out, mask=used[:, None])


def merge_tiles(
    inputs: PagedInputs, workspace: PrefillWorkspace, keys: int, queries: int, first_sequence: int, window: int
) -> None:
    """Write the rows of `inputs.out` of tiles that were cut. keys, queries: of a tile."""
    q, query_start, context_len, out = inputs.q, inputs.query_start, inputs.context_len, inputs.out
    num_kv_heads, programs, rows, head_dim = workspace.acc.shape
    num_sequences = context_len.shape[0] - first_sequence
    # A tile that is cut has two pieces at least.
    most_tiles = min(programs // 2, (q.shape[0] - first_sequence) // queries + num_sequences)
    if most_tiles:
        pdl = overlaps_launches(q.device)
        _merge_tiles_kernel[(num_kv_heads * (rows // MERGED_ROWS), most_tiles)](
            out, workspace.m, workspace.denom, workspace.acc, query_start, context_len, first_sequence, num_sequences,
            programs, workspace.fewest_keys // keys,
            NUM_KV_HEADS=num_kv_heads, GROUP=q.shape[1] // num_kv_heads, HEAD_DIM=head_dim, QUERIES=queries, ROWS=rows,
            KEYS=keys, SEQUENCES=MOST_SEQUENCES, WINDOW=window,
            MERGED=MERGED_ROWS, PIECES=MERGED_PIECES, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
