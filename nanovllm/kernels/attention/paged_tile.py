"""What the paged attention kernels share: finding one's sequence, addressing a tile of keys, online softmax.

Triton compiles a kernel anew when an integer argument or a pointer is divisible by 16 for the first time, or no longer.
Arguments that differ from step to step (the number of sequences, where a slice of the step's packed integers begins)
are therefore kept out of this specialisation by every kernel: no request should wait for a compiler.

*A cache in FP8* (e4m3) is widened in registers. Products are then in fp16, even if the queries are in bf16: Hopper has
an instruction from FP8 to fp16, which is exact, and none to bf16. The key scale is part of the scale of the scores. The
value scale is applied once, to the sum of a piece.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import prefetch_l2

# Scores are multiplied with this, because the hardware's exponential is exp2.
LOG2_E = 1.4426950408889634


class PagedInputs(NamedTuple):
    """What every attention kernel is given: S sequences with T queries, laid end to end. `out` is written."""

    q: Tensor  # [T, Hq, D], rows contiguous
    kv: Tensor  # [2, num_blocks, block_size, Hkv, D], contiguous; block_size is a power of two of at least 16
    block_table: Tensor  # [>= S, M] int32
    query_start: Tensor  # [>= S + 1] int32: sequence s has the rows query_start[s] to query_start[s + 1] of q and out
    context_len: Tensor  # [S] int32, at least 1 each: the keys that the last query of a sequence sees
    scale: float  # what scores are multiplied with
    out: Tensor  # [T, Hq, D], contiguous
    v_scale: float | None = None  # of a cache in FP8: what values are multiplied with. `scale` includes the key scale


def keys_per_tile(head_dim: int, element_size: int, tile_bytes: int) -> int:
    """Keys whose K (or V) fills `tile_bytes`: at least the 16 that tl.dot needs, at most 128."""
    return max(16, min(128, tile_bytes // (head_dim * element_size)))


def padded_sequences(num_sequences: int) -> int:
    """The width of a vector with a number for each sequence. There are few widths, so that few kernels are compiled."""
    return 32 if num_sequences <= 32 else max(512, triton.next_power_of_2(num_sequences))


@triton.jit
def locate(tile, tiles, index):  # type: ignore[no-untyped-def]
    """The sequence that owns `tile` when the tiles of all sequences are laid end to end, and its first tile.

    tiles [SEQUENCES]: tiles of each sequence, 0 beyond the last; index [SEQUENCES]: 0, 1, 2, ...
    """
    ends = tl.cumsum(tiles)
    sequence = tl.sum((ends <= tile).to(tl.int32))
    begin = tl.sum(tl.where(index < sequence, tiles, 0))
    return sequence, begin


@triton.jit
def tiles_before(context_len, KEYS: tl.constexpr, QUERIES: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tiles of keys that no query of a sequence sees, if it has QUERIES of them.

    WINDOW: keys that a query sees at most, its own included; 0 is no limit.
    """
    return tl.maximum(context_len - QUERIES + 1 - WINDOW, 0) // KEYS if WINDOW else 0


@triton.jit
def token_offsets(  # type: ignore[no-untyped-def]
    table_ptr, start, limit, TOKEN_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr
):
    """Where the keys start, start + 1, ... of a sequence lie in the cache, in elements: [KEYS] int64.

    Where a block holds whole tiles, a tile costs one look-up in the block table. Smaller blocks cost one look-up per
    key, since a tile then spans several of them. Keys from `limit` on get an address that must not be read.
    """
    offset = tl.arange(0, KEYS)
    if BLOCK_SIZE >= KEYS:
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        return block * (BLOCK_SIZE * TOKEN_STRIDE) + (start % BLOCK_SIZE + offset) * TOKEN_STRIDE
    else:
        key = start + offset
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < limit, other=0).to(tl.int64)
        return (block * BLOCK_SIZE + key % BLOCK_SIZE) * TOKEN_STRIDE


@triton.jit
def as_computed(q, kv_ptr):  # type: ignore[no-untyped-def]
    """The queries in the dtype of the products: fp16 instead of bf16, if the cache is in FP8."""
    if kv_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        wide = q.to(tl.float32)
        wide = tl.where(wide > 65504.0, 65504.0, tl.where(wide < -65504.0, -65504.0, wide))  # NaN stays NaN
        q = wide.to(tl.float16)
    return q


@triton.jit
def attend_tile(q, k, v, visible, scale, m, denom, acc, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One step of online softmax: a tile of keys joins the running maximum, sum and weighted sum of values.

    q [ROWS, D], k and v [KEYS, D] in the dtype of q or in FP8, visible [ROWS, KEYS]; m, denom [ROWS] and acc [ROWS, D]
    in fp32. `m` starts finite, so that a row which sees no key of a tile keeps its zeros: exp2(-inf - m) is 0, but
    exp2(-inf + inf) is NaN. Scaling by a positive number commutes with the maximum, so the scaling is part of the
    multiply-add before the exponential.
    """
    k = k.to(q.dtype)
    v = v.to(q.dtype)
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        score = tl.where(visible, score, float("-inf"))
    new_m = tl.maximum(m, tl.max(score, 1) * scale)
    p = tl.exp2(score * scale - new_m[:, None])
    repair = tl.exp2(m - new_m)
    denom = denom * repair + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * repair[:, None], input_precision="ieee")
    return new_m, denom, acc


@triton.jit
def ask_for_keys(  # type: ignore[no-untyped-def]
    kv_ptr, v_offset, table_ptr, first, stop, context_len, kv_head,
    HEAD_DIM: tl.constexpr, TOKEN_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    LINES: tl.constexpr,
):  # fmt: skip
    """Have the keys and values of a sequence from `first` to `stop` brought to L2, without waiting for them."""
    line = tl.arange(0, LINES) * (HEAD_DIM // LINES)
    for start in range(first, stop, KEYS):
        offset = token_offsets(table_ptr, start, context_len, TOKEN_STRIDE, BLOCK_SIZE, KEYS) + kv_head * HEAD_DIM
        offset = tl.where(start + tl.arange(0, KEYS) < context_len, offset, 0)
        prefetch_l2(kv_ptr + offset[:, None] + line[None, :])
        prefetch_l2(kv_ptr + v_offset + offset[:, None] + line[None, :])


@triton.jit
def attend_keys(  # type: ignore[no-untyped-def]
    q, kv_ptr, v_offset, table_ptr, first, stop, context_len, kv_head, position, oldest, scale,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, TOKEN_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """q [ROWS, D] at `position` [ROWS] against the keys of a sequence from `first` to `stop`: m, denom and acc.

    oldest: position of the sequence's first query. What lies before its window may be another sequence's by now.
    """
    dim = tl.arange(0, HEAD_DIM)
    m = tl.full([ROWS], -1e30, tl.float32)
    denom = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for start in range(first, stop, KEYS):
        key = start + tl.arange(0, KEYS)
        offset = token_offsets(table_ptr, start, context_len, TOKEN_STRIDE, BLOCK_SIZE, KEYS) + kv_head * HEAD_DIM
        pointer = kv_ptr + offset[:, None] + dim[None, :]
        in_context = (key < context_len)[:, None]  # beyond it lies anything: a NaN in V would survive p = 0
        if WINDOW:
            in_context &= (key > oldest - WINDOW)[:, None]
        k = tl.load(pointer, mask=in_context, other=0.0)  # [KEYS, D]
        v = tl.load(pointer + v_offset, mask=in_context, other=0.0)  # [KEYS, D]
        visible = key[None, :] <= position[:, None]
        if WINDOW:
            visible &= key[None, :] > position[:, None] - WINDOW
        m, denom, acc = attend_tile(q, k, v, visible, scale, m, denom, acc, True)
    return m, denom, acc
