"""When decode attention is `ring_decode`, the kernel for Hopper, and how that is laid out.

Apart from the kernel, because that file cannot be imported where Triton has no Gluon. Of the layouts that were tried by
themselves on an H200 this one was among the fastest at every batch (`benchmarks/results/kernels.h200.json` has four).
With few sequences it is `paged_decode`: with one that was faster, and up to 16 nothing else was measured.
"""

from dataclasses import dataclass, field

import torch

from nanovllm.kernels.attention.paged_decode import FEW_SEQUENCES, MAX_ROWS, DecodeConfig
from nanovllm.kernels.launch import gluon_kernel

RING_BYTES = 192 * 1024  # of shared memory, for the tiles of all programs of a multiprocessor
MAX_REGISTERS = 160  # of a thread. The compiler would take all, and no other kernel could begin beside this one


@dataclass(frozen=True)
class RingLayout:
    """Keys of a tile; KV heads of a program, and as many warps that compute; tiles in its ring; programs a
    multiprocessor; registers of a thread at the start, before those that order tiles give theirs to the others."""

    keys: int
    heads: int
    stages: int
    programs_per_sm: int
    max_registers: int | None = None
    early: bool = field(default=True, kw_only=True)  # may tiles of earlier steps be ordered before its turn

    @property
    def early_tiles(self) -> int:
        """How many tiles a program orders, at most, before the predecessor has ended: then its ring is full."""
        return self.stages if self.early else 0

    @property
    def config(self) -> DecodeConfig:
        """For the plan and the number of pieces: programs are counted as if each had one head."""
        return DecodeConfig(self.keys, self.heads, self.stages, self.programs_per_sm * self.heads)


def ring_layout(q: torch.Tensor, kv: torch.Tensor, num_sequences: int) -> RingLayout | None:
    """The layout for q [T, Hq, D] of so many sequences and a cache kv [2, num_blocks, block_size, Hkv, D].

    None: `paged_decode` is faster, or the kernel cannot take the shape, the dtype or the GPU. The same for all layers
    of a step, which share a plan.
    """
    _, _, block_size, num_kv_heads, head_dim = kv.shape
    keys, heads = 32, 4
    fits = head_dim in (64, 128) and q.element_size() == 2 and block_size >= keys
    dealt_out = num_kv_heads % heads == 0 and q.shape[1] // num_kv_heads <= MAX_ROWS
    if num_sequences < FEW_SEQUENCES or not fits or not dealt_out or gluon_kernel("ring_decode", q.device) is None:
        return None
    return RingLayout(keys, heads, RING_BYTES // (2 * heads * keys * head_dim * q.element_size()), 1, MAX_REGISTERS)
