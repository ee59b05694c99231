"""What lies between the QKV projection and attention, in one pass: q/k-norm, rotation, and the write to the cache.

As separate operations these are two norms, two rotations and a scatter: ten reads and writes of q and k, and five
launches per layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import overlaps_launches

HEADS_PER_PROGRAM = 8


@triton.jit
def _to_fp8(x, factor):  # type: ignore[no-untyped-def]
    """As `attention.interface.to_fp8`: what is too large becomes the largest number, and NaN stays NaN."""
    x = x.to(tl.float32) * factor
    return tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x)).to(tl.float8e4nv)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _norm_rope_write_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, q_out_ptr, kv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, positions_ptr, slots_ptr, v_offset, eps,
    k_factor, v_factor,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    HEAD_DIM: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, HALF)
    is_q = head < NUM_HEADS
    is_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_v = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    exists = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None]
    if PDL:
        gdc_launch_dependents()
    # No kernel of the step writes weights; positions and slots are older than the last kernel launched without overlap.
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * HEAD_DIM + dim)[None, :]
    sin = tl.load(cos_sin_ptr + position * HEAD_DIM + HALF + dim)[None, :]
    if NORM:
        weight1 = tl.where(is_q[:, None], tl.load(q_norm_ptr + dim)[None, :], tl.load(k_norm_ptr + dim)[None, :])
        weight2 = tl.where(
            is_q[:, None], tl.load(q_norm_ptr + HALF + dim)[None, :], tl.load(k_norm_ptr + HALF + dim)[None, :]
        )
    if PDL:
        gdc_wait()
    source = qkv_ptr + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + head[:, None] * HEAD_DIM + dim[None, :]
    raw1 = tl.load(source, mask=exists, other=0.0)  # [HEADS, D/2], first half of each head
    raw2 = tl.load(source + HALF, mask=exists, other=0.0)  # [HEADS, D/2], second half
    x1 = raw1.to(tl.float32)
    x2 = raw2.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / HEAD_DIM + eps)[:, None]
        x1 = (x1 * scale * weight1).to(raw1.dtype).to(tl.float32)  # rounded where the plain norm rounds
        x2 = (x2 * scale * weight2).to(raw1.dtype).to(tl.float32)
    y1 = (x1 * cos - x2 * sin).to(raw1.dtype)
    y2 = (x2 * cos + x1 * sin).to(raw1.dtype)

    target = q_out_ptr + token * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + dim[None, :]
    tl.store(target, y1, mask=is_q[:, None])
    tl.store(target + HALF, y2, mask=is_q[:, None])
    if k_factor is not None:
        y1 = _to_fp8(y1, k_factor)
        y2 = _to_fp8(y2, k_factor)
        raw1 = _to_fp8(raw1, v_factor)
        raw2 = _to_fp8(raw2, v_factor)
    kv_head = tl.where(is_k, head - NUM_HEADS, head - (NUM_HEADS + NUM_KV_HEADS))
    target = kv_ptr + slot * (NUM_KV_HEADS * HEAD_DIM) + kv_head[:, None] * HEAD_DIM + dim[None, :]
    tl.store(target, y1, mask=is_k[:, None])
    tl.store(target + HALF, y2, mask=is_k[:, None])
    tl.store(target + v_offset, raw1, mask=is_v[:, None])
    tl.store(target + v_offset + HALF, raw2, mask=is_v[:, None])


def norm_rope_write(
    qkv: Tensor,
    kv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    eps: float,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Write keys and values to the cache and return the queries [T, Hq, D], ready for attention.

    Args:
        qkv: [T, Hq + 2 Hkv, D], contiguous: the output of the QKV projection.
        kv: [2, num_blocks, block_size, Hkv, D], contiguous: the cache of this layer, in the dtype of qkv or in FP8.
        norms: weights [D] of the norms of q and k heads, or None.
        table: [L, 2, D/2] float32: cos and sin of each position.
        positions: [T] integers.
        slots: [T] integers; padding names a slot of the scratch block, never -1.
        eps: of the norms.
        scales: what stored keys, and stored values, are multiplied with, if the cache is in FP8.
    """
    num_tokens, num_rows, head_dim = qkv.shape
    num_kv_heads = kv.shape[3]
    num_heads = num_rows - 2 * num_kv_heads
    q = qkv.new_empty(num_tokens, num_heads, head_dim)  # [T, Hq, D]
    q_norm, k_norm = norms or (qkv, qkv)  # not read without norms
    factors = (1 / scales[0], 1 / scales[1]) if kv.dtype == torch.float8_e4m3fn else (None, None)
    pdl = overlaps_launches(qkv.device)
    _norm_rope_write_kernel[(num_tokens, triton.cdiv(num_rows, HEADS_PER_PROGRAM))](
        qkv, q, kv, q_norm, k_norm, table, positions, slots, kv.stride(0), eps,
        *factors,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2, HEADS=HEADS_PER_PROGRAM,
        NORM=norms is not None, PDL=pdl, num_warps=2, launch_pdl=pdl,
    )  # fmt: skip
    return q
