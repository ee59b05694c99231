"""Guessing without a model: what followed the last n tokens when they stood in the text before.

Prompt lookup (Saxena, 2023; Yang et al., "Inference with Reference", 2023): it costs nothing, and is right where the
output repeats the prompt or itself, as in summaries, edits and code.
"""

from nanovllm.engine.sequence import Sequence


class NgramProposer:
    """Looks for the latest place where the last `n` tokens stand earlier in prompt or output."""

    def __init__(self, n: int) -> None:
        self.n = n

    def propose(self, seq: Sequence, k: int) -> list[int | None]:
        """k tokens, or none if the n-gram is new. Where the text after the match ends, the guess is that it repeats."""
        tokens, n = seq.token_ids, self.n
        for end in range(max(seq.num_indexed, n), len(tokens)):
            seq.ngrams[tuple(tokens[end - n : end])] = end
        seq.num_indexed = len(tokens)
        found = seq.ngrams.get(tuple(tokens[-n:]))
        if found is None:
            return []
        return [tokens[found + i % (len(tokens) - found)] for i in range(k)]
