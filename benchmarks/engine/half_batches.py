"""An experiment for `benchmarks/engine/decode_step.py`: a decode step as two half batches, side by side.

Attention reads memory and leaves the tensor cores idle; the short kernels around it do neither well. So the batch is
cut in two, each half on a stream of its own, and while one attends the other goes through its matrix products. Weights
are then read twice. Attention is held to a part of the GPU, so that there is room for the products: to two programs a
multiprocessor instead of three, or to fewer multiprocessors.

Prediction for an H200: at batch 128 attention is three quarters of a layer; with most of the rest hidden, a tenth less.
Measured (docs/kernels.md): slower in every form. Attention loses already when its programs may not fill the GPU, or not
start before their predecessors end, and what the other half reads meanwhile it takes from attention.

*Halves, ring* has `ring_decode` in place of `paged_decode` and is otherwise the engine as it is; batches whose halves
are too small for that kernel are not cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.plain_decode import plain_decode
from nanovllm.attention import triton_backend
from nanovllm.attention.interface import AttentionMetadata, BoundAttention
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.kernels.attention.paged_decode import FEW_SEQUENCES, DecodeConfig, paged_decode
from nanovllm.kernels.linear.tiled_linear import Tile, tiled_linear
from nanovllm.layers.linear import Linear, MergedLinear
from nanovllm.layers.rope import Rotation
from nanovllm.models.transformer import Transformer

TILES = {64: Tile(32, 128, 3, swapped=False), 128: Tile(64, 64, 4, swapped=False)}


@dataclass(frozen=True)
class Halves:
    """How the halves share the GPU.

    programs_per_sm and sms: of attention; 0 multiprocessors are all. serial: the attention of one half begins when that
    of the other has ended. tiled: our tiled kernel for the wide layers, too, because the library's want more room than
    is left. parts: 1 is the whole batch, to see what the other changes do. ring: by `ring_decode`, which has its own
    layout and may start early.
    """

    programs_per_sm: int = 2
    sms: int = 0
    serial: bool = True
    tiled: bool = True
    parts: int = 2
    ring: bool = False


def part_of(meta: AttentionMetadata, first: int, last: int) -> AttentionMetadata:
    """The decodes `first` to `last` of a batch that only decodes."""
    n = last - first
    return replace(
        meta, slots=meta.slots[first:last], query_start=meta.query_start[: n + 1],
        context_len=meta.context_len[first:last], block_table=meta.block_table[first:last], num_decodes=n,
    )  # fmt: skip


@dataclass
class Part:
    """Some rows of the batch on their way through the layers."""

    x: Tensor
    rotation: Rotation
    attend: BoundAttention
    stream: torch.cuda.Stream | None
    residual: Tensor | None = None
    attended: torch.cuda.Event = field(default_factory=torch.cuda.Event)

    def on(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def layer(self, layer: Any, wait_for: torch.cuda.Event | None) -> None:
        part = self

        class Attend(BoundAttention):
            def read(self, number: int, q: Tensor) -> Tensor:
                if wait_for is not None:
                    wait_for.wait()
                out = super().read(number, q)
                part.attended.record()
                return out

        bound = self.attend
        attend = Attend(bound.backend, bound.kv, bound.meta, bound.scale, bound.shared)
        self.x, self.residual = layer(self.x, self.residual, self.rotation, attend)


KEPT: list[Any] = []  # what recordings use: what one stream frees, the other must not be given


def forward(
    self: Transformer, how: Halves, side: torch.cuda.Stream, backends: list[TritonBackend], input_ids: Tensor,
    positions: Tensor, attend: BoundAttention,
) -> Tensor:  # fmt: skip
    """Stands in for `Transformer.forward`."""
    x = self.embed_tokens(input_ids)
    cuts = [len(x) * i // how.parts for i in range(how.parts + 1)]
    side.wait_stream(torch.cuda.current_stream())
    parts = []
    for backend, stream, (first, last) in zip(backends, (None, side), pairwise(cuts), strict=False):
        bound = BoundAttention(backend, attend.kv, part_of(attend.meta, first, last), attend.scale)
        parts.append(Part(x[first:last], Rotation(self.rotary, positions[first:last]), bound, stream))
    before: torch.cuda.Event | None = None
    for layer in self.layers:
        for part in parts:
            with part.on():
                part.layer(layer, before if how.serial and how.parts > 1 else None)
            before = part.attended
    hidden = []
    for part in parts:
        with part.on():
            hidden.append(self.norm.add(part.x, part.residual)[0])
    torch.cuda.current_stream().wait_stream(side)
    KEPT.append((parts, x, hidden))
    return torch.cat(hidden)


@contextmanager
def half_batches(how: Halves, _: list[Tensor]) -> Iterator[None]:
    side = torch.cuda.Stream()
    num_sms = how.sms or torch.cuda.get_device_properties(0).multi_processor_count
    backends = [TritonBackend(num_sms), TritonBackend(num_sms)]
    KEPT.append(backends)
    usual = triton_backend.decode_config
    saved = Transformer.forward, MergedLinear.forward

    def layout(head_dim: int, element_size: int) -> DecodeConfig:
        return replace(usual(head_dim, element_size), programs_per_sm=how.programs_per_sm)

    def late(*arguments: Any, **options: Any) -> None:
        """Programs that wait for their predecessors take the room that the other half's products need."""
        paged_decode(*arguments, **options | {"overlap": False})

    def product(self: MergedLinear, x: Tensor) -> Tensor:
        tile = TILES.get(len(x)) if how.tiled else None
        return Linear.forward(self, x) if tile is None else tiled_linear(x, self.weight, tile=tile)

    def patched(self: Transformer, input_ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
        if how.ring and len(input_ids) < how.parts * FEW_SEQUENCES:
            return saved[0](self, input_ids, positions, attend)
        return forward(self, how, side, backends, input_ids, positions, attend)

    Transformer.forward, MergedLinear.forward = patched, product  # type: ignore[method-assign, assignment]
    if not how.ring:
        triton_backend.decode_config, triton_backend.paged_decode = layout, late
    try:
        with nullcontext() if how.ring else plain_decode():
            yield
    finally:
        Transformer.forward, MergedLinear.forward = saved  # type: ignore[method-assign]
        triton_backend.decode_config, triton_backend.paged_decode = usual, paged_decode


VARIANTS = {
    "one batch, 2 programs": partial(half_batches, Halves(parts=1, tiled=False)),
    "one batch, 2 programs, tiled": partial(half_batches, Halves(parts=1)),
    "halves, 2 programs": partial(half_batches, Halves(serial=False, tiled=False)),
    "halves, 2 programs, tiled": partial(half_batches, Halves(serial=False)),
    "halves in turns, 2 programs": partial(half_batches, Halves(tiled=False)),
    "halves in turns, 2 programs, tiled": partial(half_batches, Halves()),
    "halves in turns, 3 programs, tiled": partial(half_batches, Halves(programs_per_sm=3)),
    "halves in turns, 3 programs on 100": partial(half_batches, Halves(programs_per_sm=3, sms=100, tiled=False)),
    "halves, 1 program, tiled": partial(half_batches, Halves(programs_per_sm=1, serial=False)),
}
HALVES_RING = partial(half_batches, Halves(serial=False, tiled=False, ring=True))
