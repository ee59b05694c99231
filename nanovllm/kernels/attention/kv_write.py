"""Scatter of new keys and values into their slots of the paged KV cache."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _kv_write_kernel(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, kv_ptr, slots_ptr, k_stride, v_stride, v_offset, WIDTH: tl.constexpr, PADDED: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    element = tl.arange(0, PADDED)
    exists = element < WIDTH
    k = tl.load(k_ptr + token * k_stride + element, mask=exists)
    v = tl.load(v_ptr + token * v_stride + element, mask=exists)
    tl.store(kv_ptr + slot * WIDTH + element, k, mask=exists)
    tl.store(kv_ptr + v_offset + slot * WIDTH + element, v, mask=exists)


def kv_write(kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Write token i's key and value into slot `slots[i]` = block * block_size + offset.

    A slot's heads lie side by side, so a slot is one row of Hkv * D elements and the block size does not matter here.

    Args:
        kv: [2, num_blocks, block_size, Hkv, D], contiguous.
        k, v: [T, Hkv, D], each token's heads contiguous; the tokens may be strided (views of a fused projection).
        slots: [T] int64. Padding names a slot of the scratch block, never -1.
    """
    width = kv.shape[-2] * kv.shape[-1]
    _kv_write_kernel[(slots.shape[0],)](
        k, v, kv, slots, k.stride(0), v.stride(0), kv.stride(0), WIDTH=width, PADDED=triton.next_power_of_2(width)
    )


def kv_write_reference(kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """The same in plain PyTorch, on any device."""
    rows = kv.flatten(1, 2)  # [2, num_slots, Hkv, D], a view
    rows[0].index_copy_(0, slots, k)
    rows[1].index_copy_(0, slots, v)
