"""A batch of rows with everything that the sampler's two tails want, for tests."""

import math
import random
from collections.abc import Sequence
from typing import Any

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
        token_ids = torch.full((len(params), longest + 3), min(7, vocab_size - 1), dtype=torch.int32)
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
        return sample_full(logits, self.metadata(rows), rows, self.state, needs).tolist()


def literal_edits(
    logits: Tensor, p: SamplingParams, prompt: list[int], output: list[int], stop_ids: Sequence[int] = ()
) -> list[float]:
    """One row's scores as the parameters' texts say, token by token. stop_ids: what min_tokens holds back."""
    scores: list[float] = logits.tolist()
    ruled_out = set(range(len(scores))) - set(
        range(len(scores)) if p.allowed_token_ids is None else p.allowed_token_ids
    )
    for *before, last in p.bad_words_ids:
        if output[len(output) - len(before) :] == before and len(before) <= len(output):
            ruled_out.add(last)
    if len(output) < p.min_tokens:
        ruled_out.update(stop_ids)
    for i, bias in (p.logit_bias or {}).items():
        scores[i] += bias
    for i in set(prompt + output):
        scores[i] = scores[i] / p.repetition_penalty if scores[i] > 0 else scores[i] * p.repetition_penalty
    for i in set(output):
        scores[i] -= p.frequency_penalty * output.count(i) + p.presence_penalty
    return [-math.inf if i in ruled_out else score for i, score in enumerate(scores)]


def random_edits(rng: random.Random, vocab_size: int) -> tuple[SamplingParams, list[int], list[int]]:
    """Parameters, a prompt and an output of few different tokens, so that all of them meet at the same tokens."""

    def tokens(most: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(rng.randrange(most + 1))]

    def some(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.5 else otherwise

    few = tokens(5) or [0]
    prompt, output = ([rng.choice(few) for _ in range(rng.randrange(low, 12))] for low in (1, 0))
    words = [tuple(output[i : i + rng.randint(0, 3)]) for i in range(len(output))] + [tuple(output[-2:])]
    p = SamplingParams(
        repetition_penalty=some(rng.uniform(0.5, 2), 1),
        presence_penalty=some(rng.uniform(-2, 2), 0),
        frequency_penalty=some(rng.uniform(-2, 2), 0),
        logit_bias=some({i: rng.uniform(-5, 5) for i in tokens(4) + few}, None),
        allowed_token_ids=some([*tokens(vocab_size), few[0]], None),
        min_tokens=some(rng.randrange(12), 0),
        stop_token_ids=some(tokens(3) + few[:1], ()),
    )
    return p.changed(bad_words_ids=some(tuple((*w, t) for w in words for t in tokens(2)), ())), prompt, output


def lively_logits(n: int, vocab_size: int = VOCAB, scale: float = 2.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(seed))
