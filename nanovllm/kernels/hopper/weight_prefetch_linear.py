"""A linear layer whose weights are on their way to shared memory before its turn has come. For Hopper GPUs.

The idea is that of CUTLASS's example 63, "GEMM with weight prefetch". `tiled_linear` asks for weights ahead of time as
well, but they get no further than the L2 cache: when a tile is copied to shared memory is the compiler's choice, and it
copies after the wait for the predecessor. This kernel is written in Gluon, the language below Triton, where the copies
are explicit. A program walks along the inputs in steps. First it orders the weights of as many steps as have room, by
Hopper's copy engine (TMA). Then it waits for the predecessor. Then only the input is missing, which is small. A barrier
in shared memory counts the bytes of each step that have arrived.

The product is W x^T, so that the 64 rows of Hopper's matrix instruction are output columns. With a gate, eight rows of
the gate and eight of the up projection alternate: a thread then has both numbers of a column, and multiplies them
itself.

Weights may be in FP8. They are widened on the way from shared memory to the registers, from which tensor cores take
them, while the product before is computed. That is exact: bf16 and fp16 have every number of e4m3. The scales are
applied to sums in float32: a scale per channel once, at the end, and scales of blocks to the sums of each block.

`nanovllm/kernels/cards.toml` says for which layers and numbers of tokens this kernel is used, and
`kernels/fp8/fp8_linear.py` for weights in FP8. Triton's interpreter cannot run Gluon.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import CACHE_LINE, overlaps_launches, prefetch_l2
from nanovllm.kernels.linear.tiled_linear import MAX_SPLITS, PROGRAMS, num_splits

X_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)
WEIGHT_LAYOUTS = {size: gl.NVMMASharedLayout(128, 8 * size, 4) for size in (1, 2)}  # by bytes of a weight
LINES = {1: 2, 2: 8}  # by bytes of a weight: cache lines of each row, behind the steps that have room, brought to L2
WEIGHT_ROWS = 64  # rows of the weights of a program: as many output columns, half of them if gated
PRODUCT_INNER = gl.constexpr(128)  # inputs of a product with weights in FP8: those that share a scale of blocks
SHARED_BYTES = 224 * 1024  # of shared memory, for all programs on a multiprocessor
MIN_STAGES, MAX_STAGES = 3, 6  # steps under way: fewer leave the memory idle, more were no faster
FEW_TOKENS = 64  # with more the inputs are cut in two at most: the norm reads every part of every token


class PrefetchTile(NamedTuple):
    """Tokens of a program, inputs of a step of its loop, steps under way, parts that the inputs are cut into."""

    tokens: int
    inner: int
    stages: int
    splits: int


@cache
def choose_tile(
    num_tokens: int, columns: int, inputs: int, max_tile_tokens: int, gated: bool, partial: bool
) -> PrefetchTile:
    """The layout with as many steps under way as still let all programs run at once.

    A second wave of programs would wait for the first. columns: of the result. max_tile_tokens: of a program.
    """
    tokens = min(max_tile_tokens, max(16, triton.next_power_of_2(num_tokens)))
    tiles = columns // (WEIGHT_ROWS // 2 if gated else WEIGHT_ROWS) * triton.cdiv(num_tokens, tokens)
    splits = min(num_splits(inputs, tiles, 128), MAX_SPLITS if num_tokens <= FEW_TOKENS else 2) if partial else 1
    shared = SHARED_BYTES // min(3, triton.cdiv(tiles * splits, PROGRAMS))
    input_bytes = 2 * (WEIGHT_ROWS + tokens)  # of a step, for each of its inputs
    inner = 128 if shared >= MIN_STAGES * 128 * input_bytes else 64
    return PrefetchTile(tokens, inner, max(MIN_STAGES, min(MAX_STAGES, shared // (inner * input_bytes))), splits)


@cache
def choose_fp8_tile(num_tokens: int, columns: int, inputs: int, gated: bool, partial: bool) -> PrefetchTile:
    """`choose_tile` for weights in FP8: the longest steps of which three have room, and four of them at most.

    To widen takes nearly as long as to read. So the barriers of a step have to be rare, and long parts of the inputs
    have two programs on a multiprocessor.
    """
    tokens = min(64, max(8, triton.next_power_of_2(num_tokens)))
    tiles = columns // (WEIGHT_ROWS // 2 if gated else WEIGHT_ROWS) * triton.cdiv(num_tokens, tokens)
    splits = num_splits(inputs, tiles, 128) if partial else 1
    if partial and splits < MAX_SPLITS and inputs // splits >= 4096 and num_tokens <= FEW_TOKENS:
        splits *= 2
    shared = SHARED_BYTES // min(3, triton.cdiv(tiles * splits, PROGRAMS))
    depth, inner, input_bytes = inputs // splits, 512, WEIGHT_ROWS + 2 * tokens
    while inner > 128 and (depth % inner or depth < 4 * inner or MIN_STAGES * inner * input_bytes > shared):
        inner //= 2
    return PrefetchTile(
        tokens, inner, max(MIN_STAGES, min(max(4, 1024 // inner), shared // (inner * input_bytes))), splits
    )


@gluon.jit
def _widened(tile, begin: gl.constexpr, product: gl.constexpr, dtype: gl.constexpr):  # type: ignore[no-untyped-def]
    """Weights in FP8, from shared memory to registers, in the dtype of the input. By way of fp16 and fp32: Hopper has
    no instruction from FP8 to bf16, and a slow one from fp16 to bf16."""
    tile = tile.slice(begin, PRODUCT_INNER, 1)
    return tile.load(gl.DotOperandLayout(0, product, 2)).to(gl.float16).to(gl.float32).to(dtype)


@gluon.jit(do_not_specialize=["num_tokens", "steps"])
def _weight_prefetch_linear_kernel(  # type: ignore[no-untyped-def]
    x_desc, weight_desc, weight_ptr, scale_ptr, bias_ptr, out_ptr, num_tokens, inputs, outputs, steps,
    TOKENS: gl.constexpr, COLUMNS: gl.constexpr, INNER: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
    REFILLS: gl.constexpr, LINES: gl.constexpr, LINE: gl.constexpr, SCALE_ROWS: gl.constexpr, BIAS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = HALVES * COLUMNS
    BYTES: gl.constexpr = (ROWS * weight_desc.dtype.primitive_bitwidth // 8 + TOKENS * 2) * INNER
    # The last tile ends with the last token: computing some twice is cheaper than copying rows that do not exist.
    first_token = gl.maximum(gl.minimum(gl.program_id(0) * TOKENS, num_tokens - TOKENS), 0)
    first_column = gl.program_id(1) * COLUMNS
    part = gl.program_id(2)
    begin = part * steps
    w_tiles = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, COLUMNS // 8, HALVES, 8, INNER], weight_desc.layout)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, INNER], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(STAGES):
        bar, start = full.index(i), (begin + i) * INNER
        mbarrier.expect(bar, BYTES)
        tma.async_copy_global_to_shared(weight_desc, [first_column // 8, 0, 0, start], bar, w_tiles.index(i))
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])
    if SCALE_ROWS:
        row = gl.arange(0, ROWS, gl.SliceLayout(1, product))
        if HALVES == 2:
            row = row // 16 * 8 + row % 8 + row // 8 % 2 * outputs
        scale_ptr += (first_column + row) // SCALE_ROWS * (1 if SCALE_ROWS == 1 else inputs // PRODUCT_INNER)
        if SCALE_ROWS > 1:
            scale_ptr += begin * (INNER // PRODUCT_INNER)
        scale = gl.load(scale_ptr)
    if PDL:
        gdc_launch_dependents()
        if REFILLS:
            over: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LINES, LINES], [gl.num_warps(), 1], [1, 0])
            row = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(1, over))
            line = (begin + STAGES) * INNER + gl.arange(0, LINES, gl.SliceLayout(0, over)) * LINE
            line = gl.where(line < (begin + steps) * INNER, line, begin * INNER)[None, :]
            for half in gl.static_range(HALVES):
                ahead = weight_ptr + (half * outputs + row).to(gl.int64)[:, None] * inputs + line
                prefetch_l2(ahead)
        gdc_wait()
    for i in gl.static_range(STAGES):
        bar, start = full.index(i), (begin + i) * INNER
        tma.async_copy_global_to_shared(x_desc, [first_token, start], bar, x_tiles.index(i))

    acc = gl.zeros([ROWS, TOKENS], gl.float32, product)
    if SCALE_ROWS:
        mbarrier.wait(full.index(0), 0)
        rows = _widened(w_tiles.index(0).reshape([ROWS, INNER]), 0, product, x_desc.dtype)
        for step in range(steps):
            stage, following = step % STAGES, step + 1
            for begun in gl.static_range(0, INNER, PRODUCT_INNER):
                # While tensor cores multiply these weights, the next ones are widened.
                next_stage = stage
                if begun + PRODUCT_INNER == INNER:
                    next_stage = following % STAGES
                    mbarrier.wait(full.index(next_stage), (following // STAGES) & 1, pred=following < steps)
                x = x_tiles.index(stage).slice(begun, PRODUCT_INNER, 1).permute((1, 0))
                sums = warpgroup_mma(rows, x, acc, use_acc=SCALE_ROWS == 1, is_async=True)
                next_rows = w_tiles.index(next_stage).reshape([ROWS, INNER])
                next_rows = _widened(next_rows, (begun + PRODUCT_INNER) % INNER, product, x_desc.dtype)
                if SCALE_ROWS > 1:
                    group = step * (INNER // PRODUCT_INNER) + begun // PRODUCT_INNER
                    next_scale = gl.load(scale_ptr + gl.minimum(group + 1, steps * (INNER // PRODUCT_INNER) - 1))
                    sums, rows, next_rows = warpgroup_mma_wait(0, (sums, rows, next_rows))
                    acc += sums * scale[:, None]
                    scale = next_scale
                else:
                    acc, rows, next_rows = warpgroup_mma_wait(0, (sums, rows, next_rows))
                rows = next_rows
            if REFILLS:
                debug_barrier()
                refill = step + STAGES < steps
                bar, start = full.index(stage), (begin + step + STAGES) * INNER
                mbarrier.expect(bar, BYTES, pred=refill)
                tma.async_copy_global_to_shared(
                    weight_desc, [first_column // 8, 0, 0, start], bar, w_tiles.index(stage), pred=refill
                )
                tma.async_copy_global_to_shared(x_desc, [first_token, start], bar, x_tiles.index(stage), pred=refill)
        if SCALE_ROWS == 1:
            acc *= scale[:, None]
    else:
        for step in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            rows = w_tiles.index(stage).reshape([ROWS, INNER])
            acc = warpgroup_mma(rows, x_tiles.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, (acc,))
            if REFILLS:
                # The product before this one is done, in all warps: its tiles can be overwritten.
                debug_barrier()
                free = (step + STAGES - 1) % STAGES
                refill = (step > 0) & (step + STAGES - 1 < steps)
                bar, start = full.index(free), (begin + step + STAGES - 1) * INNER
                mbarrier.expect(bar, BYTES, pred=refill)
                tma.async_copy_global_to_shared(
                    weight_desc, [first_column // 8, 0, 0, start], bar, w_tiles.index(free), pred=refill
                )
                tma.async_copy_global_to_shared(x_desc, [first_token, start], bar, x_tiles.index(free), pred=refill)
        acc = warpgroup_mma_wait(0, (acc,))
    debug_barrier()
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(i))

    if BIAS:
        acc += gl.load(bias_ptr + first_column + gl.arange(0, ROWS, gl.SliceLayout(1, product))).to(gl.float32)[:, None]
    if HALVES == 2:
        gate, up = gl.split(gl.permute(gl.reshape(acc, [COLUMNS // 8, 2, 8, TOKENS]), (0, 2, 3, 1)))
        acc = gl.reshape(gate / (1 + gl.exp(-gate)) * up, [COLUMNS, TOKENS])
    written: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    result = gl.convert_layout(gl.permute(acc, (1, 0)).to(out_ptr.dtype.element_ty), written)
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(1, written))
    column = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, written))
    out = out_ptr + (part * num_tokens + token).to(gl.int64)[:, None] * outputs + column[None, :]
    gl.store(out, result, mask=(token < num_tokens)[:, None])


def weight_prefetch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    tile: PrefetchTile,
    gated: bool = False,
    partial: bool = False,
) -> Tensor:
    """`tiled_linear` on a Hopper GPU, with S = tile.splits. The number of the result's columns is a multiple of 64.

    scale: the weights are in FP8, and this belongs to them as in `widening_linear`; of scales of blocks,
    tile.inner is 128.
    """
    num_tokens, inputs = x.shape
    halves, steps = 2 if gated else 1, inputs // (tile.splits * tile.inner)
    outputs, columns = weight.shape[0] // halves, WEIGHT_ROWS // halves
    shape = (tile.splits, num_tokens, outputs) if partial else (num_tokens, outputs)
    out = x.new_empty(shape, dtype=torch.float32 if partial else x.dtype)
    x_desc = TensorDescriptor(x, [num_tokens, inputs], [inputs, 1], [tile.tokens, tile.inner], X_LAYOUT)
    weight_desc = TensorDescriptor(
        weight, [outputs // 8, halves, 8, inputs], [8 * inputs, outputs * inputs, inputs, 1],
        [columns // 8, halves, 8, tile.inner], WEIGHT_LAYOUTS[weight.element_size()],
    )  # fmt: skip
    stages = min(tile.stages, steps)
    pdl = overlaps_launches(x.device)
    _weight_prefetch_linear_kernel[(triton.cdiv(num_tokens, tile.tokens), outputs // columns, tile.splits)](
        x_desc, weight_desc, weight, scale, bias, out, num_tokens, inputs, outputs, steps,
        TOKENS=tile.tokens, COLUMNS=columns, INNER=tile.inner, HALVES=halves, STAGES=stages, REFILLS=steps > stages,
        LINES=LINES[weight.element_size()], LINE=CACHE_LINE // weight.element_size(),
        SCALE_ROWS=0 if scale is None else len(weight) // len(scale), BIAS=bias is not None, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
