"""When prefill attention is `warp_prefill`, the kernel for Hopper, and how that is laid out.

Apart from the kernel, because that file cannot be imported where Triton has no Gluon.
"""

import torch

from nanovllm.kernels.launch import gluon_kernel

ROWS = 64  # of each of the two groups of warps
KEYS = 64  # of a tile: with 128 fewer fit, and more of the masked ones is computed in vain
STAGES = 4  # tiles of K, and of V, that there is room for


def fits_warp_prefill(q: torch.Tensor, kv: torch.Tensor) -> bool:
    """Whether `warp_prefill` can take q [T, Hq, D], a cache kv [2, num_blocks, block_size, Hkv, D], and their GPU."""
    _, _, block_size, num_kv_heads, head_dim = kv.shape
    group = q.shape[1] // num_kv_heads
    fits = q.element_size() == 2 and head_dim in (64, 128) and block_size >= KEYS and group in (1, 2, 4, 8, 16)
    return fits and gluon_kernel("warp_prefill", q.device) is not None
