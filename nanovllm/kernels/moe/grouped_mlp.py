"""The MLPs of all experts in two launches: a matrix product in which each tile of tokens has the weights of its expert.

The pairs of a token and one of its experts are sorted by expert. A tile is some consecutive pairs of one expert. How
many tiles there are depends on the routing, which only the device knows. So as many programs are started as any routing
could need; each finds its expert from the ends of all experts' pairs, and those that are left over end at once.

Pairs whose expert is on another rank come last. No tile has them, and nothing is computed for them.

With few tokens this is the reading of the chosen experts' weights, and tiles have few tokens. With up to `UNSORTED`
tokens hardly any two go through the same expert. Then nothing is sorted, and each pair is a tile. With many tokens the
products are bound by arithmetic. Weights in FP8 are widened in registers, as in `widening_linear`, whatever the number
of tokens. Grouped products are due to Gale et al. ("MegaBlocks", 2022); the tiles are laid out like those of vLLM's
fused_moe.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.kernels.cards import choose
from nanovllm.kernels.fp8.widening_linear import GROUP, _widened
from nanovllm.kernels.launch import overlaps_launches, shared_memory
from nanovllm.kernels.moe.sort_pairs import sort_pairs
from nanovllm.kernels.moe.sum_pairs import sum_pairs

UNSORTED = 2  # tokens


class Tile(NamedTuple):
    """Pairs of a program; its output columns, and as many again for a gate; bytes of a weight's row that a step reads;
    warps of a program; and the most steps under way, where shared memory has room for them.

    tma: weights in 16 bits come by TMA, the copy engine of GPUs since Hopper. If the pairs are fewer than the rows of
    the matrix instruction, the product is W x^T then, whose rows are the columns.
    """

    pairs: int
    columns: int
    inner_bytes: int
    num_warps: int
    num_stages: int
    tma: bool = False


@lru_cache  # all layers of a step ask for the same
def choose_tile(
    device: torch.device, element_size: int, num_tokens: int, num_pairs: int, num_experts: int, gated: bool
) -> Tile:
    """By the table of cards. Its borders are such that the warm-up has steps on both sides."""
    layer, pairs = "gated" if gated else "plain", num_pairs / num_experts
    return Tile(**choose(device, "experts", layer, tokens=num_tokens, per_expert=pairs, itemsize=element_size))


@triton.jit
def _product(x, w, acc, SWAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + x w^T, or its transpose."""
    if SWAPPED:
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, weight_desc, scale_ptr, order_ptr, ends_ptr, pair_weight_ptr, out_ptr, num_pairs,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, CHOSEN: tl.constexpr,
    PAIRS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr,
    SORTED: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(1)
    if SORTED:
        every = tl.arange(0, PADDED)
        exists = every < EXPERTS
        end = tl.load(ends_ptr + every, mask=exists, other=0).to(tl.int32)
        begin = tl.load(ends_ptr + every - 1, mask=exists & (every > 0), other=0).to(tl.int32)
        tiles = (end - begin + PAIRS - 1) // PAIRS
        last = tl.cumsum(tiles, 0)  # the tile after each expert's last one
        expert = tl.sum((last <= tile).to(tl.int32), 0)
        first_pair = tl.sum(tl.where(every == expert, begin + (tile - last + tiles) * PAIRS, 0), 0)
        last_pair = tl.sum(tl.where(every == expert, end, 0), 0)
    else:
        expert = tl.load(order_ptr + tile).to(tl.int32)
        first_pair = tile
        last_pair = tile + 1
    if expert < EXPERTS:
        place = first_pair + tl.arange(0, PAIRS)
        is_pair = place < last_pair
        pair = tl.load(order_ptr + place, mask=is_pair, other=0).to(tl.int64) if SORTED else place.to(tl.int64)
        row = pair // CHOSEN if GATED else place.to(tl.int64)
        first_column = tl.program_id(0) * COLUMNS
        column = first_column + tl.arange(0, COLUMNS)
        is_column = (column < OUTPUTS)[:, None]
        inner = tl.arange(0, INNER)
        x_tile = x_ptr + row[:, None] * INPUTS + inner[None, :]
        all_rows: tl.constexpr = (2 if GATED else 1) * OUTPUTS
        first_row = expert * all_rows + first_column
        weights = weight_ptr + expert.to(tl.int64) * (all_rows * INPUTS)
        weight_tile = weights + column[:, None].to(tl.int64) * INPUTS + inner[None, :]
        up_tile = weight_tile + OUTPUTS * INPUTS
        SWAPPED: tl.constexpr = TMA and PAIRS < 64
        if SWAPPED:
            acc = tl.zeros([COLUMNS, PAIRS], tl.float32)
            acc_up = tl.zeros([COLUMNS, PAIRS], tl.float32)
        else:
            acc = tl.zeros([PAIRS, COLUMNS], tl.float32)
            acc_up = tl.zeros([PAIRS, COLUMNS], tl.float32)
        if ROWS > 1:  # a scale for each block; the columns of a program are in one
            groups: tl.constexpr = INPUTS // INNER
            scale_ptr += (expert * (all_rows // ROWS) + first_column // ROWS) * groups
            up_scale_ptr = scale_ptr + OUTPUTS // ROWS * groups
            scale = tl.load(scale_ptr)
            up_scale = tl.load(up_scale_ptr) if GATED else scale
        for start in range(0, INPUTS, INNER):
            is_inner = (start + inner < INPUTS)[None, :]
            x = tl.load(x_tile + start, mask=is_pair[:, None] & is_inner, other=0.0)  # [PAIRS, INNER]
            if TMA:
                w = weight_desc.load([first_row, start])
            elif ROWS == 0:
                w = tl.load(weight_tile + start, mask=is_column & is_inner, other=0.0)  # [COLUMNS, INNER]
            else:
                w = _widened(weight_tile + start, x)
            if ROWS > 1:
                # The next step's scales are asked for now. After the last step there are none: its own are read again.
                next_group = tl.minimum(start + INNER, INPUTS - INNER) // INNER
                next_scale = tl.load(scale_ptr + next_group)
                acc += _product(x, w, None, SWAPPED) * scale
                scale = next_scale
            else:
                acc = _product(x, w, acc, SWAPPED)
            if GATED:
                if TMA:
                    up = weight_desc.load([first_row + OUTPUTS, start])
                elif ROWS == 0:
                    up = tl.load(up_tile + start, mask=is_column & is_inner, other=0.0)
                else:
                    up = _widened(up_tile + start, x)
                if ROWS > 1:
                    next_up_scale = tl.load(up_scale_ptr + next_group)
                    acc_up += _product(x, up, None, SWAPPED) * up_scale
                    up_scale = next_up_scale
                else:
                    acc_up = _product(x, up, acc_up, SWAPPED)
        if ROWS == 1:  # a scale for each column
            column_scale = scale_ptr + expert * all_rows + column
            acc *= tl.load(column_scale)[None, :]
            if GATED:
                acc_up *= tl.load(column_scale + OUTPUTS)[None, :]
        if GATED:
            acc = acc * tl.sigmoid(acc) * acc_up
        if SWAPPED:
            acc = tl.trans(acc)
        if GATED:
            out_row = place.to(tl.int64)
        else:
            acc *= tl.load(pair_weight_ptr + pair, mask=is_pair, other=0.0)[:, None]
            out_row = pair % CHOSEN * (num_pairs // CHOSEN) + pair // CHOSEN
        out_tile = out_ptr + out_row[:, None] * OUTPUTS + column[None, :]
        tl.store(out_tile, acc.to(out_ptr.dtype.element_ty), mask=is_pair[:, None] & (column < OUTPUTS)[None, :])


def grouped_linear(
    x: Tensor, weight: Tensor, order: Tensor, ends: Tensor | None, weights: Tensor, tile: Tile,
    *, gated: bool, scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One of the two products: gated, from tokens x [T, H] to pairs by expert [T K, I]; or else from these to parts of
    a sum over each token's experts [K, T, H], each times its weight.

    weight: [E, out, in], if gated [E, 2 out, in]. order, ends: of `sort_pairs`; or else the experts of all pairs [T K]
    and None: then pairs are by token, and each is a tile. weights: [T, K] float32.
    scale: of a weight in FP8, [E, out, 1] or [E, out / 128, in / 128], if gated with twice the rows. Weights in FP8 are
    read without masks, so in and out must be multiples of 128.
    """
    num_experts, rows, inputs = weight.shape
    num_pairs, outputs = len(order), rows // 2 if gated else rows
    columns, inner = tile.columns, tile.inner_bytes // weight.element_size()
    rows_of_scale = 0 if scale is None else rows // scale.shape[1]
    if scale is not None:
        columns = min(columns, rows_of_scale if rows_of_scale > 1 else outputs & -outputs)
        inner = GROUP if rows_of_scale > 1 else min(inner, inputs & -inputs)
    widths = tile.pairs * x.element_size() + (2 if gated else 1) * columns * weight.element_size()
    # Rows are copied in whole units of 16 bytes
    tma = tile.tma and scale is None and inputs * weight.element_size() % 16 == 0
    most_stages = shared_memory(x.device) // (widths * inner) - (0 if tma else 1)
    shape = (num_pairs,) if gated else (weights.shape[1], weights.shape[0])
    out = x.new_empty(*shape, outputs)
    max_tiles = num_pairs if ends is None else num_pairs // tile.pairs + min(num_pairs, num_experts)
    boxes = TensorDescriptor.from_tensor(weight.view(-1, inputs), [columns, inner]) if tma else None
    pdl = overlaps_launches(x.device)
    _grouped_linear_kernel[(triton.cdiv(outputs, columns), max_tiles)](
        x, weight, boxes, scale, order, ends, weights, out, num_pairs,
        INPUTS=inputs, OUTPUTS=outputs, EXPERTS=num_experts, PADDED=triton.next_power_of_2(num_experts),
        CHOSEN=weights.shape[1], PAIRS=tile.pairs, COLUMNS=columns, INNER=inner, ROWS=rows_of_scale, GATED=gated,
        SORTED=ends is not None, TMA=tma, PDL=pdl, num_warps=tile.num_warps,
        num_stages=max(1, min(tile.num_stages, most_stages)), launch_pdl=pdl,
    )  # fmt: skip
    return out


def grouped_mlp(
    x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, experts: Tensor, weights: Tensor,
    place: tuple[int, int] = (0, 1), scales: tuple[Tensor, Tensor] | None = None, *, partial: bool = False,
) -> Tensor:  # fmt: skip
    """x [T, H], gate_up_proj [E, 2 I, H], down_proj [E, H, I], experts [T, K] int64, weights [T, K] float32, all
    contiguous -> [T, H]: see `Experts`, and for scales `Fp8Experts`. With partial=True [K, T, H], to be summed over K,
    unless experts are on other ranks."""
    (rank, ranks), num_experts = place, len(down_proj)
    first = rank * num_experts
    if ranks == 1 and len(x) <= UNSORTED:
        order, ends = experts.flatten(), None
    else:
        order, ends = sort_pairs(experts, num_experts, first)
    sizes = x.device, down_proj.element_size(), len(x), len(order), num_experts * ranks
    gate, down = choose_tile(*sizes, gated=True), choose_tile(*sizes, gated=False)
    gate_up_scale, down_scale = (None, None) if scales is None else scales
    pairs = order, ends, weights
    hidden = grouped_linear(x, gate_up_proj, *pairs, gate, gated=True, scale=gate_up_scale)  # [T K, I], by expert
    parts = grouped_linear(hidden, down_proj, *pairs, down, gated=False, scale=down_scale)  # [K, T, H]
    return parts if partial and ranks == 1 else sum_pairs(parts, experts, num_experts, first)
