"""Which part of a model a rank has (Shoeybi et al., "Megatron-LM", 2019).

A rank has some of the heads and some of the neurons of the MLP, or of each expert. The layers before them lose outputs
(column-parallel), the layers behind them lose inputs (row-parallel), so that nothing between the two leaves the rank. A
sum over the ranks makes the hidden state whole. With more ranks than KV heads, each KV head is on several ranks. The
vocabulary is cut as well, padded to a multiple of the ranks.

With expert parallelism a rank has whole experts, and not some neurons of every expert. Of E experts it has E / ranks,
those from rank * E / ranks on. All tokens are on every rank anyway. So no token is sent, and the same sum adds up the
outputs of the experts.
"""

import re
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.models.config import ModelConfig

EXPERT = re.compile(r"\.experts\.(\d+)\.")  # in the name of a tensor of one expert


def with_expert_parallel(c: ModelConfig) -> ModelConfig:
    """The same model, whose ranks have whole experts. Raises ValueError if it has no experts."""
    if c.moe is None:
        raise ValueError("enable_expert_parallel=True: this model has no experts; leave enable_expert_parallel out")
    return replace(c, moe=replace(c.moe, expert_parallel=True))


def shard_config(c: ModelConfig, ranks: int) -> ModelConfig:
    """The numbers of one rank's model. Raises ValueError if the model cannot be cut into that many parts."""
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
    neurons = (c.intermediate_size, *(() if c.moe is None else c.moe.sizes))

    def fits(n: int) -> bool:
        cut = heads % n or any(size % n for size in neurons) or (kv_heads % n and n % kv_heads)
        return not cut and (c.moe is None or c.moe.divides(n))

    fitting = ", ".join(str(n) for n in range(1, heads + 1) if fits(n))
    if c.moe is not None and not c.moe.divides(ranks):
        raise ValueError(
            f"enable_expert_parallel=True: {c.moe.num_experts} experts cannot be divided evenly among "
            f"tensor_parallel_size={ranks} ranks; choose one of {fitting}, or leave enable_expert_parallel out"
        )
    if not fits(ranks):
        raise ValueError(
            f"tensor_parallel_size={ranks} does not fit a model of {heads} heads, {kv_heads} key/value heads and "
            f"{' and '.join(map(str, dict.fromkeys(neurons)))} neurons; choose one of {fitting}"
        )
    return replace(
        c,
        num_attention_heads=heads // ranks,
        num_key_value_heads=max(1, kv_heads // ranks),
        intermediate_size=c.intermediate_size // ranks,
        moe=None if c.moe is None else c.moe.share(ranks),
        vocab_size=-(-c.vocab_size // ranks),
    )


def is_elsewhere(name: str, c: ModelConfig, rank: int, ranks: int) -> bool:
    """Whether a tensor belongs to an expert that another rank has whole: this rank does not read it."""
    found = EXPERT.search(name)
    if c.moe is None or not c.moe.expert_parallel or found is None:
        return False
    holder = int(found[1]) * ranks // c.moe.num_experts
    return holder != rank and holder < ranks


def read_shard(name: str, tensor: Any, c: ModelConfig, rank: int, ranks: int) -> Tensor:
    """This rank's part of a tensor in an open safetensors file (`get_slice`); nothing else of it is read.

    name: what the tensor is, in our names (see `loader.checkpoint_views`), which may not be those of the file.

    Norms, and biases that are added after a sum over the ranks, work on what is whole on every rank. They are not cut.
    """
    layer, kind = name.split(".")[-2:]

    def part(size: int, index: int, parts: int) -> slice:
        return slice(index * size // parts, (index + 1) * size // parts)

    shape = tensor.get_shape()
    if layer == "experts":  # all experts of a layer in one tensor
        if c.moe is not None and c.moe.expert_parallel:
            return torch.as_tensor(tensor[part(shape[0], rank, ranks)])
        if kind == "down_proj":
            return torch.as_tensor(tensor[:, :, part(shape[2], rank, ranks)])
        gate, up = (part(shape[1], i * ranks + rank, 2 * ranks) for i in range(2))
        return torch.cat([torch.as_tensor(tensor[:, gate]), torch.as_tensor(tensor[:, up])], dim=1)
    if c.moe is not None and c.moe.expert_parallel and EXPERT.search(name):
        return torch.as_tensor(tensor[:])
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
