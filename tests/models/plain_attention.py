"""Attention for tests: one sequence, keys and values in a dictionary, nothing clever."""

import torch
from torch import Tensor

from nanovllm.models.config import ModelConfig


class DictAttention:
    """`attend` for one sequence that grows from call to call. Computes in float32.

    config: for the windows and the scale of a model that has its own.
    """

    def __init__(self, config: ModelConfig | None = None) -> None:
        self.config = config
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys and values [context, Hkv, D]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.kv:
            old_k, old_v = self.kv[layer]
            k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
        self.kv[layer] = k, v
        groups = q.shape[1] // k.shape[1]
        keys, values = (x.float().repeat_interleave(groups, dim=1) for x in (k, v))
        scale, window = q.shape[-1] ** -0.5, 0
        if self.config is not None:
            scale, window = self.config.attention_scale, self.config.windows[layer]
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))  # [n, L]
        unseen = (distance < 0) | (distance >= (window or len(k)))
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
