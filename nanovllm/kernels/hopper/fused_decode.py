"""Decode attention of few sequences, together with all that lies between two projections. For Hopper GPUs, in Gluon.

With few sequences attention reads little. Most of its time is spent at borders: between the kernel that normalises,
rotates and writes the new keys (`norm_rope_write`), attention itself (`paged_decode`), and the merge of its pieces.
Here one kernel does all three. Plan, equal shares and partial results are those of `paged_decode.py`.

*The warps share out the keys of a tile.* Each has some keys, and softmax statistics of its own. So nothing is reduced
across warps until a sequence ends. The rows of a product are the query heads of one KV head.

*All keys are ordered at once.* Before the predecessor has ended, TMA, the copy engine, fills as many places in shared
memory as there are. Usually that is all that a program reads. It may be read so early, because no key of this step is
used from there: these keys are masked. `ring_decode.py` says why older keys may be read.

*New keys come from the projection*, not from the cache. In a recording of decodes several tokens of a row may be
sequences of their own, one right behind the other. So a program looks back: if the slot of the token before its own
holds, by its own block table, the position before its own, then that token is of the same row. The program computes
the keys of all these tokens, as one more tile. It writes only the key of its own token to the cache.

*Whoever comes last merges.* A program that has a part of a sequence writes the part down, and counts. If all others
have counted before, it reads the parts of all, each warp some of them, and sets the counter back to zero.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.attention.paged_decode import DecodeConfig, DecodeWorkspace
from nanovllm.kernels.attention.paged_tile import LOG2_E
from nanovllm.kernels.launch import overlaps_launches

HEAD_DIM = 128
KEYS, WARPS, STAGES = 16, 4, 5  # keys of a warp, in a tile; tiles on their way, of 32 KiB each
MAX_SEQUENCES = 15  # whose keys, if all are tokens of one row, are one tile
CONFIG = DecodeConfig(KEYS * WARPS, WARPS, STAGES, 1)
BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


def fits(qkv: Tensor, kv: Tensor, num_sequences: int) -> bool:
    """Whether the kernel can decode so many sequences with one token each, and is fast. qkv [T, Hq + 2 Hkv, D], kv
    [2, num_blocks, block_size, Hkv, D]."""
    _, _, block_size, num_kv_heads, head_dim = kv.shape
    group = qkv.shape[1] // num_kv_heads - 2
    if kv.dtype != qkv.dtype or qkv.element_size() != 2 or head_dim != HEAD_DIM or block_size < CONFIG.keys:
        return False
    return group <= 16 and num_sequences <= MAX_SEQUENCES


@gluon.jit
def _order(  # type: ignore[no-untyped-def]
    kv_desc, k_ring, v_ring, full, table_ptr, context_len_ptr, table_stride, v_slot, kv_head, last,
    ordered, tile, sequence, begin, end,
    BLOCK_SIZE: gl.constexpr, TILE: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Order `tile`, unless the piece ends before it. It is of `sequence`, which has the tiles from `begin` to `end`.

    Returns the five last arguments for the tile that follows."""
    if tile < last:
        start = (tile - begin) * TILE
        block = gl.load(table_ptr + sequence * table_stride + start // BLOCK_SIZE)
        slot = block * BLOCK_SIZE + start % BLOCK_SIZE
        stage = ordered % STAGES
        bar = full.index(stage)
        mbarrier.expect(bar, 2 * TILE * HEAD_DIM * 2)
        tma.async_copy_global_to_shared(kv_desc, [kv_head, slot, 0], bar, k_ring.index(stage))
        tma.async_copy_global_to_shared(kv_desc, [kv_head, slot + v_slot, 0], bar, v_ring.index(stage))
        ordered = ordered + 1
        tile = tile + 1
        if (tile == end) & (tile < last):
            begin = end
            sequence = sequence + 1
            end = begin + (gl.load(context_len_ptr + sequence) + TILE - 1) // TILE
    return ordered, tile, sequence, begin, end


@gluon.jit
def _rotated(x, partner, weight, partner_weight, cos, sin, eps, NORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """x [N, D]: heads; partner: with their halves exchanged -> normalised, turned, in the dtype of x."""
    dtype: gl.constexpr = x.dtype
    x = x.to(gl.float32)
    partner = partner.to(gl.float32)
    if NORM:
        scale = gl.rsqrt(gl.sum(x * x, 1) / x.shape[1] + eps)[:, None]
        x = (x * scale * weight).to(dtype).to(gl.float32)  # rounded where the plain norm rounds
        partner = (partner * scale * partner_weight).to(dtype).to(gl.float32)
    return (x * cos + partner * sin).to(dtype)


@gluon.jit
def _attend(  # type: ignore[no-untyped-def]
    q, k_tile, v_tile, k_exists, v_exists, is_whole, scale, m, denom, acc, A: gl.constexpr,
):  # fmt: skip
    """One step of online softmax: q [WARPS, ROWS, D], a tile of keys and values [1, WARPS * KEYS, D]."""
    KEYS: gl.constexpr = k_exists.shape[2]
    shape: gl.constexpr = [q.shape[0], KEYS, q.shape[2]]
    k = k_tile.reshape(shape).permute((0, 2, 1)).load(gl.DotOperandLayout(1, A, 2))
    score = mma_v2(q, k, gl.zeros([q.shape[0], q.shape[1], KEYS], gl.float32, A))
    v = v_tile.reshape(shape).load(gl.DotOperandLayout(1, A, 2))
    score = gl.where(k_exists, score, float("-inf"))
    if not is_whole:  # beyond the context lies anything: a NaN in V would survive p = 0
        v = gl.where(v_exists, v, gl.zeros_like(v))
    new_m = gl.maximum(m, gl.max(score, 2) * scale)
    p = gl.exp2(score * scale - new_m[:, :, None])
    repair = gl.exp2(m - new_m)
    denom = denom * repair + gl.sum(p, 2)
    p = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, A, 2))
    return new_m, denom, mma_v2(p, v, acc * repair[:, :, None])


@gluon.jit
def _over_warps(m, denom, acc, OUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """m, denom [WARPS, ROWS] and acc [WARPS, ROWS, D] as one: [ROWS] and [ROWS, D]."""
    top = gl.max(m, 0)
    weight = gl.exp2(m - gl.expand_dims(top, 0))
    denom = gl.convert_layout(gl.sum(denom * weight, 0), gl.SliceLayout(1, OUT))
    return gl.convert_layout(top, gl.SliceLayout(1, OUT)), denom, gl.sum(acc * weight[:, :, None], 0)


@gluon.jit
def _merge_parts(  # type: ignore[no-untyped-def]
    m_ptr, denom_ptr, acc_ptr, first, begin, parts, total, pieces, first_head,
    NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr, A: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    """What the pieces from `first` on have left of a sequence, whose first tile is `begin`: as `_over_warps`."""
    m = gl.full([WARPS, 16], -1e30, gl.float32, gl.SliceLayout(2, A))
    denom = gl.zeros([WARPS, 16], gl.float32, gl.SliceLayout(2, A))
    acc = gl.zeros([WARPS, 16, HEAD_DIM], gl.float32, A)
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :]
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, None, :]
    for start in range(0, parts, WARPS):
        part = start + gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None]
        piece = first + part
        if total < pieces:  # some pieces are empty; then every tile is a part
            piece = ((begin + part + 1) * pieces - 1) // total
        slot = (piece * 2 + (part > 0).to(gl.int32)) * NUM_HEADS + first_head + row
        exists = (part < parts) & (row < GROUP)
        part_m = gl.load(m_ptr + slot, mask=exists, other=-1e30, cache_modifier=".cg")
        part_denom = gl.load(denom_ptr + slot, mask=exists, other=0.0, cache_modifier=".cg")
        place = slot[:, :, None] * HEAD_DIM + dim
        part_acc = gl.load(acc_ptr + place, mask=exists[:, :, None], other=0.0, cache_modifier=".cg")
        new_m = gl.maximum(m, part_m)
        repair = gl.exp2(m - new_m)
        weight = gl.exp2(part_m - new_m)
        denom = denom * repair + part_denom * weight
        acc = acc * repair[:, :, None] + part_acc * weight[:, :, None]
        m = new_m
    return _over_warps(m, denom, acc, OUT)


@gluon.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "context_len_ptr", "slots_ptr"],
)
def _fused_decode_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, kv_desc, kv_ptr, out_ptr, m_ptr, denom_ptr, acc_ptr, arrived_ptr, table_ptr, context_len_ptr, slots_ptr,
    piece_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, eps, scale, v_slot, table_stride, pieces,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, Q_ROWS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr, NORM: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    TILE: gl.constexpr = KEYS * WARPS
    NUM_HEADS: gl.constexpr = NUM_KV_HEADS * GROUP
    TOKEN: gl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    A: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    OUT: gl.constexpr = gl.SliceLayout(0, A)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, A, 2)
    HEAD: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])  # a warp has whole heads
    COPIES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, WARPS, 1], [2, 1, 0])
    kv_head = gl.program_id(0)
    piece = gl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    k_ring = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, 1, TILE, HEAD_DIM], kv_desc.layout)
    v_ring = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, 1, TILE, HEAD_DIM], kv_desc.layout)
    new_k = gl.allocate_shared_memory(kv_desc.dtype, [1, TILE, HEAD_DIM], kv_desc.layout)
    new_v = gl.allocate_shared_memory(kv_desc.dtype, [1, TILE, HEAD_DIM], kv_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=1)
    tile = gl.load(piece_ptr + piece * 4)
    last = gl.load(piece_ptr + piece * 4 + 1)
    sequence = gl.load(piece_ptr + piece * 4 + 2)
    begin = gl.load(piece_ptr + piece * 4 + 3)
    total = gl.load(piece_ptr + (pieces * 4 - 3))  # where the last piece ends
    end = begin + (gl.load(context_len_ptr + sequence) + TILE - 1) // TILE
    ordered = 0
    next_tile, next_sequence, next_begin, next_end = tile, sequence, begin, end
    for _ in range(STAGES):
        ordered, next_tile, next_sequence, next_begin, next_end = _order(
            kv_desc, k_ring, v_ring, full, table_ptr, context_len_ptr, table_stride, v_slot, kv_head, last,
            ordered, next_tile, next_sequence, next_begin, next_end, BLOCK_SIZE, TILE, HEAD_DIM, STAGES,
        )  # fmt: skip

    HALF: gl.constexpr = HEAD_DIM // 2
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, HEAD))[None, :]
    partner = (dim + HALF) % HEAD_DIM
    sign = gl.where(dim < HALF, -1.0, 1.0)
    q_row = gl.minimum(gl.arange(0, Q_ROWS, gl.SliceLayout(1, HEAD)), GROUP - 1)[:, None]
    back = gl.arange(0, 16, gl.SliceLayout(1, HEAD))[:, None]  # tokens before a sequence's own
    q_weight, k_weight = sign, sign  # not used without norms
    q_partner, k_partner = sign, sign
    if NORM:
        q_weight, q_partner = gl.load(q_norm_ptr + dim), gl.load(q_norm_ptr + partner)
        k_weight, k_partner = gl.load(k_norm_ptr + dim), gl.load(k_norm_ptr + partner)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None, None]
    k_key = warp * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, None, :]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))[:, None, None]
    v_key = warp * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))[None, :, None]
    row = gl.arange(0, 16, gl.SliceLayout(1, OUT))
    used = row < GROUP
    head = kv_head * GROUP + row
    out_dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, OUT))[None, :]
    done = 0
    while tile < last:
        context_len = gl.load(context_len_ptr + sequence)
        end = begin + (context_len + TILE - 1) // TILE
        stop = gl.minimum(end, last)
        ends = stop == end
        position = context_len - 1
        num_new = 1
        more = True
        while more:
            before = position - num_new
            possible = (before >= 0) & (sequence >= num_new) & (num_new < 16)
            block = gl.load(table_ptr + sequence * table_stride + before // BLOCK_SIZE, mask=possible, other=0)
            written = gl.load(slots_ptr + (sequence - num_new), mask=possible, other=-1).to(gl.int32)
            more = possible & (written == block * BLOCK_SIZE + before % BLOCK_SIZE)
            num_new += more.to(gl.int32)
        old = context_len - num_new
        own_slot = gl.load(slots_ptr + sequence).to(gl.int64)
        if PDL:
            gdc_wait()

        is_new = (back < num_new) & ends
        angle = cos_sin_ptr + (position * HEAD_DIM + dim % HALF)
        cos, sin = gl.load(angle), gl.load(angle + HALF) * sign
        angle = cos_sin_ptr + ((position - back) * HEAD_DIM + dim % HALF)
        new_cos = gl.load(angle, mask=is_new, other=0.0)
        new_sin = gl.load(angle + HALF, mask=is_new, other=0.0) * sign
        token = qkv_ptr + sequence.to(gl.int64) * TOKEN
        source = token + (kv_head * GROUP + q_row) * HEAD_DIM
        q, q2 = gl.load(source + dim), gl.load(source + partner)
        source = token + ((NUM_HEADS + kv_head) * HEAD_DIM - back * TOKEN)
        k = gl.load(source + dim, mask=is_new, other=0.0)
        k2 = gl.load(source + partner, mask=is_new, other=0.0)
        v = gl.load(source + (NUM_KV_HEADS * HEAD_DIM + dim), mask=is_new, other=0.0)
        q = _rotated(q, q2, q_weight, q_partner, cos, sin, eps, NORM)
        # The other rows are copies, whose products nobody reads
        copies = gl.zeros([WARPS * 16 // Q_ROWS, Q_ROWS, HEAD_DIM], q.dtype, COPIES)
        copies += gl.expand_dims(gl.convert_layout(q, gl.SliceLayout(0, COPIES)), 0)
        q = gl.convert_layout(gl.reshape(copies, [WARPS, 16, HEAD_DIM]), gl.DotOperandLayout(0, A, 2))
        m = gl.full([WARPS, 16], -1e30, gl.float32, gl.SliceLayout(2, A))
        denom = gl.zeros([WARPS, 16], gl.float32, gl.SliceLayout(2, A))
        acc = gl.zeros([WARPS, 16, HEAD_DIM], gl.float32, A)
        if ends:
            k = _rotated(k, k2, k_weight, k_partner, new_cos, new_sin, eps, NORM)
            new_k.reshape([TILE, HEAD_DIM]).slice(0, 16, 0).store(k)
            new_v.reshape([TILE, HEAD_DIM]).slice(0, 16, 0).store(v)
            place = (own_slot * NUM_KV_HEADS + kv_head) * HEAD_DIM + dim + 0 * back
            gl.store(kv_ptr + place, k, mask=back == 0)
            gl.store(kv_ptr + (place + v_slot.to(gl.int64) * (NUM_KV_HEADS * HEAD_DIM)), v, mask=back == 0)
            debug_barrier()
            m, denom, acc = _attend(q, new_k, new_v, k_key < num_new, v_key < num_new, False, scale, m, denom, acc, A)
        for i in range(tile, stop):
            start = (i - begin) * TILE
            stage = done % STAGES
            mbarrier.wait(full.index(stage), (done // STAGES) & 1)
            m, denom, acc = _attend(
                q, k_ring.index(stage), v_ring.index(stage), start + k_key < old, start + v_key < old,
                start + TILE <= old, scale, m, denom, acc, A,
            )  # fmt: skip
            done += 1
            if next_tile < last:
                debug_barrier()  # all warps have this tile in registers
            ordered, next_tile, next_sequence, next_begin, next_end = _order(
                kv_desc, k_ring, v_ring, full, table_ptr, context_len_ptr, table_stride, v_slot, kv_head, last,
                ordered, next_tile, next_sequence, next_begin, next_end, BLOCK_SIZE, TILE, HEAD_DIM, STAGES,
            )  # fmt: skip

        all_m, all_denom, all_acc = _over_warps(m, denom, acc, OUT)
        complete = (tile == begin) & ends
        if not complete:
            # A piece can leave two partial results: slot 1 for a sequence that an earlier piece began, else slot 0.
            slot = (piece * 2 + (tile > begin).to(gl.int32)) * NUM_HEADS + head
            gl.store(m_ptr + slot, all_m, mask=used)
            gl.store(denom_ptr + slot, all_denom, mask=used)
            gl.store(acc_ptr + (slot[:, None] * HEAD_DIM + out_dim), all_acc, mask=used[:, None])
            first = ((begin + 1) * pieces - 1) // total
            parts = gl.minimum((end * pieces - 1) // total - first + 1, end - begin)
            arrived = arrived_ptr + (sequence * NUM_KV_HEADS + kv_head)
            debug_barrier()
            complete = gl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == parts - 1
            debug_barrier()
            if complete:
                gl.store(arrived, 0)
                all_m, all_denom, all_acc = _merge_parts(
                    m_ptr, denom_ptr, acc_ptr, first, begin, parts, total, pieces, kv_head * GROUP,
                    NUM_HEADS, GROUP, HEAD_DIM, WARPS, A, OUT,
                )  # fmt: skip
        if complete:
            place = (sequence.to(gl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + out_dim
            result = all_acc / all_denom[:, None]
            gl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=used[:, None])
        tile = stop
        begin = end
        sequence = sequence + 1
    if PDL:
        gdc_wait()
    full._keep_alive()


def fused_decode(
    qkv: Tensor,
    kv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    table: Tensor,
    eps: float,
    slots: Tensor,
    block_table: Tensor,
    context_len: Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    arrived: Tensor,
    plan: Tensor,
    overlap: bool = False,
) -> Tensor:
    """`norm_rope_write` and `paged_decode` of S sequences that have one token each, for what `fits`: [S, Hq, D].

    Args:
        qkv, kv, norms, table, eps, slots: as for `norm_rope_write`. The position of a token is the last of its context.
        block_table, context_len, scale: as in `PagedInputs`.
        workspace, plan: as for `paged_decode`, with CONFIG and one query for each sequence.
        arrived: [S * Hkv] int32, zeros; they are zeros again when the kernel has ended.
        overlap: as for `paged_decode`. Besides, all keys of earlier steps must be older than the last kernel launched
            without overlap.
    """
    _, num_blocks, block_size, num_kv_heads, head_dim = kv.shape
    pieces, _, _, num_heads = workspace.m.shape
    group = num_heads // num_kv_heads
    out = qkv.new_empty(len(context_len), num_heads, head_dim)  # [S, Hq, D]
    early = overlap and overlaps_launches(qkv.device)
    places = kv.view(-1, num_kv_heads, head_dim).transpose(0, 1)  # [Hkv, slots of K and of V, D]
    boxes = TensorDescriptor.from_tensor(places, [1, CONFIG.keys, head_dim], BOX)
    q_norm, k_norm = norms or (qkv, qkv)  # not read without norms
    _fused_decode_kernel[(num_kv_heads, pieces)](
        qkv, boxes, kv, out, workspace.m, workspace.denom, workspace.acc, arrived, block_table, context_len, slots,
        plan, q_norm, k_norm, table, eps, scale * LOG2_E, num_blocks * block_size, block_table.stride(0), pieces,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, Q_ROWS=triton.next_power_of_2(group), HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size, KEYS=KEYS, WARPS=WARPS, STAGES=STAGES, NORM=norms is not None, PDL=early,
        num_warps=WARPS, launch_pdl=early,
    )  # fmt: skip
    return out
