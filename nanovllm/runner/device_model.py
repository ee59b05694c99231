"""One model on one device: weights, attention backend and KV cache. The target is one, a draft model another."""

import torch
from torch import Tensor

from nanovllm.attention import select_backend
from nanovllm.attention.interface import AttentionMetadata, BoundAttention
from nanovllm.kernels import FP8
from nanovllm.models.transformer import Transformer
from nanovllm.runner.batch import Batch


class DeviceModel:
    """What turns a batch into logits.

    model: the rank's share, already on `device`. backend_name: as in the configuration, which may be "auto".
    fp8_kv_cache: whether keys and values are kept in FP8, and not in the model's dtype.
    """

    def __init__(
        self, model: Transformer, backend_name: str, block_size: int, device: torch.device, fp8_kv_cache: bool = False
    ) -> None:
        c = model.config
        self.model, self.config, self.block_size, self.device = model, c, block_size, device
        self.kv_dtype = FP8 if fp8_kv_cache else c.dtype
        self.backend = select_backend(backend_name, device, c.head_dim, block_size, c.dtype, self.kv_dtype)
        self.scale = c.attention_scale
        # Keys and values of each layer [2, num_blocks + 1, block_size, Hkv, D], made by `allocate_kv_cache`: the number
        # of blocks is known only once the memory that a step leaves has been measured
        self.kv_cache: list[Tensor] = []

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Blocks for all layers, and one more: scratch, for padding."""
        c = self.config
        shape = (2, num_blocks + 1, self.block_size, c.num_key_value_heads, c.head_dim)
        self.kv_cache = [
            torch.zeros(shape, dtype=self.kv_dtype, device=self.device) for _ in range(c.num_hidden_layers)
        ]

    def make_logits(self, num_rows: int) -> Tensor:
        """Memory [N, V] for the logits of recorded steps."""
        return torch.empty(num_rows, self.config.vocab_size, dtype=self.config.dtype, device=self.device)

    def bind_attention(self, meta: AttentionMetadata) -> BoundAttention:
        """What the layers call in a step with this metadata."""
        layers = self.kv_cache, meta, self.scale, self.config.windows, self.model.kv_scales
        return BoundAttention(self.backend, *layers)

    def forward(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        """`hidden`, and from there `logits`."""
        return self.logits(self.hidden(batch), batch, out)

    def hidden(self, batch: Batch) -> Tensor:
        """Compute a batch, whose keys and values go into the cache. Returns the last hidden states [T, H]."""
        return self.model(batch.input_ids, batch.positions, self.bind_attention(batch.attention))

    def logits(self, hidden: Tensor, batch: Batch, out: Tensor | None = None) -> Tensor:
        """The logits of a batch's sampled tokens [N, V] in the model's dtype, with several ranks [N, V / R]; in the
        first rows of `out`, if that is given."""
        if batch.sampled_tokens is not None:
            hidden = hidden[batch.sampled_tokens]  # [N, H]
        return self.model.logits(hidden) if out is None else self.model.logits(hidden, out[: len(hidden)])
