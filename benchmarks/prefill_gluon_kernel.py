"""The kernel of `benchmarks/prefill_gluon.py`, which says what it is about: one warp brings keys, two groups compute.

Every program goes through its share of (tile of queries, head) pairs, each warp by itself, and meets the others at
barriers in shared memory: K or V has arrived, both groups are done with it, a group may multiply.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nanovllm.kernels.paged_tile import locate


@gluon.jit
def _share(query_start_ptr, num_sequences, HEADS: gl.constexpr, QUERIES: gl.constexpr, SEQUENCES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of all (tile, head) pairs, how many are this program's, and the numbers from which `_find` finds each."""
    index = gl.arange(0, SEQUENCES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    exists = index < num_sequences
    starts = gl.load(query_start_ptr + index, mask=exists, other=0)
    tiles = (gl.load(query_start_ptr + index + 1, mask=exists, other=0) - starts + QUERIES - 1) // QUERIES
    total = gl.sum(tiles, 0) * HEADS
    programs = gl.num_programs(0)
    waves = total // programs
    place = gl.program_id(0)
    if waves % 2 == 1:
        place = programs - 1 - place
    if place < total % programs:
        waves += 1
    return index, tiles, total, waves


@gluon.jit
def _find(  # type: ignore[no-untyped-def]
    wave, index, tiles, total, query_start_ptr, context_len_ptr,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Every other wave is dealt out backwards, so that who got a long tile gets a short one."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if wave % 2 == 1:
        place = programs - 1 - place
    pair = wave * programs + place
    tile = total // HEADS - 1 - pair // HEADS
    sequence, begin = locate(tile, tiles, index)
    first_query = (tile - begin) * QUERIES
    query_start = gl.load(query_start_ptr + sequence)
    query_len = gl.load(query_start_ptr + sequence + 1) - query_start
    context_len = gl.load(context_len_ptr + sequence)
    before = context_len - query_len + first_query
    n = gl.cdiv(gl.minimum(context_len, before + QUERIES), KEYS)
    return pair % HEADS, sequence, first_query, query_start, query_len, context_len, before, n


@gluon.jit
def _bring(  # type: ignore[no-untyped-def]
    kv_desc, k_smem, v_smem, bars, block_table_ptr, query_start_ptr, context_len_ptr, num_sequences, v_row,
    table_stride,
    HEADS: gl.constexpr, QUERIES: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, SEQUENCES: gl.constexpr,
):  # fmt: skip
    index, tiles, total, waves = _share(query_start_ptr, num_sequences, HEADS, QUERIES, SEQUENCES)
    done = 0
    for wave in range(0, waves):
        kv_head, sequence, _, _, _, _, _, n = _find(
            wave, index, tiles, total, query_start_ptr, context_len_ptr, HEADS, QUERIES, KEYS
        )
        table_ptr = block_table_ptr + sequence * table_stride
        column = kv_head * HEAD_DIM
        for i in range(0, n):
            start = (n - 1 - i) * KEYS
            slot = gl.load(table_ptr + start // BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE
            stage, free = (done + i) % STAGES, (done + i) // STAGES % 2 ^ 1
            ready = bars.index(stage)
            mbarrier.wait(bars.index(2 * STAGES + stage), free)
            mbarrier.expect(ready, KEYS * HEAD_DIM * 2)
            tma.async_copy_global_to_shared(kv_desc, [slot, column], ready, k_smem.index(stage))
            ready = bars.index(STAGES + stage)
            mbarrier.wait(bars.index(3 * STAGES + stage), free)
            mbarrier.expect(ready, KEYS * HEAD_DIM * 2)
            tma.async_copy_global_to_shared(kv_desc, [slot + v_row, column], ready, v_smem.index(stage))
        done += n


@gluon.jit
def _softmax(  # type: ignore[no-untyped-def]
    score, m, denom, scale, position, start, MASKED: gl.constexpr, KEYS: gl.constexpr, S: gl.constexpr
):
    if MASKED:
        key = start + gl.arange(0, KEYS, gl.SliceLayout(0, S))
        score = gl.where(key[None, :] <= position[:, None], score, float("-inf"))
    new_m = gl.maximum(m, gl.max(score, 1) * scale)
    p = gl.exp2(score * scale - new_m[:, None])
    repair = gl.exp2(m - new_m)
    return new_m, denom * repair + gl.sum(p, 1), repair, p


@gluon.jit
def _hide_garbage(v, start, context_len, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros for the values past the context: NaN times p = 0 would stay NaN. Both groups write the same."""
    if start + KEYS > context_len:
        B: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        for r in gl.static_range(0, KEYS, 32):
            part = v.slice(r, 32)
            key = start + r + gl.arange(0, 32, gl.SliceLayout(1, B))
            value = part.load(B)
            part.store(gl.where((key < context_len)[:, None], value, gl.zeros_like(value)))
        fence_async_shared()


@gluon.jit
def _more(  # type: ignore[no-untyped-def]
    half: gl.constexpr, q_smem, k_smem, v_smem, bars, m, denom, acc, p, first, last, n, done, turn, context_len,
    position, scale, MASKED: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, S: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """The keys of tile i, and the values of the one before it, whose weights are p."""
    for i in range(first, last):
        stage, old = (done + i) % STAGES, (done + i - 1) % STAGES
        mbarrier.wait(bars.index(stage), (done + i) // STAGES % 2)
        if TURNS:  # one group's products go while the other takes exponentials
            mbarrier.wait(bars.index(4 * STAGES + half), (turn + i) % 2 ^ half)
        zero = gl.zeros([ROWS, KEYS], gl.float32, S)
        score = warpgroup_mma(q_smem, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(bars.index(STAGES + old), (done + i - 1) // STAGES % 2)
        if MASKED:
            _hide_garbage(v_smem.index(old), (n - i) * KEYS, context_len, KEYS, HEAD_DIM)
        acc_later = warpgroup_mma(p, v_smem.index(old), acc, is_async=True)
        if TURNS:
            mbarrier.arrive(bars.index(4 * STAGES + 1 - half))
        score = warpgroup_mma_wait(1, [score])
        mbarrier.arrive(bars.index(2 * STAGES + stage))
        m, denom, repair, weight = _softmax(score, m, denom, scale, position, (n - 1 - i) * KEYS, MASKED, KEYS, S)
        acc = warpgroup_mma_wait(0, [acc_later])
        mbarrier.arrive(bars.index(3 * STAGES + old))
        acc = acc * gl.convert_layout(repair, gl.SliceLayout(1, A))[:, None]
        p = gl.convert_layout(weight.to(p.dtype), p.type.layout)
    return m, denom, acc, p


@gluon.jit
def _attend(  # type: ignore[no-untyped-def]
    half: gl.constexpr, q_ptr, out_ptr, q_smem, k_smem, v_smem, bars, query_start_ptr, context_len_ptr,
    num_sequences, scale, q_stride,
    HEADS: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr, SEQUENCES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    QUERIES: gl.constexpr = 2 * ROWS // GROUP
    B: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    index, tiles, total, waves = _share(query_start_ptr, num_sequences, HEADS, QUERIES, SEQUENCES)
    row = half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, B))
    row_of_score = half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, B))[None, :]
    done = 0
    for wave in range(0, waves):
        kv_head, _, first_query, query_start, query_len, context_len, before, n = _find(
            wave, index, tiles, total, query_start_ptr, context_len_ptr, HEADS, QUERIES, KEYS
        )
        unmasked = gl.minimum(n, n - (before + 1) // KEYS + 1)  # from this one on, all queries see all keys
        query, head = first_query + row // GROUP, kv_head * GROUP + row % GROUP
        used = (query < query_len)[:, None]
        token = (query_start + query).to(gl.int64)
        q_smem.store(gl.load(q_ptr + (token * q_stride + head * HEAD_DIM)[:, None] + dim, mask=used, other=0.0))
        fence_async_shared()
        position = before + row_of_score // GROUP
        m = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, S))
        denom = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, A)

        stage = done % STAGES
        mbarrier.wait(bars.index(stage), done // STAGES % 2)
        zero = gl.zeros([ROWS, KEYS], gl.float32, S)
        score = warpgroup_mma(q_smem, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, [score])
        mbarrier.arrive(bars.index(2 * STAGES + stage))
        m, denom, _, weight = _softmax(score, m, denom, scale, position, (n - 1) * KEYS, True, KEYS, S)
        p = gl.convert_layout(weight.to(q_smem.dtype), P)
        m, denom, acc, p = _more(
            half, q_smem, k_smem, v_smem, bars, m, denom, acc, p, 1, unmasked, n, done, done - wave, context_len,
            position, scale, True, ROWS, KEYS, HEAD_DIM, STAGES, TURNS, S, A,
        )  # fmt: skip
        m, denom, acc, p = _more(
            half, q_smem, k_smem, v_smem, bars, m, denom, acc, p, unmasked, n, n, done, done - wave, context_len,
            position, scale, False, ROWS, KEYS, HEAD_DIM, STAGES, TURNS, S, A,
        )  # fmt: skip
        done += n
        stage = (done - 1) % STAGES
        mbarrier.wait(bars.index(STAGES + stage), (done - 1) // STAGES % 2)
        if n == 1:
            _hide_garbage(v_smem.index(stage), 0, context_len, KEYS, HEAD_DIM)
        acc = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(bars.index(3 * STAGES + stage))
        acc = acc / gl.convert_layout(denom, gl.SliceLayout(1, A))[:, None]
        out = gl.convert_layout(acc.to(q_smem.dtype), B)
        offset = (token * (HEADS * GROUP) + head) * HEAD_DIM
        gl.store(out_ptr + offset[:, None] + dim, out, mask=used)


@gluon.jit(
    do_not_specialize=["num_sequences", "table_stride"],
    do_not_specialize_on_alignment=["block_table_ptr", "query_start_ptr", "context_len_ptr"],
)
def prefill_kernel(  # type: ignore[no-untyped-def]
    q_ptr, kv_desc, out_ptr, block_table_ptr, query_start_ptr, context_len_ptr,
    num_sequences, scale, q_stride, v_row, table_stride,
    HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, SEQUENCES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    q_smem = gl.allocate_shared_memory(kv_desc.dtype, [2, ROWS, HEAD_DIM], kv_desc.layout)
    k_smem = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, KEYS, HEAD_DIM], kv_desc.layout)
    v_smem = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, KEYS, HEAD_DIM], kv_desc.layout)
    # STAGES each: K has arrived, V has arrived, K is done with, V is done with. And two: a group may multiply.
    bars = gl.allocate_shared_memory(gl.int64, [4 * STAGES + 2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(bars.index(2 * STAGES + i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(bars.index(4 * STAGES + i), count=1)
    fence_async_shared()
    QUERIES: gl.constexpr = 2 * ROWS // GROUP
    gl.warp_specialize(
        [
            (_attend, (0, q_ptr, out_ptr, q_smem.index(0), k_smem, v_smem, bars, query_start_ptr, context_len_ptr,
                       num_sequences, scale, q_stride, HEADS, GROUP, ROWS, KEYS, HEAD_DIM, STAGES, SEQUENCES, TURNS)),
            (_attend, (1, q_ptr, out_ptr, q_smem.index(1), k_smem, v_smem, bars, query_start_ptr, context_len_ptr,
                       num_sequences, scale, q_stride, HEADS, GROUP, ROWS, KEYS, HEAD_DIM, STAGES, SEQUENCES, TURNS)),
            (_bring, (kv_desc, k_smem, v_smem, bars, block_table_ptr, query_start_ptr, context_len_ptr, num_sequences,
                      v_row, table_stride, HEADS, QUERIES, BLOCK_SIZE, KEYS, HEAD_DIM, STAGES, SEQUENCES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
