"""Guessing tokens ahead, as the scheduler sees it: n-grams, or places that the runner's draft model fills in.

A step verifies the guesses: `runner/step_output.py` says which were right, and `Scheduler._roll_back` forgets the rest.
"""

from typing import Protocol

from nanovllm.config import Speculation
from nanovllm.engine.sequence import Sequence


class Proposer(Protocol):
    """Guesses how a sequence goes on."""

    def propose(self, seq: Sequence, k: int) -> list[int | None]:
        """At most k tokens to follow `seq.token_ids`. A None is filled in by the data plane's draft model."""
        ...


class DraftModelProposer:
    """Leaves every guess to the draft model, which runs in the data plane, beside the weights of the target."""

    def propose(self, seq: Sequence, k: int) -> list[int | None]:
        return [None] * k


class NgramProposer:
    """Guesses what followed the last `n` tokens at their most recent earlier occurrence in prompt or output.

    Prompt lookup (Saxena, 2023; Yang et al., "Inference with Reference", 2023). It needs no model, and is often right
    where the output repeats the prompt or itself, as in summaries, edits and code.
    """

    def __init__(self, n: int) -> None:
        self.n = n

    def propose(self, seq: Sequence, k: int) -> list[int | None]:
        """k tokens, or none if the n-gram is new; fewer where a grammar forbids them. Where the text after the match
        ends, the guess is that it repeats."""
        tokens, n = seq.token_ids, self.n
        for end in range(max(seq.num_indexed, n), len(tokens)):
            seq.ngrams[tuple(tokens[end - n : end])] = end
        seq.num_indexed = len(tokens)
        found = seq.ngrams.get(tuple(tokens[-n:]))
        if found is None:
            return []
        guesses: list[int] = [tokens[found + i % (len(tokens) - found)] for i in range(k)]
        return [*(guesses if seq.matcher is None else guesses[: seq.matcher.num_valid(guesses)])]


def make_proposer(speculation: Speculation) -> Proposer:
    return NgramProposer(speculation.n) if speculation.method == "ngram" else DraftModelProposer()
