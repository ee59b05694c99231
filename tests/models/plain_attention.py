"""Attention for tests: one sequence, keys and values in a dictionary, nothing clever."""

import torch
from torch import Tensor


class DictAttention:
    """`attend` for one sequence that grows from call to call. Computes in float32."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys and values [context, Hkv, D]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.kv:
            old_k, old_v = self.kv[layer]
            k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
        self.kv[layer] = k, v
        groups = q.shape[1] // k.shape[1]
        keys, values = (x.float().repeat_interleave(groups, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) / q.shape[-1] ** 0.5
        future = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
