"""Token embedding, which may serve as the output head as well."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.distributed.group import Group


class Embedding(nn.Module):
    """weight [V, H], uninitialised: the loader fills it.

    Of several ranks each has V rows, from the token rank * V on. For all other tokens a rank gives zeros, so that the
    sum over the ranks is the vector.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, group: Group | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype), requires_grad=False)
        self.group = group

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] -> [T, H]"""
        if self.group is None or self.group.size == 1:
            return F.embedding(input_ids, self.weight)
        rows = input_ids - self.group.rank * self.weight.shape[0]
        own = (rows >= 0) & (rows < self.weight.shape[0])
        vectors = F.embedding(rows.where(own, 0), self.weight)  # [T, H]
        return self.group.all_reduce(vectors.where(own[:, None], 0))
