"""What the model runner and an attention backend say to each other.

Slots number the places of the KV cache: slot = block * block_size + offset. The KV cache of one layer is a contiguous
tensor [2, num_blocks + 1, block_size, Hkv, D]: keys, then values. Its last block is the scratch block, which belongs to
no sequence: padding writes there, because slot -1 would be the last slot of somebody's block.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Shared = dict[Any, Any]  # of a step, see `AttentionBackend.attend`


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Which tokens of a step belong to which sequence, and where the keys and values of each sequence lie.

    The T tokens of S sequences lie end to end: first those of sequences with a single query (decodes), then the others.
    Sequence s has the tokens query_start[s] to query_start[s + 1]. They are the last of its context: its query i sees
    the keys from 0 up to and with context_len[s] - query_len + i.

    The two maxima may exceed what the step needs (a CUDA graph is recorded once for all lengths), never fall short.
    A padding sequence has its context in the scratch block, a decode one query with a context_len of 1; its output has
    no meaning. A sequence may have no queries. Several tokens of one may also be given as decodes of their own (see
    `graphs/decode_steps.py`): one right behind the other, in the order of their positions.
    """

    slots: torch.Tensor  # [T] int64, where each token's key and value go
    query_start: torch.Tensor  # [S + 1] int32
    context_len: torch.Tensor  # [S] int32, keys that the last query of a sequence sees, its own included
    block_table: torch.Tensor  # [S, M] int32; entries past a sequence's last block are never used
    num_decodes: int  # the first num_decodes sequences have exactly one query
    max_query_len: int
    max_context_len: int


class AttentionBackend(Protocol):
    """One way to compute attention over the paged KV cache. Holds no state of sequences or steps.

    `name` is how the configuration calls it. `capturable` says that `write` and `attend` read lengths, tables and slots
    on the device only, so that a CUDA graph that recorded them follows later changes of the metadata's tensors.
    """

    name: str
    capturable: bool

    def write(self, kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store k and v [T, Hkv, D] of the step's tokens in `slots` [T] of one layer's cache `kv`."""

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata, scale: float, shared: Shared | None = None
    ) -> torch.Tensor:
        """Causal attention of q [T, Hq, D] over what `kv` holds, the step's own keys already written: [T, Hq, D].

        Query head h reads the KV head h // (Hq // Hkv). `scale` multiplies the scores. What the layers of a step
        have in common a backend works out once, and keeps in `shared`, which lives as long as the step.
        """


@dataclass(frozen=True, eq=False)
class BoundAttention:
    """Attention of one step, as the model calls it: a backend, the cache of every layer, and the step's metadata."""

    backend: AttentionBackend
    kv: list[torch.Tensor]  # of each layer [2, num_blocks + 1, block_size, Hkv, D]
    meta: AttentionMetadata
    scale: float
    shared: Shared = field(default_factory=dict)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write the new keys and values, then read all that a query may see."""
        self.backend.write(self.kv[layer], k, v, self.meta.slots)
        return self.read(layer, q)

    def read(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """The second half, where a fused kernel has written keys and values already."""
        return self.backend.attend(q, self.kv[layer], self.meta, self.scale, self.shared)
