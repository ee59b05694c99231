"""Token embedding, which may serve as the output head as well."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """weight [V, H], uninitialised: the loader fills it."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype), requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] -> [T, H]"""
        return F.embedding(input_ids, self.weight)
