"""Optional reading beside stage 3: attention that reads K and V where they lie, block by block.

Stage 3 gathers the blocks of a sequence into one contiguous tensor and then calls ordinary attention. The gather
reads every key and value once and writes a copy, and attention reads the copy: three trips through memory for data
that is needed once. Decode attention does so little arithmetic per byte that these trips are its whole cost.

The copy exists only because softmax(q K^T) V looks as if all scores had to be known at once. They need not be.
*Online softmax* (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022) walks over the keys tile by tile and
keeps three running values for each query:

    m    the largest score so far
    l    the sum of exp(score - m) so far
    acc  the sum of exp(score - m) * v so far

When a tile brings a larger maximum m', what was summed under the old one is out by the factor exp(m - m'), the same
for every term, so one multiplication of `l` and `acc` repairs it. After the last tile acc / l is the exact answer.
The order of the tiles does not matter and they need not lie side by side: the kernel asks the block table where the
next tile is and reads it there (PagedAttention, Kwon et al. 2023).

Work is split by (tile of queries, KV head). The query heads that share a KV head (grouped-query attention) are rows
of the same tile, so a key is read once for all of them: in decode for one query, in a prefill chunk for 64 rows. What
still hurts: a long sequence in decode is walked by one program while most of the GPU idles. The engine's decode kernel
(nanovllm/kernels) splits the keys as well.
"""

from collections.abc import Sequence as SequenceOf
from functools import partial
from itertools import accumulate

import torch
import triton
import triton.language as tl

from stages.core import Sequence


def attend_in_place(work: SequenceOf[tuple[Sequence, int]], device: torch.device) -> partial[torch.Tensor]:
    """`paged_attention` for one step of stage 3 and its heirs, in place of the gather.

    work: sequences, each with how many tokens the step computes beyond its num_computed. The function that is returned
    takes queries [T, Hq, D] and a layer's blocks of keys and values.
    """

    def tensor(rows: object) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=device)

    widest = max(len(seq.block_table) for seq, _ in work)
    block_table = tensor([seq.block_table + [0] * (widest - len(seq.block_table)) for seq, _ in work])  # [S, M]
    query_start = tensor([0, *accumulate(n for _, n in work)])  # [S + 1]
    context_len = tensor([seq.num_computed + n for seq, n in work])  # [S]
    return partial(paged_attention, block_table=block_table, query_start=query_start, context_len=context_len)


@triton.jit
def _paged_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr,  # [T, Hq, D], blocks of [block_size, Hkv, D] (twice), [T, Hq, D]
    tile_sequence_ptr, tile_index_ptr, block_table_ptr, query_start_ptr, context_len_ptr,
    scale, table_stride, block_stride, token_stride, head_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    if DECODE:  # one query a sequence: nothing has to be looked up, and none of the three pointers is used
        sequence = tl.program_id(0)
        first_query = 0
        query_start = sequence
        query_len = 1
    else:
        sequence = tl.load(tile_sequence_ptr + tl.program_id(0))
        first_query = tl.load(tile_index_ptr + tl.program_id(0)) * QUERIES  # counted within the sequence's chunk
        query_start = tl.load(query_start_ptr + sequence)
        query_len = tl.load(query_start_ptr + sequence + 1) - query_start
    context_len = tl.load(context_len_ptr + sequence)

    # Row r of the tile is query r // GROUP under head r % GROUP of this KV head's group.
    row = tl.arange(0, ROWS)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_used = (row < QUERIES * GROUP) & (query < query_len)
    # The chunk's last query is the last token of the context; query i sees keys up to and with its own position.
    position = context_len - query_len + query

    dim = tl.arange(0, HEAD_DIM)
    q_offset = ((query_start + query).to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(q_ptr + q_offset, mask=row_used[:, None], other=0.0)  # [ROWS, D]

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)

    # Keys beyond the last query of this tile are in nobody's past: stop there (causal, and half of prefill's work).
    end = tl.minimum(context_len, context_len - query_len + first_query + QUERIES)
    for start in range(0, end, KEYS):  # KEYS divides BLOCK_SIZE, so a tile of keys lies in one block
        block = tl.load(block_table_ptr + sequence * table_stride + start // BLOCK_SIZE).to(tl.int64)
        key = start + tl.arange(0, KEYS)
        token_offset = block * block_stride + (key % BLOCK_SIZE) * token_stride + kv_head * head_stride  # [KEYS]
        offset = token_offset[:, None] + dim[None, :]
        # A slot past the context holds whatever was there before, NaN perhaps. Its probability below is 0, but
        # 0 * NaN is NaN: V must not be loaded there at all.
        in_context = (key < context_len)[:, None]
        k = tl.load(k_ptr + offset, mask=in_context, other=0.0)  # [KEYS, D]
        v = tl.load(v_ptr + offset, mask=in_context, other=0.0)  # [KEYS, D]

        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [ROWS, KEYS]
        score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
        new_m = tl.maximum(m, tl.max(score, 1))  # finite from the first tile on: every query sees key 0
        p = tl.exp(score - new_m[:, None])
        repair = tl.exp(m - new_m)
        l = l * repair + tl.sum(p, 1)  # noqa: E741
        acc = acc * repair[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = new_m

    tl.store(out_ptr + q_offset, (acc / l[:, None]).to(out_ptr.dtype.element_ty), mask=row_used[:, None])


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of each sequence's newest tokens over its whole context, read through the block table.

    q: [T, Hq, D] queries of all sequences laid end to end; D is 64 or 128, Hq a multiple of Hkv.
    k_cache, v_cache: [num_blocks, block_size, Hkv, D], laid out alike; block_size a power of two of at least 16.
    block_table: [S, M] int32; entry [s, j] is the block with keys j * block_size ... of sequence s.
    query_start: [S + 1] int32; sequence s owns the rows query_start[s] to query_start[s + 1] of `q`.
    context_len: [S] int32, the keys that the last query of a sequence sees, its own included.

    Returns [T, Hq, D] in the dtype of `q`. Raises ValueError for blocks or heads that the kernel's tiles cannot have.
    """
    check_tiles(k_cache, v_cache)
    q = q.contiguous()
    query_len = query_start.diff()
    # A tile of tl.dot has at least 16 rows; with one query a sequence (decode) more of them would only be padding.
    rows = 16 if int(query_len.max()) == 1 else 64
    queries = rows * k_cache.shape[2] // q.shape[1]
    tiles = (query_len + queries - 1) // queries  # [S], tiles that each sequence needs
    sequences = torch.arange(len(tiles), device=q.device)
    tile_sequence = sequences.repeat_interleave(tiles)  # [num_tiles]
    tile_index = torch.arange(len(tile_sequence), device=q.device) - (tiles.cumsum(0) - tiles)[tile_sequence]
    return launch(q, k_cache, v_cache, block_table, context_len, rows, (tile_sequence, tile_index, query_start))


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
) -> torch.Tensor:
    """The same where every sequence has exactly one query, q [S, Hq, D]: what a CUDA graph can record (stage 6).

    `paged_attention` asks the device how long the longest chunk is, and its grid depends on the answer. Here the grid
    follows from the shapes alone; lengths and tables are read on the device only.
    """
    check_tiles(k_cache, v_cache)
    return launch(q.contiguous(), k_cache, v_cache, block_table, context_len, rows=16, tiles=None)


def check_tiles(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    block_size, _, head_dim = k_cache.shape[1:]
    if block_size < 16 or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two of at least 16, got {block_size}; use the gather instead")
    if head_dim not in (64, 128):
        raise ValueError(f"head_dim must be 64 or 128, got {head_dim}; use the gather instead")
    if k_cache.stride() != v_cache.stride():
        raise ValueError(f"k_cache and v_cache must be laid out alike: {k_cache.stride()} against {v_cache.stride()}")


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    rows: int,
    tiles: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """tiles: the sequence and the number of each tile, and where queries start; None if each query is a sequence."""
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    group = q.shape[1] // num_kv_heads
    tile_sequence, tile_index, query_start = tiles or (context_len,) * 3  # some pointer has to be given
    out = torch.empty_like(q)  # [T, Hq, D]
    _paged_attention_kernel[(len(tile_sequence), num_kv_heads)](
        q, k_cache, v_cache, out, tile_sequence, tile_index, block_table, query_start, context_len,
        head_dim**-0.5, block_table.stride(0), *k_cache.stride()[:3],
        NUM_HEADS=q.shape[1], GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        QUERIES=rows // group, ROWS=rows, KEYS=min(block_size, 128 // q.element_size()), DECODE=tiles is None,
        num_stages=2,
    )  # fmt: skip
    return out
