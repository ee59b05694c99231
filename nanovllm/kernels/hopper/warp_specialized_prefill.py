"""Prefill attention by specialised warps: `paged_prefill` for Hopper GPUs, in Gluon, below Triton.

Between the two products of a tile of keys lies the softmax, and Triton waits for every product before it goes on. Here
waiting is explicit, so that the tensor cores multiply while exponentials are taken (FlashAttention-3, Shah et al.
2024). A tile of queries is 128 rows: the queries of one head after the other, of all query heads of a KV head.

*One warp is the producer.* It finds the next tile of queries, and orders Q, K and V by TMA, the copy engine, as soon as
there is a free place in shared memory. In notes, also there, it says which tile it is. K and V of a tile are ordered
apart, K first.

*Two groups of four warps are the consumers*, each with 64 of the rows; both read the same keys. A group issues the
product with the next keys, then that of the last weights with their values. While the second product runs, the group
takes the next exponentials. The tiles of keys are walked from the last one down, so that masks are done with first.

*The next tile goes to the first program that is done.* There is a program for each multiprocessor, and a counter that
all share. The long tiles of queries are the last of each sequence; within it they come first. What the next tile needs
is on its way while the last result is written.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nanovllm.kernels.attention.paged_tile import LOG2_E, PagedInputs, locate, padded_sequences
from nanovllm.kernels.hopper.warp_specialized_tile import first_two_tiles, further_tiles, only_tile

ROWS = 64  # of each of the two groups of warps
KEYS = 64  # of a tile: with 128 fewer tiles fit, and more masked products are computed in vain
STAGES = 4  # tiles of K, and of V, that there is room for
BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
NOTES = 8  # places for notes on a tile of queries, of which 6 are used: see `_produce`
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 56, 224  # of a thread


def fits(q: Tensor, kv: Tensor) -> bool:
    """Whether the kernel can take q [T, Hq, D] and a cache kv [2, num_blocks, block_size, Hkv, D]."""
    _, _, block_size, num_kv_heads, head_dim = kv.shape
    group = q.shape[1] // num_kv_heads
    in_16_bits = q.element_size() == 2 == kv.element_size()
    return in_16_bits and head_dim in (64, 128) and block_size >= KEYS and group in (1, 2, 4, 8, 16)


@gluon.jit
def _write_note(note, value):  # type: ignore[no-untyped-def]
    note.store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))


@gluon.jit
def _read_note(note):  # type: ignore[no-untyped-def]
    return gl.max(note.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    q_desc, kv_desc, q_smem, k_smem, v_smem, notes, q_full, q_free, k_full, k_free, v_full, v_free, taken_ptr,
    block_table_ptr, query_start_ptr, context_len_ptr, num_sequences, v_slot, table_stride,
    HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, NOTES: gl.constexpr, SEQUENCES: gl.constexpr,
):  # fmt: skip
    """Bring what is needed for one pair (tile of queries, KV head) after the other."""
    QUERIES: gl.constexpr = 2 * ROWS // GROUP
    BOX_ROWS: gl.constexpr = q_desc.block_type.shape[0]
    index = gl.arange(0, SEQUENCES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    exists = index < num_sequences
    starts = gl.load(query_start_ptr + index, mask=exists, other=0)
    tiles = (gl.load(query_start_ptr + index + 1, mask=exists, other=0) - starts + QUERIES - 1) // QUERIES
    total = gl.sum(tiles, 0) * HEADS
    programs = gl.num_programs(0)
    done = 0  # tiles of keys
    wave = 0
    pair = gl.program_id(0)
    # Below, a wait for the phase before the first phase (parity 1) returns at once.
    while pair < total:
        kv_head = pair % HEADS
        tile = total // HEADS - 1 - pair // HEADS
        sequence, begin = locate(tile, tiles, index)
        first_query = (tile - begin) * QUERIES
        query_start = gl.load(query_start_ptr + sequence)
        query_len = gl.load(query_start_ptr + sequence + 1) - query_start
        context_len = gl.load(context_len_ptr + sequence)
        before = context_len - query_len + first_query
        # Tiles of keys. No context is so short that there are none, but a 0 would tell the groups that all is done.
        n = gl.maximum(1, gl.cdiv(gl.minimum(context_len, before + QUERIES), KEYS))

        buffer = wave % 2
        mbarrier.wait(q_free.index(buffer), (wave // 2 % 2) ^ 1)
        _write_note(notes.index(buffer * NOTES), n)
        _write_note(notes.index(buffer * NOTES + 1), kv_head)
        _write_note(notes.index(buffer * NOTES + 2), first_query)
        _write_note(notes.index(buffer * NOTES + 3), query_start)
        _write_note(notes.index(buffer * NOTES + 4), query_len)
        _write_note(notes.index(buffer * NOTES + 5), context_len)
        mbarrier.expect(q_full.index(buffer), 2 * ROWS * HEAD_DIM * 2)
        for row in gl.static_range(0, 2 * ROWS, BOX_ROWS):
            head = kv_head * GROUP + row // QUERIES
            token = query_start + first_query + row % QUERIES
            place = q_smem.index(buffer * 2 + row // ROWS).slice(row % ROWS, BOX_ROWS)
            tma.async_copy_global_to_shared(q_desc, [token, head * HEAD_DIM], q_full.index(buffer), place)
        table_ptr = block_table_ptr + sequence * table_stride
        column = kv_head * HEAD_DIM
        slot = 0
        for i in range(0, n + 1):  # a tile's keys, and then the values of the one before it, as they are needed
            old_slot = slot
            if i < n:
                start = (n - 1 - i) * KEYS
                slot = gl.load(table_ptr + start // BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE
                stage = (done + i) % STAGES
                mbarrier.wait(k_free.index(stage), ((done + i) // STAGES % 2) ^ 1)
                mbarrier.expect(k_full.index(stage), KEYS * HEAD_DIM * 2)
                tma.async_copy_global_to_shared(kv_desc, [slot, column], k_full.index(stage), k_smem.index(stage))
            if i > 0:
                stage = (done + i - 1) % STAGES
                ready = v_full.index(stage)
                mbarrier.wait(v_free.index(stage), ((done + i - 1) // STAGES % 2) ^ 1)
                mbarrier.expect(ready, KEYS * HEAD_DIM * 2)
                tma.async_copy_global_to_shared(kv_desc, [old_slot + v_slot, column], ready, v_smem.index(stage))
        done += n
        wave += 1
        pair = programs + gl.atomic_add(taken_ptr, 1)
    buffer = wave % 2
    mbarrier.wait(q_free.index(buffer), (wave // 2 % 2) ^ 1)
    _write_note(notes.index(buffer * NOTES), 0)  # no more pairs
    mbarrier.arrive(q_full.index(buffer))
    # The last program has seen all others take their last number, and prepares the next launch.
    if gl.atomic_add(taken_ptr + 1, 1) == programs - 1:
        gl.store(taken_ptr, 0)
        gl.store(taken_ptr + 1, 0)


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    group: gl.constexpr, out_ptr, q_smem, k_smem, v_smem, notes, q_full, q_free, k_full, k_free, v_full, v_free, scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, NOTES: gl.constexpr,
):  # fmt: skip
    QUERIES: gl.constexpr = 2 * ROWS // GROUP
    B: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, B))[None, :]
    done = 0
    wave = 0
    mbarrier.wait(q_full.index(0), 0)
    n = _read_note(notes.index(0))
    while n > 0:
        buffer = wave % 2
        kv_head = _read_note(notes.index(buffer * NOTES + 1))
        first_query = _read_note(notes.index(buffer * NOTES + 2))
        query_start = _read_note(notes.index(buffer * NOTES + 3))
        query_len = _read_note(notes.index(buffer * NOTES + 4))
        context_len = _read_note(notes.index(buffer * NOTES + 5))
        before = context_len - query_len + first_query  # keys that precede the tile's first query
        q = q_smem.index(buffer * 2 + group)
        position = before + (group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S))) % QUERIES
        q_ready, q_phase = q_full.index(buffer), wave // 2 % 2

        if n == 1:
            m, denom, acc, p, repair = only_tile(
                q, k_smem, v_smem, k_full, k_free, v_full, done, context_len, position, scale,
                HEAD_DIM, ROWS, KEYS, STAGES, S, A, P,
            )  # fmt: skip
        else:
            m, denom, acc, p, repair = first_two_tiles(
                q, k_smem, v_smem, k_full, k_free, v_full, v_free, q_ready, q_phase, n, done, context_len, position,
                scale, HEAD_DIM, ROWS, KEYS, STAGES, S, A, P,
            )  # fmt: skip
        # From this tile on, all queries see all keys.
        first = gl.minimum(n, 2)
        unmasked = gl.minimum(gl.maximum(first, n - (before + 1) // KEYS), n)
        m, denom, acc, p, repair = further_tiles(
            q, k_smem, v_smem, k_full, k_free, v_full, v_free, q_ready, q_phase, m, denom, acc, p, repair,
            first, unmasked, n, done, position, scale, True, ROWS, KEYS, STAGES, S, A, P,
        )  # fmt: skip
        m, denom, acc, p, repair = further_tiles(
            q, k_smem, v_smem, k_full, k_free, v_full, v_free, q_ready, q_phase, m, denom, acc, p, repair,
            unmasked, n, n, done, position, scale, False, ROWS, KEYS, STAGES, S, A, P,
        )  # fmt: skip
        done += n
        mbarrier.arrive(q_free.index(buffer))
        stage = (done - 1) % STAGES
        acc = acc * gl.convert_layout(repair, gl.SliceLayout(1, A))[:, None]
        mbarrier.wait(v_full.index(stage), (done - 1) // STAGES % 2)
        acc = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
        row = group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, B))
        query, head = first_query + row % QUERIES, kv_head * GROUP + row // QUERIES
        offset = ((query_start + query).to(gl.int64) * (HEADS * GROUP) + head) * HEAD_DIM
        acc, p = warpgroup_mma_wait(0, [acc, p])
        mbarrier.arrive(v_free.index(stage))
        acc = acc * gl.convert_layout(1 / denom, gl.SliceLayout(1, A))[:, None]
        out = gl.convert_layout(acc.to(q.dtype), B)
        gl.store(out_ptr + offset[:, None] + dim, out, mask=(query < query_len)[:, None])
        wave += 1
        mbarrier.wait(q_full.index(wave % 2), wave // 2 % 2)
        n = _read_note(notes.index(wave % 2 * NOTES))


@gluon.jit(
    do_not_specialize=["num_sequences", "table_stride"],
    do_not_specialize_on_alignment=["taken_ptr", "block_table_ptr", "query_start_ptr", "context_len_ptr"],
)
def _warp_specialized_prefill_kernel(  # type: ignore[no-untyped-def]
    q_desc, kv_desc, out_ptr, taken_ptr, block_table_ptr, query_start_ptr, context_len_ptr,
    num_sequences, scale, v_slot, table_stride,
    HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, NOTES: gl.constexpr, SEQUENCES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2 * 2, ROWS, HEAD_DIM], q_desc.layout)  # of two tiles of queries
    k_smem = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, KEYS, HEAD_DIM], kv_desc.layout)
    v_smem = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, KEYS, HEAD_DIM], kv_desc.layout)
    notes = gl.allocate_shared_memory(gl.int32, [2 * NOTES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Q, with the notes, or K or V of a stage has arrived ("full"), or both groups are done with it ("free").
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (0, out_ptr, q_smem, k_smem, v_smem, notes, q_full, q_free, k_full, k_free, v_full, v_free,
                       scale, HEADS, GROUP, HEAD_DIM, ROWS, KEYS, STAGES, NOTES)),
            (_consume, (1, out_ptr, q_smem, k_smem, v_smem, notes, q_full, q_free, k_full, k_free, v_full, v_free,
                       scale, HEADS, GROUP, HEAD_DIM, ROWS, KEYS, STAGES, NOTES)),
            (_produce, (q_desc, kv_desc, q_smem, k_smem, v_smem, notes, q_full, q_free, k_full, k_free, v_full, v_free,
                      taken_ptr, block_table_ptr, query_start_ptr, context_len_ptr, num_sequences, v_slot,
                      table_stride, HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, ROWS, KEYS, STAGES, NOTES, SEQUENCES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def warp_specialized_prefill(inputs: PagedInputs, taken: Tensor, num_programs: int, *, first_sequence: int = 0) -> None:
    """`paged_prefill` for what `fits` accepts.

    taken: [2] int32, for launches of one stream, 0 between two launches: how many tiles were given out beyond the first
        tile of each program, which is its own; and how many programs are done.
    num_programs: at most. Each has a first tile, a long one, even if it starts late.
    """
    q, kv, block_table, query_start, context_len, scale, out, _ = inputs
    _, num_blocks, block_size, num_kv_heads, head_dim = kv.shape
    num_tokens, num_heads, _ = q.shape
    group = num_heads // num_kv_heads
    queries = 2 * ROWS // group
    num_sequences = context_len.shape[0] - first_sequence
    # Each sequence fills its tiles but for the last one.
    most_tiles = (num_tokens - first_sequence) // queries + num_sequences
    box = [min(ROWS, queries), head_dim]
    q_boxes = TensorDescriptor(q, [num_tokens, num_heads * head_dim], [q.stride(0), 1], box, BOX)
    kv_boxes = TensorDescriptor.from_tensor(kv.view(-1, num_kv_heads * head_dim), [KEYS, head_dim], BOX)
    _warp_specialized_prefill_kernel[(min(num_programs, num_kv_heads * most_tiles),)](
        q_boxes, kv_boxes, out, taken, block_table[first_sequence:], query_start[first_sequence:],
        context_len[first_sequence:], num_sequences, scale * LOG2_E, num_blocks * block_size, block_table.stride(0),
        HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, ROWS=ROWS, KEYS=KEYS, STAGES=STAGES,
        NOTES=NOTES, SEQUENCES=padded_sequences(num_sequences), PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS, num_warps=4,
    )  # fmt: skip
