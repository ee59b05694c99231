"""Who guesses tokens ahead, as the scheduler sees it. What a guess is worth is settled in the step that verifies it."""

from typing import Protocol

from nanovllm.config import Speculation
from nanovllm.engine.ngram import NgramProposer
from nanovllm.engine.sequence import Sequence


class Proposer(Protocol):
    """Guesses how a sequence goes on."""

    def propose(self, seq: Sequence, k: int) -> list[int | None]:
        """At most k tokens to follow `seq.token_ids`. None stands for a token that the data plane's draft model will
        guess."""
        ...


class DraftModelProposer:
    """Leaves all of it to the draft model, which lives where the weights are."""

    def propose(self, seq: Sequence, k: int) -> list[int | None]:
        return [None] * k


def make_proposer(speculation: Speculation) -> Proposer:
    return NgramProposer(speculation.n) if speculation.method == "ngram" else DraftModelProposer()
