"""A batch of rows with everything that the sampler's two tails want, for tests."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.sampling.sampler import sample_full, sample_plain
from nanovllm.sampling.state import SamplingMetadata, SamplingState
from nanovllm.sampling_params import SamplingParams

VOCAB = 40


class Rows:
    """Rows of one batch with everything that the two tails want. History: per row (prompt, output)."""

    def __init__(
        self,
        params: Sequence[SamplingParams],
        history: Sequence[tuple[list[int], list[int]]] | None = None,
        vocab_size: int = VOCAB,
        eos: Sequence[int] = (),
    ) -> None:
        history = history or [([0], [])] * len(params)
        longest = max(len(prompt) + len(output) for prompt, output in history)
        # What follows the known tokens is left over from an earlier owner of the row.
        token_ids = torch.full((len(params), longest + 3), 7, dtype=torch.int32)
        for i, (prompt, output) in enumerate(history):
            token_ids[i, : len(prompt) + len(output)] = torch.tensor(prompt + output, dtype=torch.int32)
        self.params = list(params)
        self.indices = torch.tensor([len(output) for _, output in history])
        self.state = SamplingState(token_ids, vocab_size, eos)
        seeded = [p.changed(seed=p.seed or 0) for p in params]
        self.state.install(range(len(params)), seeded, [len(prompt) for prompt, _ in history])

    def metadata(self, rows: Tensor, indices: Tensor | None = None, seeds: Tensor | None = None) -> SamplingMetadata:
        own_seeds, own_indices = self.state.seed[rows], self.indices[rows]
        return SamplingMetadata(
            self.state.temperature[rows],
            own_seeds if seeds is None else seeds,
            own_indices if indices is None else indices,
        )

    def plain(self, logits: Tensor) -> list[int]:
        return sample_plain(logits, self.metadata(torch.arange(len(self.params)))).tolist()

    def full(self, logits: Tensor) -> list[int]:
        rows = torch.arange(len(self.params))
        needs = self.state.needs(rows.tolist())
        assert needs is not None, "no row needs the full tail"
        return sample_full(logits, self.metadata(rows), rows, self.state, needs)[0].tolist()


def lively_logits(n: int, vocab_size: int = VOCAB, scale: float = 2.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(seed))
