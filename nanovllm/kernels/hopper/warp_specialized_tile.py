"""What a group of warps of `warp_specialized_prefill.py` does with one tile of keys after the other.

Between two calls, the weights p of the last tile have not met their values yet, and the sum `acc` of the tiles before
it is still to be multiplied with `repair`. Both happen beside the product with the next keys. Barriers in shared memory
say that K or V of a stage has arrived (full), or that a group is done with it (free). `q_ready` is the barrier of Q,
which has arrived: its phase `q_phase` is over. m and denom are the softmax's running maximum and sum of each row, in
base 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


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
def _zero_past_context(v, start, context_len, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros for the values past the context: NaN times p = 0 would stay NaN. Both groups write the same."""
    if start + KEYS > context_len:
        B: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
        for r in gl.static_range(0, KEYS, 32):
            if start + r + 32 > context_len:
                part = v.slice(r, 32)
                key = start + r + gl.arange(0, 32, gl.SliceLayout(1, B))
                value = part.load(B)
                part.store(gl.where((key < context_len)[:, None], value, gl.zeros_like(value)))
        fence_async_shared()


@gluon.jit
def _softmax_under_product(  # type: ignore[no-untyped-def]
    score, acc_later, p_before, v_free, old, q_ready, q_phase, m, denom, scale, position, start,
    MASKED: gl.constexpr, KEYS: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """The softmax of a tile of keys, while the product with the values of the one before it (in stage `old`) runs.

    The last value returned is what that product has to be multiplied with.
    """
    m, denom, repair, weight = _softmax(score, m, denom, scale, position, start, MASKED, KEYS, S)
    # This wait is for Q, which is there, so it returns at once. It is needed as a branch only: without a branch between
    # them ptxas, NVIDIA's assembler, puts the exponentials behind the next wait, that for the product. LLVM does the
    # same, unless the next wait names them as its operands. That wait also keeps the old weights alive.
    mbarrier.wait(q_ready, q_phase)
    acc, _, weight, m, denom, repair = warpgroup_mma_wait(0, [acc_later, p_before, weight, m, denom, repair])
    mbarrier.arrive(v_free.index(old))
    return m, denom, acc, gl.convert_layout(weight.to(p_before.dtype), P), repair


@gluon.jit
def only_tile(  # type: ignore[no-untyped-def]
    q, k_smem, v_smem, k_full, k_free, v_full, done, context_len, position, scale,
    HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr,
    A: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """The only tile of keys."""
    stage, phase = done % STAGES, done // STAGES % 2
    m = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, S))
    denom = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
    mbarrier.wait(k_full.index(stage), phase)
    zero = gl.zeros([ROWS, KEYS], gl.float32, S)
    score = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, [score])
    mbarrier.arrive(k_free.index(stage))
    m, denom, _, weight = _softmax(score, m, denom, scale, position, 0, True, KEYS, S)
    mbarrier.wait(v_full.index(stage), phase)
    _zero_past_context(v_smem.index(stage), 0, context_len, KEYS, HEAD_DIM)
    one = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, S))
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, A)
    return m, denom, acc, gl.convert_layout(weight.to(q.dtype), P), one


@gluon.jit
def first_two_tiles(  # type: ignore[no-untyped-def]
    q, k_smem, v_smem, k_full, k_free, v_full, v_free, q_ready, q_phase, n, done, context_len, position, scale,
    HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr,
    A: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """The first two tiles of keys together: there are no weights yet that could be multiplied meanwhile."""
    old, old_phase, start = done % STAGES, done // STAGES % 2, (n - 1) * KEYS
    stage, phase = (done + 1) % STAGES, (done + 1) // STAGES % 2
    m = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, S))
    denom = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
    zero = gl.zeros([ROWS, KEYS], gl.float32, S)
    mbarrier.wait(k_full.index(old), old_phase)
    first = warpgroup_mma(q, k_smem.index(old).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(k_full.index(stage), phase)
    score = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    first = warpgroup_mma_wait(1, [first])
    mbarrier.arrive(k_free.index(old))
    m, denom, _, weight = _softmax(first, m, denom, scale, position, start, True, KEYS, S)
    mbarrier.wait(v_full.index(old), old_phase)
    _zero_past_context(v_smem.index(old), start, context_len, KEYS, HEAD_DIM)
    p = gl.convert_layout(weight.to(q.dtype), P)
    empty = gl.zeros([ROWS, HEAD_DIM], gl.float32, A)
    acc_later = warpgroup_mma(p, v_smem.index(old), empty, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(1, [score])
    mbarrier.arrive(k_free.index(stage))
    return _softmax_under_product(
        score, acc_later, p, v_free, old, q_ready, q_phase, m, denom, scale, position, start - KEYS,
        True, KEYS, S, P,
    )  # fmt: skip


@gluon.jit
def further_tiles(  # type: ignore[no-untyped-def]
    q, k_smem, v_smem, k_full, k_free, v_full, v_free, q_ready, q_phase, m, denom, acc, p, repair, first, last, n,
    done, position, scale, MASKED: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    S: gl.constexpr, A: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """The keys of each tile, and the values of the one before it, whose weights are p."""
    for i in range(first, last):
        stage, old = (done + i) % STAGES, (done + i - 1) % STAGES
        mbarrier.wait(k_full.index(stage), (done + i) // STAGES % 2)
        zero = gl.zeros([ROWS, KEYS], gl.float32, S)
        score = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        acc = acc * gl.convert_layout(repair, gl.SliceLayout(1, A))[:, None]
        mbarrier.wait(v_full.index(old), (done + i - 1) // STAGES % 2)
        acc_later = warpgroup_mma(p, v_smem.index(old), acc, is_async=True)
        score = warpgroup_mma_wait(1, [score])
        mbarrier.arrive(k_free.index(stage))
        m, denom, acc, p, repair = _softmax_under_product(
            score, acc_later, p, v_free, old, q_ready, q_phase, m, denom, scale, position, (n - 1 - i) * KEYS,
            MASKED, KEYS, S, P,
        )  # fmt: skip
    return m, denom, acc, p, repair
