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

`nanovllm/kernels/cards.toml` says for which layers and numbers of tokens this kernel is used. Triton's
interpreter cannot run Gluon.
"""

import os
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

X_LAYOUT, WEIGHT_LAYOUT = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(128, 16, 4)
LINES = 8  # cache lines of each row of the weights, behind the steps that have room, that are brought to L2
WEIGHT_ROWS = 64  # rows of the weights of a program: as many output columns, half of them if gated
SHARED_BYTES = 224 * 1024  # of shared memory, for all programs on a multiprocessor
MIN_STAGES, MAX_STAGES = 3, 6  # steps under way: fewer leave the memory idle, more were no faster
NORM_TOKENS = int(os.environ.get("NORM_TOKENS", "8"))  # most tokens for which the norm is part of the kernel
MAX_NORM_INPUTS = 2048
CUT_TOKENS = int(os.environ.get("CUT_TOKENS", "8"))
MAX_CUTS = int(os.environ.get("CUTS", "8"))
MAX_NORM_STAGES = int(os.environ.get("NSTAGES", "8"))
DIRECT = int(os.environ.get("DIRECT", "0"))
TAIL = int(os.environ.get("TAIL", "0"))
FEW_TOKENS = 64  # with more the inputs are cut in two at most: the norm reads every part of every token


class PrefetchTile(NamedTuple):
    """Tokens of a program, inputs of a step of its loop, steps under way, parts that the inputs are cut into.

    cuts: parts of the inputs within a program.
    """

    tokens: int
    inner: int
    stages: int
    splits: int
    cuts: int = 1
    direct: bool = False


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
def choose_few_tile(num_tokens: int, columns: int, inputs: int, gated: bool, norm: bool) -> PrefetchTile | None:
    """The layout for few tokens."""
    if norm and (inputs > MAX_NORM_INPUTS or inputs & (inputs - 1)):
        return None
    cuts = 1
    while not gated and cuts < MAX_CUTS and 2 * cuts * columns <= WEIGHT_ROWS * PROGRAMS and inputs % (256 * cuts) == 0:
        cuts *= 2
    tokens = max(8 // cuts, triton.next_power_of_2(num_tokens))
    tiles = columns * cuts // (WEIGHT_ROWS // 2 if gated else WEIGHT_ROWS)
    shared = SHARED_BYTES // min(3, triton.cdiv(tiles, PROGRAMS)) - (2 * tokens * inputs if norm else 0)
    step = 2 * 128 * (WEIGHT_ROWS + (0 if norm else tokens * cuts))
    return PrefetchTile(
        tokens, 128, max(MIN_STAGES, min(MAX_NORM_STAGES, shared // step)), 1, cuts, tokens * inputs <= DIRECT
    )


@gluon.jit
def _add_rms_norm(  # type: ignore[no-untyped-def]
    parts_ptr, residual_ptr, norm_ptr, total_ptr, eps, num_tokens,
    x, TOKENS: gl.constexpr, CUTS: gl.constexpr, ROWS: gl.constexpr, SIZE: gl.constexpr, SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """What the kernel `add_rms_norm` does, for ROWS tokens, into the shared memory x [TOKENS * CUTS, SIZE / CUTS]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 1, 32], [1, 1, gl.num_warps()], [2, 1, 0])
    column = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    token = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    weight = gl.load(norm_ptr + column).to(gl.float32)
    if PDL:
        gdc_wait()
    place = token * SIZE + column  # [1, ROWS, SIZE]
    exists = (token < num_tokens) & (column < SIZE)
    total = gl.load(parts_ptr + place, mask=exists, other=0.0).to(gl.float32)
    for split in gl.static_range(1, SPLITS):
        total += gl.load(parts_ptr + split * num_tokens * SIZE + place, mask=exists, other=0.0)
    total += gl.load(residual_ptr + place, mask=exists, other=0.0).to(gl.float32)
    rounded = total.to(total_ptr.dtype.element_ty)
    total = rounded.to(gl.float32)
    scale = gl.rsqrt(gl.sum(total * total, 2) / SIZE + eps)
    normed = (total * gl.expand_dims(scale, 2) * weight).to(total_ptr.dtype.element_ty)
    # Rows of x that are no tokens get copies of those that are.
    copies = gl.zeros([TOKENS // ROWS, ROWS, SIZE], normed.dtype, layout)
    x.store(gl.reshape(normed + copies, [TOKENS * CUTS, SIZE // CUTS]))
    fence_async_shared()
    if gl.program_id(1) == 0:
        gl.store(total_ptr + place, rounded, mask=exists)


@gluon.jit(do_not_specialize=["num_tokens", "steps"])
def _weight_prefetch_linear_kernel(  # type: ignore[no-untyped-def]
    x_desc, weight_desc, weight_ptr, bias_ptr, parts_ptr, residual_ptr, norm_ptr, total_ptr, out_ptr, eps, num_tokens,
    inputs, outputs, steps,
    TOKENS: gl.constexpr, COLUMNS: gl.constexpr, INNER: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
    REFILLS: gl.constexpr, LINES: gl.constexpr, LINE: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
    NORMED: gl.constexpr, DEPTH: gl.constexpr, SPLITS: gl.constexpr, CUTS: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = HALVES * COLUMNS
    X_ROWS: gl.constexpr = TOKENS * CUTS
    BYTES: gl.constexpr = (ROWS + (0 if DEPTH else X_ROWS)) * INNER * 2
    X_TILES: gl.constexpr = DEPTH // INNER if DEPTH else STAGES
    x_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # The last tile ends with the last token: computing some twice is cheaper than copying rows that do not exist.
    first_token = gl.maximum(gl.minimum(gl.program_id(0) * TOKENS, num_tokens - TOKENS), 0)
    first_column = gl.program_id(1) * COLUMNS
    part = gl.program_id(2)
    begin = part * steps
    w_tiles = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, COLUMNS // 8, HALVES, 8, INNER], weight_desc.layout)
    x_tiles = gl.allocate_shared_memory(weight_desc.dtype, [X_TILES, X_ROWS, INNER], x_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(STAGES):
        bar, start = full.index(i), (begin + i) * INNER
        mbarrier.expect(bar, BYTES)
        tma.async_copy_global_to_shared(weight_desc, [first_column // 8, 0, 0, start], bar, w_tiles.index(i))
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
    if DEPTH:
        # A row of x is as long as all its tiles, and tiles are as wide as the pattern in which rows are stored.
        x = x_tiles._reinterpret(weight_desc.dtype, [X_ROWS, DEPTH], x_layout)
        if NORMED:
            _add_rms_norm(
                parts_ptr, residual_ptr, norm_ptr, total_ptr, eps, num_tokens,
                x, TOKENS, CUTS, NORMED, DEPTH * CUTS, SPLITS, PDL,
            )  # fmt: skip
        else:
            if PDL:
                gdc_wait()
            ACROSS: gl.constexpr = 32 if DEPTH >= 256 else DEPTH // 8
            read: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
            row = gl.arange(0, X_ROWS, gl.SliceLayout(1, read))[:, None]
            inner = gl.arange(0, DEPTH, gl.SliceLayout(0, read))[None, :]
            exists = (row < num_tokens * CUTS) & (inner < inputs)
            x.store(gl.load(parts_ptr + row * inputs + inner, mask=exists, other=0.0))
            fence_async_shared()
        debug_barrier()
    else:
        if PDL:
            gdc_wait()
        for i in gl.static_range(STAGES):
            bar, start = full.index(i), (begin + i) * INNER
            tma.async_copy_global_to_shared(x_desc, [first_token, start], bar, x_tiles.index(i))

    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, X_ROWS, 16])
    acc = gl.zeros([ROWS, X_ROWS], gl.float32, product)
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        rows = w_tiles.index(stage).reshape([ROWS, INNER])
        x_tile = x_tiles.index(step if DEPTH else stage)
        acc = warpgroup_mma(rows, x_tile.permute((1, 0)), acc, is_async=True)
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
            if not DEPTH:
                tma.async_copy_global_to_shared(x_desc, [first_token, start], bar, x_tiles.index(free), pred=refill)
    acc = warpgroup_mma_wait(0, (acc,))
    if TAIL == 0:
        debug_barrier()
        for i in gl.static_range(STAGES):
            mbarrier.invalidate(full.index(i))

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
    written: gl.constexpr = (
        result.type.layout if TAIL == 2 else gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    )
    result = gl.convert_layout(result, written)
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(1, written))
    column = first_column + gl.arange(0, COLUMNS // CUTS, gl.SliceLayout(0, written))
    out = out_ptr + (part * num_tokens + token).to(gl.int64)[:, None] * outputs + column[None, :]
    gl.store(out, result, mask=(token < num_tokens)[:, None])
    if TAIL:
        full._keep_alive()


def weight_prefetch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tile: PrefetchTile,
    gated: bool = False,
    partial: bool = False,
) -> Tensor:
    """`tiled_linear` on a Hopper GPU, with S = tile.splits. The number of the result's columns is a multiple of 64."""
    return _launch(x, None, weight, bias, tile, gated, partial)


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
    [T, out], or [T, out / 2] if gated, and the sum [T, in]. tile: of `choose_few_tile`, for a norm."""
    total = torch.empty_like(residual)
    return _launch(total, (x, residual, norm_weight, eps), weight, bias, tile, gated, False), total


def _launch(
    x: Tensor,
    norm: tuple[Tensor, Tensor, Tensor, float] | None,
    weight: Tensor,
    bias: Tensor | None,
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
    if norm is None and not tile.direct:
        x_desc = TensorDescriptor(x, [num_tokens * cuts, depth], [depth, 1], [tile.tokens * cuts, tile.inner], X_LAYOUT)
    weight_desc = TensorDescriptor(
        weight, [rows // 8, halves, 8, depth], [8 * depth, rows * depth, depth, 1],
        [columns // 8, halves, 8, tile.inner], WEIGHT_LAYOUT,
    )  # fmt: skip
    stages = min(tile.stages, steps)
    pdl = overlaps_launches(x.device)
    parts, residual, norm_weight, eps = norm or (x if tile.direct else None, None, None, 0.0)
    _weight_prefetch_linear_kernel[(triton.cdiv(num_tokens, tile.tokens), rows // columns, tile.splits)](
        x_desc, weight_desc, weight, bias, parts, residual, norm_weight, x if norm else None, out, eps, num_tokens,
        depth, outputs, steps, TOKENS=tile.tokens, COLUMNS=columns, INNER=tile.inner, HALVES=halves, STAGES=stages,
        REFILLS=steps > stages, LINES=LINES, LINE=CACHE_LINE // x.element_size(), BIAS=bias is not None, PDL=pdl,
        NORMED=triton.next_power_of_2(num_tokens) if norm else 0,
        DEPTH=triton.next_power_of_2(depth) if norm or tile.direct else 0,
        SPLITS=parts.shape[0] if norm and parts.dim() == 3 else 1, CUTS=cuts, TAIL=TAIL, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return out
