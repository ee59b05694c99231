"""A proposer for measurements: it knows what will come, and is right about it as often as it is told to be.

What speculation gains depends on how often guesses are right, and that on draft, target and text. Here it is chosen, so
that one measurement stands for any draft of that quality, the draft's own cost aside. The guesses are verified like all
others: put a `ReplayProposer` in the place of an engine's own proposer, `llm.engine.scheduler.proposer`.
"""

import random
from collections.abc import Mapping, Sequence

from nanovllm.engine.sequence import Sequence as EngineSequence
from nanovllm.outputs import SpeculationStats
from nanovllm.sampling_params import derive_seed


class ReplayProposer:
    """Guesses tokens that are known: the share `acceptance` of each request's is right, in places drawn at random.

    known: by request id, what the request will generate. Whether a guess is right depends on `seed`, the request and
    the position alone: on no batch, no k, and no preemption. Where nothing is known any more, nothing is guessed.
    """

    def __init__(self, known: Mapping[str, Sequence[int]], acceptance: float, vocab_size: int, seed: int = 0) -> None:
        if not 0 <= acceptance <= 1:
            raise ValueError(f"acceptance must be in [0, 1]; got {acceptance!r}")
        self.guesses = {}
        for number, (request_id, tokens) in enumerate(known.items()):
            wrong = set(
                random.Random(derive_seed(seed, number)).sample(
                    range(len(tokens)), round((1 - acceptance) * len(tokens))
                )
            )
            self.guesses[request_id] = [(t + (i in wrong)) % vocab_size for i, t in enumerate(tokens)]

    def propose(self, seq: EngineSequence, k: int) -> list[int | None]:
        first = seq.num_output_tokens
        return [*self.guesses[seq.request_id][first : first + k]]


def acceptance(stats: SpeculationStats) -> float:
    """The share of accepted guesses among those that were looked at, all before them in their step being right."""
    if not stats.num_steps:
        raise ValueError("no guess was verified, so there is no share of accepted ones")
    looked_at = stats.proposed[0] + sum(map(min, stats.accepted, stats.proposed[1:]))
    return sum(stats.accepted) / looked_at


def tokens_per_step(acceptance: float, k: int) -> float:
    """What a step that verifies k guesses brings on average: 1 + a + ... + a**k (Leviathan et al., 2023)."""
    return float(sum(acceptance**i for i in range(k + 1)))
