"""What a step sampled, on its way to the host."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.engine.plan import TokenLogprobs
from nanovllm.runner.prompt_logprobs import PromptLogprobs
from nanovllm.sampling.logprobs import TopLogprobs


@dataclass
class StepOutput:
    """The tokens of a step. Whoever reads them waits until the step is done and they are copied."""

    token_ids: Tensor  # [N] int64: for each sequence one token per guess and one more
    guesses: Tensor | None  # [N] int64: what had been guessed there; None if nobody guesses
    num_sampled: list[int]  # how many of the N tokens each sequence has
    logprobs: TopLogprobs | None
    wanted: list[int | None]  # how many of the likeliest tokens each sequence asked for; not read without `logprobs`
    prompts: PromptLogprobs | None = None  # log-probabilities of prompts, to be read after the tokens
    # Which of `token_ids` are these tokens, on the host; None: all. With guesses or log-probabilities it is None
    chosen: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        self.ready: torch.cuda.Event | None = None
        if self.token_ids.is_cuda:
            self.token_ids = self.token_ids.to("cpu", non_blocking=True)
            self.guesses = None if self.guesses is None else self.guesses.to("cpu", non_blocking=True)
            self.logprobs = None if self.logprobs is None else self.logprobs.to("cpu", non_blocking=True)
            self.ready = torch.cuda.Event()
            self.ready.record()

    def read(self) -> list[tuple[list[int], list[TokenLogprobs] | None]]:
        """The new tokens of the step's sequences in order, up to the first that differs from its guess, -1 for a
        bad row; and log-probabilities where wanted."""
        if self.ready is not None:
            self.ready.synchronize()
        token_ids = (self.token_ids if self.chosen is None else self.token_ids[self.chosen]).tolist()
        if self.guesses is None and self.logprobs is None:  # almost always: one token each
            return [([token], None) for token in token_ids]
        of_token: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self.logprobs is not None:
            of_token = self.logprobs.per_row(
                [n for n, times in zip(self.wanted, self.num_sampled, strict=True) for _ in range(times)]
            )
        if self.guesses is None:
            return [([token], None if row is None else [row]) for token, row in zip(token_ids, of_token, strict=True)]
        guesses = self.guesses.tolist()
        found: list[tuple[list[int], list[TokenLogprobs] | None]] = []
        first = 0
        for num_sampled in self.num_sampled:
            last = first
            while last < first + num_sampled - 1 and token_ids[last] == guesses[last]:
                last += 1
            logprobs = [row for row in of_token[first : last + 1] if row is not None]
            found.append((token_ids[first : last + 1], logprobs or None))
            first += num_sampled
        return found
