"""Exercise 7b: Draw a token without gathering the logits.

For a greedy row each rank tells the others one pair: its best logit, and whose it is. For a row with a temperature
stage 7 gathers all logits on every rank: four bytes for each token of the vocabulary. Why? Because `sample` adds noise
to each logit before it takes the best. But that is an argmax again, and the best of the best is the best.

Write `draw_apart`. Each rank calls it with the logits of its own tokens. It returns the next token of every row,
exactly the one that `sample` draws on one rank; rows of temperature 0 are greedy, as there. What each rank may put into
`group.all_gather` is one pair of numbers a row. `draw_together` does the same by gathering, as stage 7 does.

The noise of a row is `gumbel(seq, vocab_size)`: a number for every token of the vocabulary, the same on every rank.
Before you write, think: a rank has 256 columns, so why not `gumbel(seq, 256)`, which is less work? What would then be
true of token 3 and of token 259?

Then go on thinking: this sends hardly anything, but every rank makes all of the noise. What kind of random numbers
would let a rank make those of its own tokens only?

Check: .venv/bin/python -m tools.lectures.lecture_exercises 7b
"""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from torch import Tensor

from stages.core import Sequence, sample


class Gathering(Protocol):
    """What is needed here of the group that the ranks make."""

    rank: int
    size: int

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x, one after another: [...] -> [R, ...]."""
        ...


def draw_together(logits: Tensor, group: Gathering, seqs: SequenceOf[Sequence], vocab_size: int) -> list[int]:
    """logits [N, W] of this rank's W tokens -> the next token of each of the N rows."""
    every = group.all_gather(logits).transpose(0, 1).flatten(1)  # [N, R * W], and padding at its end
    return sample(every[:, :vocab_size], seqs)


def draw_apart(logits: Tensor, group: Gathering, seqs: SequenceOf[Sequence], vocab_size: int) -> list[int]:
    return draw_together(logits, group, seqs, vocab_size)  # yours to write
