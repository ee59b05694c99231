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

*A handful of tokens.* With so few, kernels spend most of their time waiting for each other and for shared memory. Two
things help:
- Cuts. There would be too few programs of 64 columns each. So a program has fewer columns, and each column is cut into
  parts, which fill the 64 rows: row (c, p) has the inputs of part p of column c. The rows of x are cut in the same way.
  Only the products of equal parts are wanted, and they are summed. The other products cost nothing, since reading the
  weights takes longer.
- The norm inside. Before `norm_linear` no kernel computes the norm: every program computes it by itself, for all
  tokens. For this every program reads the residual stream of all tokens, and what is added to it. So with more tokens
  this is slower. And the layer before should not leave its result in several parts, so it is cut within programs, too.

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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
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
MIN_TOKENS = 8  # columns of the matrix instruction, at least
MIN_STAGES, MAX_STAGES = 3, 6  # steps under way: fewer leave the memory idle, more were no faster
MAX_CUTS = 8  # then the matrix instruction has eight columns for each token, the fewest that there are
MAX_NORM_NUMBERS = 4096  # tokens times inputs, all in registers: with more a kernel for the norm is faster
MAX_NORM_STAGES = 8  # all weights of a program
FEW_TOKENS = 64  # with more the inputs are cut in two at most: the norm reads every part of every token


class PrefetchTile(NamedTuple):
    """Tokens of a program, inputs of a step of its loop, steps under way, parts that the inputs are cut into.

    cuts: parts that the inputs are cut into within a program.
    """

    tokens: int
    inner: int
    stages: int
    splits: int
    cuts: int = 1


@cache
def choose_tile(
    num_tokens: int, columns: int, inputs: int, max_tile_tokens: int, gated: bool, partial: bool,
    *, handful: bool = False, norm: bool = False, num_stages: int | None = None,
) -> PrefetchTile:  # fmt: skip
    """The layout with as many steps under way as still let all programs run at once.

    A second wave of programs would wait for the first. columns: of the result. max_tile_tokens: of a program. handful:
    inputs may be cut within programs. norm: the norm is inside; then all inputs are in shared memory. num_stages: steps
    under way at most.
    """
    cuts = num_cuts(columns, inputs) if handful and not gated else 1
    least = MIN_TOKENS // cuts if norm or cuts > 1 else 16
    tokens = min(max_tile_tokens, max(least, triton.next_power_of_2(num_tokens)))
    tiles = columns * cuts // (WEIGHT_ROWS // 2 if gated else WEIGHT_ROWS) * triton.cdiv(num_tokens, tokens)
    splits = 1
    if partial and cuts == 1:
        splits = min(num_splits(inputs, tiles, 128), MAX_SPLITS if num_tokens <= FEW_TOKENS else 2)
    shared = SHARED_BYTES // min(3, triton.cdiv(tiles * splits, PROGRAMS))
    input_bytes = 2 * (WEIGHT_ROWS + tokens * cuts)  # of a step, for each of its inputs
    most = num_stages or MAX_STAGES
    if norm:
        shared, input_bytes, most = shared - 2 * tokens * inputs, 2 * WEIGHT_ROWS, MAX_NORM_STAGES
    inner = 128 if shared >= MIN_STAGES * 128 * input_bytes else 64
    stages = max(MIN_STAGES, min(most, shared // (inner * input_bytes)))
    return PrefetchTile(tokens, inner, stages, splits, cuts)


def num_cuts(columns: int, inputs: int) -> int:
    """Into how many parts to cut the inputs within programs: until there is about one program for each multiprocessor.
    A power of two; each part is a multiple of 128."""
    cuts = 1
    while cuts < MAX_CUTS and 2 * cuts * columns <= WEIGHT_ROWS * PROGRAMS and inputs % (256 * cuts) == 0:
        cuts *= 2
    return cuts


def can_have_norm(num_tokens: int, inputs: int) -> bool:
    """Whether the kernel can compute the norm of `num_tokens` tokens with `inputs` numbers each."""
    return num_tokens * inputs <= MAX_NORM_NUMBERS and inputs & (inputs - 1) == 0


@gluon.jit
def _add_rms_norm(  # type: ignore[no-untyped-def]
    parts_ptr, residual_ptr, norm_ptr, total_ptr, eps, num_tokens,
    x, TOKENS: gl.constexpr, CUTS: gl.constexpr, NORMED: gl.constexpr, SIZE: gl.constexpr, SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """`add_rms_norm` into the shared memory x [TOKENS * CUTS, SIZE / CUTS], after the wait for the predecessor.

    Of the TOKENS, NORMED are computed. The others are copies, whose products nobody reads.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [1, 1, gl.num_warps()], [2, 1, 0])
    column = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    token = gl.arange(0, NORMED, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    weight = gl.load(norm_ptr + column).to(gl.float32)
    if PDL:
        gdc_wait()
    place = token * SIZE + column  # [1, NORMED, SIZE]
    exists = (token < num_tokens) & (column < SIZE)
    total = gl.load(parts_ptr + place, mask=exists, other=0.0).to(gl.float32)
    for split in gl.static_range(1, SPLITS):
        total += gl.load(parts_ptr + split * num_tokens * SIZE + place, mask=exists, other=0.0).to(gl.float32)
    total += gl.load(residual_ptr + place, mask=exists, other=0.0).to(gl.float32)
    rounded = total.to(total_ptr.dtype.element_ty)
    total = rounded.to(gl.float32)
    scale = gl.rsqrt(gl.sum(total * total, 2) / SIZE + eps)
    normed = (total * gl.expand_dims(scale, 2) * weight).to(total_ptr.dtype.element_ty)
    copies = gl.zeros([TOKENS // NORMED, NORMED, SIZE], normed.dtype, layout)
    x.store(gl.reshape(normed + copies, [TOKENS * CUTS, SIZE // CUTS]))
    fence_async_shared()
    if gl.program_id(1) == 0:
        gl.store(total_ptr + place, rounded, mask=exists)


@cache
def choose_fp8_tile(num_tokens: int, columns: int, inputs: int, gated: bool, partial: bool) -> PrefetchTile:
    """`choose_tile` for weights in FP8: the longest steps of which three have room, of 512 inputs at most.

    Widening takes nearly as long as reading. So barriers have to be rare, and there is one for each step. If the parts
    of the inputs are long, they are cut once more, so that a multiprocessor has two programs.
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
    x_desc, weight_desc, weight_ptr, scale_ptr, bias_ptr, parts_ptr, residual_ptr, norm_ptr, total_ptr, out_ptr, eps,
    num_tokens, inputs, outputs, steps,
    TOKENS: gl.constexpr, COLUMNS: gl.constexpr, INNER: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
    REFILLS: gl.constexpr, LINES: gl.constexpr, LINE: gl.constexpr, SCALE_ROWS: gl.constexpr, BIAS: gl.constexpr,
    PDL: gl.constexpr, CUTS: gl.constexpr, NORMED: gl.constexpr, SIZE: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = HALVES * COLUMNS
    X_ROWS: gl.constexpr = TOKENS * CUTS
    X_TILES: gl.constexpr = SIZE // (CUTS * INNER) if NORMED else STAGES
    BYTES: gl.constexpr = (ROWS * weight_desc.dtype.primitive_bitwidth // 8 + (0 if NORMED else X_ROWS * 2)) * INNER
    x_type: gl.constexpr = weight_desc.dtype if NORMED else x_desc.dtype
    x_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # The last tile ends with the last token: computing some twice is cheaper than copying rows that do not exist.
    first_token = gl.maximum(gl.minimum(gl.program_id(0) * TOKENS, num_tokens - TOKENS), 0)
    first_column = gl.program_id(1) * COLUMNS
    part = gl.program_id(2)
    begin = part * steps
    w_tiles = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, COLUMNS // 8, HALVES, 8, INNER], weight_desc.layout)
    x_tiles = gl.allocate_shared_memory(x_type, [X_TILES, X_ROWS, INNER], x_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(STAGES):
        bar, start = full.index(i), (begin + i) * INNER
        mbarrier.expect(bar, BYTES)
        tma.async_copy_global_to_shared(weight_desc, [first_column // 8, 0, 0, start], bar, w_tiles.index(i))
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, X_ROWS, 16])
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
    if NORMED:
        # The rows of the tiles are as wide as they are swizzled. So all tiles together are one wide tile, too.
        whole_x = x_tiles._reinterpret(x_type, [X_ROWS, SIZE // CUTS], x_layout)
        _add_rms_norm(
            parts_ptr, residual_ptr, norm_ptr, total_ptr, eps, num_tokens,
            whole_x, TOKENS, CUTS, NORMED, SIZE, SPLITS, PDL,
        )  # fmt: skip
        debug_barrier()
    else:
        if PDL:
            gdc_wait()
        for i in gl.static_range(STAGES):
            bar, start = full.index(i), (begin + i) * INNER
            tma.async_copy_global_to_shared(x_desc, [first_token, start], bar, x_tiles.index(i))

    acc = gl.zeros([ROWS, X_ROWS], gl.float32, product)
    if SCALE_ROWS:
        mbarrier.wait(full.index(0), 0)
        rows = _widened(w_tiles.index(0).reshape([ROWS, INNER]), 0, product, x_type)
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
                next_rows = _widened(next_rows, (begun + PRODUCT_INNER) % INNER, product, x_type)
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
            x = x_tiles.index(step if NORMED else stage).permute((1, 0))
            acc = warpgroup_mma(rows, x, acc, is_async=True)
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
                if not NORMED:
                    tma.async_copy_global_to_shared(x_desc, [first_token, start], bar, x_tiles.index(free), pred=refill)
        acc = warpgroup_mma_wait(0, (acc,))
    if CUTS > 1:
        row = gl.arange(0, ROWS, gl.SliceLayout(1, product))[:, None]
        x_row = gl.arange(0, X_ROWS, gl.SliceLayout(0, product))[None, :]
        acc = gl.where(row % CUTS == x_row % CUTS, acc, 0.0)
        acc = gl.sum(gl.sum(gl.reshape(acc, [ROWS // CUTS, CUTS, TOKENS, CUTS]), 3), 1)
        first_column = gl.program_id(1) * (COLUMNS // CUTS)
    if BIAS:
        column = first_column + gl.arange(0, ROWS // CUTS, gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias_ptr + column).to(gl.float32)[:, None]
    if HALVES == 2:
        gate, up = gl.split(gl.permute(gl.reshape(acc, [COLUMNS // 8, 2, 8, TOKENS]), (0, 2, 3, 1)))
        acc = gl.reshape(gate / (1 + gl.exp(-gate)) * up, [COLUMNS, TOKENS])
    result = gl.permute(acc, (1, 0)).to(out_ptr.dtype.element_ty)
    written: gl.constexpr = result.type.layout
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(1, written))
    column = first_column + gl.arange(0, COLUMNS // CUTS, gl.SliceLayout(0, written))
    out = out_ptr + (part * num_tokens + token).to(gl.int64)[:, None] * outputs + column[None, :]
    gl.store(out, result, mask=(token < num_tokens)[:, None])
    full._keep_alive()  # nothing else takes the place of the barriers, so they need not be made invalid


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

    scale: of weights in FP8, as in `widening_linear`; the tile is then of `choose_fp8_tile`.
    """
    return _launch(x, None, weight, bias, scale, tile, gated, partial)


def norm_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tile: PrefetchTile,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm(x, residual, norm_weight, eps)` and the layer that follows, in one kernel: the layer's result
    [T, out], or [T, out / 2] if gated, and the sum [T, in]. tile: of `choose_tile` with norm=True."""
    total = torch.empty_like(residual)
    return _launch(total, (x, residual, norm_weight, eps), weight, bias, None, tile, gated, False), total


def _launch(
    x: Tensor,
    norm: tuple[Tensor, Tensor, Tensor, float] | None,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    tile: PrefetchTile,
    gated: bool,
    partial: bool,
) -> Tensor:
    """x [T, in]: the input; with a norm, where its sum is written."""
    num_tokens, inputs = x.shape
    halves, cuts = 2 if gated else 1, tile.cuts
    outputs, columns = weight.shape[0] // halves, WEIGHT_ROWS // halves
    rows, depth = outputs * cuts, inputs // cuts  # of the weights, as the kernel sees them
    steps = depth // (tile.splits * tile.inner)
    shape = (tile.splits, num_tokens, outputs) if partial else (num_tokens, outputs)
    out = x.new_empty(shape, dtype=torch.float32 if partial else x.dtype)
    x_desc = None
    if norm is None:
        x_desc = TensorDescriptor(x, [num_tokens * cuts, depth], [depth, 1], [tile.tokens * cuts, tile.inner], X_LAYOUT)
    weight_desc = TensorDescriptor(
        weight, [rows // 8, halves, 8, depth], [8 * depth, rows * depth, depth, 1],
        [columns // 8, halves, 8, tile.inner], WEIGHT_LAYOUTS[weight.element_size()],
    )  # fmt: skip
    stages = min(tile.stages, steps)
    pdl = overlaps_launches(x.device)
    parts, residual, norm_weight, eps = norm or (None, None, None, 0.0)
    _weight_prefetch_linear_kernel[(triton.cdiv(num_tokens, tile.tokens), rows // columns, tile.splits)](
        x_desc, weight_desc, weight, scale, bias, parts, residual, norm_weight, x if norm else None, out, eps,
        num_tokens, depth, outputs, steps,
        TOKENS=tile.tokens, COLUMNS=columns, INNER=tile.inner, HALVES=halves, STAGES=stages, REFILLS=steps > stages,
        LINES=LINES[weight.element_size()], LINE=CACHE_LINE // weight.element_size(),
        SCALE_ROWS=0 if scale is None else len(weight) // len(scale), BIAS=bias is not None, PDL=pdl,
        CUTS=cuts, NORMED=triton.next_power_of_2(num_tokens) if norm else 0, SIZE=inputs if norm else 0,
        SPLITS=len(norm[0]) if norm and norm[0].dim() == 3 else 1, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
