"""Decode attention that orders keys while it computes: `paged_decode` for Hopper GPUs, in Gluon, below Triton.

Plan, equal shares, partial results and their merge are those of `paged_decode.py`. But a program there has one tile of
keys on the way while it computes with another, and it stops reading at the end of every sequence. Here the tiles of a
piece go through a ring of places in shared memory, K and V of a tile together.

*One warp is the producer.* It asks TMA, the copy engine, for one tile after the other, each as soon as there is a free
place in the ring, and goes on where a sequence ends. Both sides walk along the same tiles, so that only places are
handed over, by two barriers for each: one says that the bytes have arrived, one that all warps have them in registers.

*Every other warp is a consumer and has a KV head.* The rows of its products are the query heads of that KV head, times
the few queries of a sequence that verifies guesses. So nothing is reduced across warps, and what a program reads is
contiguous. A tile is a box [HEADS, KEYS, D], though in the cache the heads of a token lie side by side. So the keys of
a head are neighbours in shared memory, and the swizzle spreads them over all banks. A box cannot leave out what lies
beyond the context: scores there are masked, and values there, which may be NaN, are replaced by zeros in registers.

*A cache in FP8* is loaded as 16-bit words of two numbers. A key of one head has WORDS words. (If the cache is in 16
bits, each number is a word.) A tile in FP8 has twice the keys in as many bytes. `widen.py` says how words become
operands. Keys become two operands, and the queries are split in the same way. Values become even and odd dimensions,
whose sums are kept apart.

*Old tiles are ordered early*, before the predecessor has ended. Unlike a prefetch to L2, what is read here is used. So
a tile counts as old only if all its keys were written by earlier steps, and these may be read because:
- The old keys of a sequence are those before position context_len - query_len, since its queries are all its tokens of
  this step. There is one exception: in a recording of decodes, tokens of a row may be decodes of their own, one after
  the other. So a sequence whose oldest new key is where the context of the one before it ends has no old keys.
- No other sequence writes to them in this step. A block that is written to has one owner: only full blocks are shared,
  and others find them only after the step that filled them was committed. Blocks change hands only between steps.
- Earlier steps have ended. The first attention of a step is launched without overlap, and so is its plan: neither
  starts before all that was launched before it has ended. Later kernels may start early, but not before these.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.attention.paged_decode import FEW_SEQUENCES, MAX_ROWS, DecodeConfig, DecodeWorkspace, merge_pieces
from nanovllm.kernels.attention.paged_tile import LOG2_E, PagedInputs
from nanovllm.kernels.hopper.widen import in_fp16, widen_keys, widen_values
from nanovllm.kernels.launch import overlaps_launches

MIN_SEQUENCES = 8  # with a cache in FP8 `FEW_SEQUENCES`
MANY_SEQUENCES = 64  # with fewer, what counts is that the kernels before and after have room beside this one
RING_BYTES, SMALL_RING_BYTES = 192 * 1024, 96 * 1024  # of shared memory of a multiprocessor, for the tiles
MAX_REGISTERS = 160  # of a thread. The compiler would take all, and no other kernel could begin beside this one
PRODUCER_REGISTERS = 24  # of a thread of the producer: the fewest that there are
BOXES = {
    words: gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * words), element_bitwidth=16, rank=3)
    for words in (32, 64, 128)
}  # by the 16-bit words of a key


@dataclass(frozen=True)
class RingLayout:
    """Keys of a tile; KV heads of a program, and as many warps that compute; tiles in its ring; programs per
    multiprocessor; registers of a thread at the start, before the warp that orders tiles gives its own away."""

    keys: int
    heads: int
    stages: int
    programs_per_sm: int
    max_registers: int | None = None

    @property
    def config(self) -> DecodeConfig:
        """For the plan and the number of pieces: programs are counted as if each had one head."""
        return DecodeConfig(self.keys, self.heads, self.stages, self.programs_per_sm * self.heads)


def ring_layout(q: Tensor, kv: Tensor, num_sequences: int) -> RingLayout | None:
    """The layout for q [T, Hq, D] of so many sequences and a cache kv [2, num_blocks, block_size, Hkv, D].

    None: `paged_decode` is faster, or this kernel cannot take the shape or the dtype. All layers of a step get the same
    layout, since they share a plan. Of the layouts that were tried by themselves on an H200 the large ring was among
    the fastest at every batch (`benchmarks/results/kernels.h200.json` has four). In a whole step with few sequences the
    small one is faster. With a cache in FP8 it was not measured.
    """
    _, _, block_size, num_kv_heads, head_dim = kv.shape
    in_fp8 = kv.element_size() == 1
    keys, heads, ring_bytes = 64 // kv.element_size(), 4, RING_BYTES
    fits = head_dim in (64, 128) and q.element_size() == 2 and block_size >= keys
    dealt_out = num_kv_heads % heads == 0 and q.shape[1] // num_kv_heads <= MAX_ROWS
    if num_sequences < (FEW_SEQUENCES if in_fp8 else MIN_SEQUENCES) or not fits or not dealt_out:
        return None
    if num_sequences < MANY_SEQUENCES and not in_fp8:
        keys, ring_bytes = keys // 2, SMALL_RING_BYTES
    return RingLayout(keys, heads, ring_bytes // (2 * heads * keys * head_dim * kv.element_size()), 1, MAX_REGISTERS)


@gluon.jit
def _piece(piece_ptr):  # type: ignore[no-untyped-def]
    """The piece of this program: the four numbers of `paged_decode.plan_decode`."""
    plan_ptr = piece_ptr + gl.program_id(1) * 4
    return gl.load(plan_ptr), gl.load(plan_ptr + 1), gl.load(plan_ptr + 2), gl.load(plan_ptr + 3)


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    kv_desc, k_ring, v_ring, full, empty, block_table_ptr, query_start_ptr, context_len_ptr, piece_ptr, v_slot,
    table_stride,
    HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, WORDS: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Order all tiles of the piece, each as soon as its stage is free."""
    first_head = gl.program_id(0) * HEADS
    tile, last, sequence, begin = _piece(piece_ptr)
    ordered = 0
    stage = 0
    free = 1  # a wait for the phase before the first phase returns at once
    while tile < last:
        context_len = gl.load(context_len_ptr + sequence)
        query_len = gl.load(query_start_ptr + sequence + 1) - gl.load(query_start_ptr + sequence)
        old = context_len - query_len
        old = gl.where(gl.load(context_len_ptr + gl.maximum(sequence - 1, 0)) == old, 0, old)
        end = begin + (context_len + KEYS - 1) // KEYS
        stop = gl.minimum(end, last)
        table_ptr = block_table_ptr + sequence * table_stride
        for i in range(tile, stop):
            start = (i - begin) * KEYS
            slot = gl.load(table_ptr + start // BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE
            if PDL:  # noqa: SIM102 - known when the kernel is compiled, unlike the condition inside
                # To wait again is free. Once the ring is full, there is no free place before the other warps compute.
                if (ordered == STAGES) | (start + KEYS > old):
                    gdc_wait()
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), free)
            mbarrier.expect(bar, 2 * KEYS * HEADS * WORDS * 2)
            tma.async_copy_global_to_shared(kv_desc, [first_head, slot, 0], bar, k_ring.index(stage))
            tma.async_copy_global_to_shared(kv_desc, [first_head, slot + v_slot, 0], bar, v_ring.index(stage))
            ordered += 1
            stage += 1
            if stage == STAGES:
                stage = 0
                free ^= 1
        tile = stop
        begin = end
        sequence += 1


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    q_ptr, out_ptr, m_ptr, denom_ptr, acc_ptr, k_ring, v_ring, full, empty, query_start_ptr, context_len_ptr, piece_ptr,
    scale, v_scale, q_stride,
    NUM_KV_HEADS: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, WORDS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Each warp has one KV head, whose query heads (and queries) are the 16 rows of its products."""
    ROWS: gl.constexpr = 16
    NUM_HEADS: gl.constexpr = NUM_KV_HEADS * GROUP
    FP8: gl.constexpr = WORDS < HEAD_DIM
    A: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [HEADS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, A, 2)
    first_head = gl.program_id(0) * HEADS
    tile, last, sequence, begin = _piece(piece_ptr)

    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :]
    kv_head = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None]
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP  # [HEADS, ROWS]
    dim = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, None, :]
    q_row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, LEFT)))[None, :, None]
    q_head = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))[:, None, None]
    q_dim = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))[None, None, :]
    if FP8:  # a word has two dimensions, and two words of keys are widened together: see `widen_keys`
        dim = 2 * dim
        q_dim = q_dim // 2 * 4 + q_dim % 2
    q_offset = (q_head * GROUP + q_row % GROUP) * HEAD_DIM + q_dim
    key_of_score = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, None, :]
    key_of_v = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))[None, :, None]
    if PDL:
        gdc_wait()
    stage = 0
    phase = 0
    while tile < last:
        context_len = gl.load(context_len_ptr + sequence)
        query_start = gl.load(query_start_ptr + sequence)
        query_len = gl.load(query_start_ptr + sequence + 1) - query_start
        end = begin + (context_len + KEYS - 1) // KEYS
        stop = gl.minimum(end, last)
        used = (row < QUERIES * GROUP) & (query < query_len)
        position = (context_len - query_len + query)[:, :, None]  # query i sees the keys up to its own position
        q_used = (q_row < QUERIES * GROUP) & (q_row // GROUP < query_len)
        q_token = (query_start + q_row // GROUP).to(gl.int64)
        q = gl.load(q_ptr + q_token * q_stride + q_offset, mask=q_used, other=0.0)
        if FP8:
            q = in_fp16(q)
            q_rest = in_fp16(gl.load(q_ptr + q_token * q_stride + q_offset + 2, mask=q_used, other=0.0))
        m = gl.full([HEADS, ROWS], -1e30, gl.float32, gl.SliceLayout(2, A))
        denom = gl.zeros([HEADS, ROWS], gl.float32, gl.SliceLayout(2, A))
        acc = gl.zeros([HEADS, ROWS, WORDS], gl.float32, A)
        if FP8:
            acc_odd = gl.zeros([HEADS, ROWS, WORDS], gl.float32, A)  # of the odd dimensions
        for i in range(tile, stop):
            start = (i - begin) * KEYS
            mbarrier.wait(full.index(stage), phase)
            k = k_ring.index(stage).permute((0, 2, 1)).load(RIGHT)  # [HEADS, WORDS, KEYS]
            score = gl.zeros([HEADS, ROWS, KEYS], gl.float32, A)
            if FP8:
                k, k_rest = widen_keys(k)
                score = mma_v2(q_rest, k_rest, score)
            score = mma_v2(q, k, score)
            v = v_ring.index(stage).load(RIGHT)  # [HEADS, KEYS, WORDS]
            mbarrier.arrive(empty.index(stage))
            score = gl.where(start + key_of_score <= position, score, float("-inf"))
            if start + KEYS > context_len:  # beyond it lies anything: a NaN in V would survive p = 0
                v = gl.where(start + key_of_v < context_len, v, gl.zeros_like(v))
            new_m = gl.maximum(m, gl.max(score, 2) * scale)
            p = gl.exp2(score * scale - new_m[:, :, None])
            repair = gl.exp2(m - new_m)
            denom = denom * repair + gl.sum(p, 2)
            p = gl.convert_layout(p.to(q.dtype), LEFT)
            if FP8:
                v, v_odd = widen_values(v)
                acc_odd = mma_v2(p, v_odd, acc_odd * repair[:, :, None])
            acc = mma_v2(p, v, acc * repair[:, :, None])
            m = new_m
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1

        if FP8:
            acc *= v_scale
            acc_odd *= v_scale
        if (tile == begin) & (stop == end):
            offset = ((query_start + query).to(gl.int64) * NUM_HEADS + head) * HEAD_DIM
            out = acc / denom[:, :, None]
            gl.store(out_ptr + offset[:, :, None] + dim, out.to(out_ptr.dtype.element_ty), mask=used[:, :, None])
            if FP8:
                out = (acc_odd / denom[:, :, None]).to(out_ptr.dtype.element_ty)
                gl.store(out_ptr + offset[:, :, None] + dim + 1, out, mask=used[:, :, None])
        else:
            # A piece can leave two partial results: slot 1 for a sequence that an earlier piece began, else slot 0.
            slot = ((gl.program_id(1) * 2 + (tile > begin).to(gl.int32)) * QUERIES + query) * NUM_HEADS + head
            gl.store(m_ptr + slot, m, mask=used)
            gl.store(denom_ptr + slot, denom, mask=used)
            gl.store(acc_ptr + slot[:, :, None] * HEAD_DIM + dim, acc, mask=used[:, :, None])
            if FP8:
                gl.store(acc_ptr + slot[:, :, None] * HEAD_DIM + dim + 1, acc_odd, mask=used[:, :, None])
        tile = stop
        begin = end
        sequence += 1


@gluon.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_table_ptr", "query_start_ptr", "context_len_ptr"],
)
def _ring_kernel(  # type: ignore[no-untyped-def]
    q_ptr, kv_desc, out_ptr, m_ptr, denom_ptr, acc_ptr, block_table_ptr, query_start_ptr, context_len_ptr, piece_ptr,
    scale, v_scale, q_stride, v_slot, table_stride,
    NUM_KV_HEADS: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, WORDS: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    k_ring = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, HEADS, KEYS, WORDS], kv_desc.layout)
    v_ring = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, HEADS, KEYS, WORDS], kv_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (q_ptr, out_ptr, m_ptr, denom_ptr, acc_ptr, k_ring, v_ring, full, empty, query_start_ptr,
                       context_len_ptr, piece_ptr, scale, v_scale, q_stride, NUM_KV_HEADS, HEADS, GROUP, HEAD_DIM,
                       QUERIES, KEYS, WORDS, STAGES, PDL)),
            (_produce, (kv_desc, k_ring, v_ring, full, empty, block_table_ptr, query_start_ptr, context_len_ptr,
                      piece_ptr, v_slot, table_stride, HEADS, BLOCK_SIZE, KEYS, WORDS, STAGES, PDL)),
        ],
        [1],
        [REGISTERS],
    )  # fmt: skip


def ring_decode(
    inputs: PagedInputs, workspace: DecodeWorkspace, plan: Tensor, layout: RingLayout, overlap: bool = False
) -> None:
    """`paged_decode` for what `ring_layout` accepts, with a plan for `layout.config`.

    overlap: as there. Besides, all keys of earlier steps must be older than the last kernel launched without overlap.
    If several sequences are tokens of one row, written in this step, they follow each other in the order of positions.
    """
    q, kv, block_table, query_start, context_len, scale, out, v_scale = inputs
    _, num_blocks, block_size, num_kv_heads, head_dim = kv.shape
    pieces, _, queries, num_heads = workspace.m.shape
    heads, keys = layout.heads, layout.keys
    early = overlap and overlaps_launches(q.device)
    words = head_dim * kv.element_size() // 2
    # The copy engine is told that two numbers in FP8 are one word of 16 bits.
    slots = kv if words == head_dim else kv.view(torch.int16)
    slots = slots.view(-1, num_kv_heads, words).transpose(0, 1)  # [Hkv, slots of K and of V, WORDS]
    boxes = TensorDescriptor.from_tensor(slots, [heads, keys, words], BOXES[words])
    _ring_kernel[(num_kv_heads // heads, pieces)](
        q, boxes, out, workspace.m, workspace.denom, workspace.acc, block_table, query_start, context_len, plan,
        scale * LOG2_E, v_scale, q.stride(0), num_blocks * block_size, block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads, HEADS=heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size, QUERIES=queries, KEYS=keys, WORDS=words, STAGES=layout.stages,
        REGISTERS=PRODUCER_REGISTERS, PDL=early, num_warps=heads, maxnreg=layout.max_registers, launch_pdl=early,
    )  # fmt: skip
    merge_pieces(inputs, workspace, plan, keys)
