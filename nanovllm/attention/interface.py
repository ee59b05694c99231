"""The interface of attention: what a backend is given and computes, and attention as the model calls it.

Slots number the places of the KV cache: slot = block * block_size + offset. The KV cache of one layer is a contiguous
tensor [2, num_blocks + 1, block_size, Hkv, D]: keys, then values. Its last block is the scratch block, which belongs to
no sequence. Padding writes there, because slot -1 would be the last slot of somebody's block.

The cache has the dtype of the queries, or FP8 (e4m3). In FP8 a key is the stored number times the layer's key scale.
Values have a scale of their own. A query reads all keys from the cache, also those of its own step. So all queries see
the same rounded keys, however a text is cut into steps, and whichever request computed them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nanovllm.kernels import FP8, FP8_MAX

Shared = dict[Any, Any]  # what the layers of a step have in common, see `AttentionBackend.attend`


class KVScales(NamedTuple):
    """What the stored keys and values of one layer are multiplied with. Not used unless the cache is in FP8."""

    k: float = 1.0
    v: float = 1.0


UNSCALED = KVScales()


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Which tokens of a step belong to which sequence, and where the keys and values of each sequence lie.

    The T tokens of S sequences lie end to end: first those of sequences with a single query (decodes), then the others.
    Sequence s has the tokens query_start[s] to query_start[s + 1]. They are the last of its context: its query i sees
    the keys from 0 up to and with context_len[s] - query_len + i.

    The two maxima may exceed what the step needs, because a CUDA graph is recorded once for all lengths. They never
    fall short. A padding sequence has its context in the scratch block, and its output has no meaning; as a decode it
    has a context_len of 1. A sequence may have no queries. Tokens of one sequence may also be decodes of their own
    (`graphs/` does so), one right behind the other, in the order of their positions.
    """

    slots: Tensor  # [T] int64, where each token's key and value go
    query_start: Tensor  # [S + 1] int32
    context_len: Tensor  # [S] int32, keys that the last query of a sequence sees, its own included
    block_table: Tensor  # [S, M] int32; entries past a sequence's last block are never used
    num_decodes: int  # the first num_decodes sequences have exactly one query
    max_query_len: int
    max_context_len: int
    # Few queries of few sequences (see `graphs/sizes.py`), some of them behind a long context: a backend may then share
    # out the keys of one sequence among programs
    long_context: bool = False


class AttentionBackend(Protocol):
    """One way to compute attention over the paged KV cache. Holds no state of sequences or steps.

    name: what the configuration calls the backend.
    capturable: `attend` reads lengths and tables on the device only. So a CUDA graph that recorded it follows later
        changes of the metadata's tensors.
    eager_prefill: steps with prompts must not be recorded even so, because prefill reads lengths on the host.
    """

    name: str
    capturable: bool
    eager_prefill: bool

    def attend(
        self,
        q: Tensor,
        kv: Tensor,
        meta: AttentionMetadata,
        scale: float,
        shared: Shared | None = None,
        window: int = 0,
        scales: KVScales = UNSCALED,
    ) -> Tensor:
        """Causal attention of q [T, Hq, D] over what `kv` holds, the step's own keys already written: [T, Hq, D].

        Query head h reads the KV head h // (Hq // Hkv). `scale` multiplies the scores. In `shared`, which lives as long
        as the step, a backend keeps what it has worked out once for all layers.

        window: with a sliding window a query sees this many keys at most, its own and those right before it; 0 is no
        limit. What lies before the window of a sequence's first query is never read: those blocks may be another's.
        """


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """The numbers of FP8 that are nearest to x / scale. What is too large becomes 448 or -448, and NaN stays NaN."""
    return (x.float() * (1 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def write_kv(kv: Tensor, k: Tensor, v: Tensor, slots: Tensor, scales: KVScales = UNSCALED) -> None:
    """Write token i's key and value, of k and v [T, Hkv, D], to the slot `slots[i]` of one layer's cache.

    kv: [2, num_blocks, block_size, Hkv, D], contiguous. slots: [T] int64, block * block_size + offset; padding names a
    slot of the scratch block, never -1. `norm_rope_write` does this on a GPU, together with what comes before it.
    """
    if kv.dtype == FP8:  # PyTorch cannot index numbers of FP8 everywhere, but it can index bytes
        kv, k, v = kv.view(torch.uint8), to_fp8(k, scales.k).view(torch.uint8), to_fp8(v, scales.v).view(torch.uint8)
    rows = kv.flatten(1, 2)  # [2, num_slots, Hkv, D], a view
    rows[0].index_copy_(0, slots, k)
    rows[1].index_copy_(0, slots, v)


@dataclass(frozen=True, eq=False)
class BoundAttention:
    """Attention of one step, as the model calls it: a backend, the cache of every layer, and the step's metadata."""

    backend: AttentionBackend
    kv: list[Tensor]  # of each layer [2, num_blocks + 1, block_size, Hkv, D]
    meta: AttentionMetadata
    scale: float
    windows: Sequence[int]  # of each layer, see `AttentionBackend.attend`
    scales: Sequence[KVScales]  # of each layer
    shared: Shared = field(default_factory=dict)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the new keys and values, then read all that a query may see."""
        write_kv(self.kv[layer], k, v, self.meta.slots, self.scales[layer])
        return self.read(layer, q)

    def read(self, layer: int, q: Tensor) -> Tensor:
        """`__call__` without the write, for a fused kernel that has written keys and values already."""
        how = self.shared, self.windows[layer], self.scales[layer]
        return self.backend.attend(q, self.kv[layer], self.meta, self.scale, *how)
