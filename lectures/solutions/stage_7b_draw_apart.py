"""Solution of exercise 7b: the noise is added where the logits are, and stage 7's `best_of` and `winners` do the rest.

With gumbel(seq, W) tokens 3 and W + 3 would get the same noise. Each rank's choice would be right, but all ranks would
be lucky together: a token's chance would depend on who its double is. Noise that is computed from the seed, the index
and the token's id, and not drawn one after another, is there for any token at once. The engine `nanovllm` has it.
"""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from stages import stage_7_tensor_parallel as stage_7
from stages.core import Sequence, gumbel, sample


class Gathering(Protocol):
    """What is needed here of the group that the ranks make."""

    rank: int
    size: int

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x, one after another: [...] -> [R, ...]."""


def draw_together(logits: Tensor, group: Gathering, seqs: SequenceOf[Sequence], vocab_size: int) -> list[int]:
    """logits [N, W] of this rank's W tokens -> the next token of each of the N rows."""
    every = group.all_gather(logits).transpose(0, 1).flatten(1)  # [N, R * W], and padding at its end
    return sample(every[:, :vocab_size], seqs)


def draw_apart(logits: Tensor, group: Gathering, seqs: SequenceOf[Sequence], vocab_size: int) -> list[int]:
    # exercise 7b: the token that `sample` draws, from one pair for each row
    # instead: return draw_together(logits, group, seqs, vocab_size)  # yours to write
    width = logits.shape[1]
    scores = logits.to(torch.float64, copy=True)  # as the noise is: in float32 two tokens could come out equal
    for i, seq in enumerate(seqs):
        if seq.params.temperature > 0:
            noise = F.pad(gumbel(seq, vocab_size), (0, group.size * width - vocab_size))
            scores[i] += seq.params.temperature * noise[group.rank * width : (group.rank + 1) * width]
    return stage_7.winners(group.all_gather(stage_7.best_of(scores, group.rank, vocab_size)))
    # end exercise
