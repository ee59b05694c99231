"""Log-probabilities of a prompt's own tokens, in bounded memory.

The logits of 16,384 positions would take 10 GB. So a step keeps its last hidden states, and computes the logits of one
piece of them at a time. The results of a piece are copied to the host at once, and the next piece reuses its memory.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.plan import Scored, StepPlan, TokenLogprobs
from nanovllm.pinned import to_device
from nanovllm.runner.rows import Rows
from nanovllm.sampling.logprobs import TopLogprobs, log_probabilities

PIECE = 2**25  # logits

Head = Callable[[Tensor], Tensor]  # from hidden states [N, H] to the logits of the whole vocabulary [N, V]


class PromptLogprobs(NamedTuple):
    """The log-probabilities of prompts that a step found, on their way to the host. A reader must wait for the step."""

    scored: list[Scored]
    wanted: list[int]  # for each entry of `scored`, how many of the likeliest tokens
    pieces: list[TopLogprobs]  # on the host, once the step is done

    def read(self) -> dict[int, list[TokenLogprobs]]:
        """By the key of a sequence: for each of its scored positions, the log-probabilities of what follows."""
        lengths = [s.end - s.start for s in self.scored]
        columns = TopLogprobs(*map(torch.cat, zip(*self.pieces, strict=True)))
        rows = columns.per_row([n for n, length in zip(self.wanted, lengths, strict=True) for _ in range(length)])
        found = iter(row for row in rows if row is not None)
        return {s.key: [next(found) for _ in range(length)] for s, length in zip(self.scored, lengths, strict=True)}


def score_prompts(
    hidden: Tensor, plan: StepPlan, wanted: Sequence[int], rows: Rows, head: Head, vocab_size: int
) -> PromptLogprobs:
    """Find the log-probabilities of the prompts of a step, piece by piece.

    hidden [T, H]: the hidden states of all tokens of the plan. wanted: for each entry of `plan.scored`, how many of the
    likeliest tokens.
    """
    before = np.cumsum([0, *(s.num_tokens for s in plan.scheduled)])
    place = {s.key: (s.row, before[i] - s.start) for i, s in enumerate(plan.scheduled)}
    numbers = []  # of each scored token: which of the T it is, its row, and the position that follows
    for key, start, end in plan.scored:
        row, shift = place[key]
        positions = np.arange(start, end)
        numbers.append(np.stack((positions + shift, np.full_like(positions, row), positions + 1)))
    token, row, position = to_device(np.concatenate(numbers, axis=1), rows.device)  # [S] each
    following = rows.token_ids[row, position].long()  # [S]
    n, size = max(wanted), piece_size(vocab_size, max(wanted))
    pieces = [
        score_piece(hidden[some], ids, n, head).to("cpu", non_blocking=True)
        for some, ids in zip(token.split(size), following.split(size), strict=True)
    ]
    return PromptLogprobs(plan.scored, list(wanted), pieces)


def piece_size(vocab_size: int, n: int) -> int:
    """The number of rows of a piece. An id and its log-probability take as much memory as three to six logits."""
    return max(1, PIECE // (vocab_size + 6 * n))


def score_piece(hidden: Tensor, following: Tensor, n: int, head: Head) -> TopLogprobs:
    """hidden [N, H], following [N] -> log-probabilities of the tokens that follow and of the n likeliest tokens."""
    return log_probabilities(head(hidden), following, n)
