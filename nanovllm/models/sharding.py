"""Which part of a model a rank has (Shoeybi et al., "Megatron-LM", 2019).

A rank has some of the heads and some of the MLP's neurons. The layers before them lose outputs (column-parallel), the
layers behind them lose inputs (row-parallel), so that nothing between the two leaves the rank. A sum over the ranks
makes the hidden state whole. With more ranks than KV heads, each KV head is on several ranks. The vocabulary is cut as
well, padded to a multiple of the ranks.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.models.config import ModelConfig


def shard_config(c: ModelConfig, ranks: int) -> ModelConfig:
    """The numbers of one rank's model. Raises ValueError if the model cannot be cut into that many parts."""
    heads, kv_heads, neurons = c.num_attention_heads, c.num_key_value_heads, c.intermediate_size
    fitting = [n for n in range(1, heads + 1) if not (heads % n or neurons % n or (kv_heads % n and n % kv_heads))]
    if ranks not in fitting:
        raise ValueError(
            f"tensor_parallel_size={ranks} does not fit a model of {heads} heads, {kv_heads} key/value heads and "
            f"{neurons} neurons; choose one of {', '.join(map(str, fitting))}"
        )
    return replace(
        c,
        num_attention_heads=heads // ranks,
        num_key_value_heads=max(1, kv_heads // ranks),
        intermediate_size=c.intermediate_size // ranks,
        vocab_size=-(-c.vocab_size // ranks),
    )


def read_shard(name: str, file: Any, c: ModelConfig, rank: int, ranks: int) -> Tensor:
    """This rank's part of the tensor `name` of an open safetensors file; nothing else of it is read.

    Norms, and biases that are added after a sum over the ranks, work on what is whole on every rank. They are not cut.
    """
    tensor = file.get_slice(name)
    layer, kind = name.split(".")[-2:]

    def part(size: int, index: int, parts: int) -> slice:
        return slice(index * size // parts, (index + 1) * size // parts)

    shape = tensor.get_shape()
    if layer in ("o_proj", "down_proj") and kind == "weight":
        return torch.as_tensor(tensor[:, part(shape[1], rank, ranks)])
    if layer in ("k_proj", "v_proj"):
        parts = min(ranks, c.num_key_value_heads)
        return torch.as_tensor(tensor[part(shape[0], rank * parts // ranks, parts)])
    if layer in ("q_proj", "gate_proj", "up_proj"):
        return torch.as_tensor(tensor[part(shape[0], rank, ranks)])
    if layer in ("embed_tokens", "lm_head"):
        rows = -(-c.vocab_size // ranks)
        own = torch.as_tensor(tensor[min(rank * rows, shape[0]) : min((rank + 1) * rows, shape[0])])
        return F.pad(own, (0, 0, 0, rows - len(own)))
    return torch.as_tensor(tensor[:])
