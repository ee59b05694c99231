"""For experiments with `paged_decode`: on Hopper the engine would take `ring_decode` for all but a few sequences."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from nanovllm.attention import triton_backend


@contextmanager
def plain_decode(_: list[Tensor] | None = None) -> Iterator[None]:
    """All decode attention is `paged_decode`, or what stands in for it."""
    usual = triton_backend.ring_layout
    triton_backend.ring_layout = lambda *_: None
    try:
        yield
    finally:
        triton_backend.ring_layout = usual
