"""For experiments with `paged_decode`: on Hopper the engine would take `ring_decode` for all but a few sequences."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from nanovllm.attention import triton_backend
from nanovllm.kernels.hopper.ring_layout import RingLayout


@contextmanager
def plain_decode(_: list[Tensor] | None = None) -> Iterator[None]:
    """All decode attention is `paged_decode`, or what stands in for it."""
    usual = triton_backend.ring_layout
    triton_backend.ring_layout = lambda *_: None
    try:
        yield
    finally:
        triton_backend.ring_layout = usual


@contextmanager
def late_ring(_: list[Tensor] | None = None) -> Iterator[None]:
    """`ring_decode` orders its first tiles when its predecessor has ended, like all others."""
    usual = triton_backend.ring_layout

    def late(q: Tensor, kv: Tensor, num_sequences: int) -> RingLayout | None:
        layout = usual(q, kv, num_sequences)
        return None if layout is None else replace(layout, early=False)

    triton_backend.ring_layout = late
    try:
        yield
    finally:
        triton_backend.ring_layout = usual
