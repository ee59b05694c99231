"""The sampling parameters that only the full tail reads, in the row that a sequence has on the device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.runner.rows import to_device
from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class Needs:
    """What some row of a step asks for beyond its temperature. Known on the host, so that the rest is never launched.

    num_candidates: how many of the largest logits settle top_k and top_p: the largest top_k where each row that is
                    ranked has one, else the whole vocabulary; 0 if no row is ranked.
    num_logprobs:   the largest number of likeliest tokens to report; None if no row wants log-probabilities.
    """

    penalties: bool = False
    min_tokens: bool = False
    min_p: bool = False
    num_candidates: int = 0
    num_logprobs: int | None = None


class SamplingState:
    """Parameters of up to R rows; `install` writes them where they change.

    token_ids [R, L] and num_prompt_tokens [R] belong to the caller, who keeps them up to date: prompt and output so far
    are what penalties count.
    """

    def __init__(
        self, token_ids: Tensor, num_prompt_tokens: Tensor, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        num_rows, device = token_ids.shape[0], token_ids.device
        self.token_ids = token_ids
        self.num_prompt_tokens = num_prompt_tokens
        self.vocab_size = vocab_size
        self.eos_token_ids = set(eos_token_ids)
        # One tensor of each dtype, so that a new row takes two transfers; the names below are columns of them.
        self._floats = torch.zeros(num_rows, 5, device=device)
        self._ints = torch.zeros(num_rows, 2, dtype=torch.int64, device=device)
        self.top_p, self.min_p, self.repetition_penalty, self.presence_penalty, self.frequency_penalty = (
            self._floats.unbind(1)  # [R] each
        )
        self.top_k, self.min_tokens = self._ints.unbind(1)  # [R] each; top_k of a row without one is V
        self.stop_ids = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)  # [R, S], wider when needed
        self.special: dict[int, SamplingParams] = {}  # the rows for which the plain tail is not enough

    def install(self, rows: Sequence[int], params: Sequence[SamplingParams]) -> None:
        """Write the parameters of the sequences that now stand in `rows`."""
        floats, ints = [], []
        for row, p in zip(rows, params, strict=True):
            self.special.pop(row, None)
            if self._is_special(p):
                self.special[row] = p
            floats.append((p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty))
            ints.append((self._top_k(p), p.min_tokens))
            if p.min_tokens:
                self._install_stop_ids(row, sorted(self.eos_token_ids | set(p.stop_token_ids)))
        index = to_device(np.array(rows, dtype=np.int64), self.token_ids.device)
        self._floats[index] = to_device(np.array(floats, dtype=np.float32), self.token_ids.device)
        self._ints[index] = to_device(np.array(ints, dtype=np.int64), self.token_ids.device)

    def needs(self, rows: Iterable[int]) -> Needs | None:
        """What the full tail has to do for these rows; None if the plain tail does for all of them."""
        special = [self.special[row] for row in rows if row in self.special] if self.special else []
        if not special:
            return None
        ranked = [self._top_k(p) for p in special if p.top_p < 1 or self._top_k(p) < self.vocab_size]
        return Needs(
            penalties=any(map(has_penalties, special)),
            min_tokens=any(p.min_tokens for p in special),
            min_p=any(p.min_p for p in special),
            num_candidates=max(ranked, default=0),
            num_logprobs=max((p.logprobs for p in special if p.logprobs is not None), default=None),
        )

    def _top_k(self, p: SamplingParams) -> int:
        return min(p.top_k, self.vocab_size) if p.top_k > 0 else self.vocab_size

    def _is_special(self, p: SamplingParams) -> bool:
        # Filters never remove the likeliest token, so they mean nothing to a greedy row.
        filtered = p.top_p < 1 or p.min_p > 0 or self._top_k(p) < self.vocab_size
        return (
            (filtered and p.temperature > 0)
            or has_penalties(p)
            or (p.min_tokens > 0 and bool(self.eos_token_ids or p.stop_token_ids))
            or p.logprobs is not None
        )

    def _install_stop_ids(self, row: int, ids: list[int]) -> None:
        ids = [i for i in ids if i < self.vocab_size]
        if not ids:
            return
        if len(ids) > self.stop_ids.shape[1]:
            wider = self.stop_ids[:, :1].expand(-1, len(ids) - self.stop_ids.shape[1])
            self.stop_ids = torch.cat((self.stop_ids, wider), dim=1)
        padded = ids + ids[:1] * (self.stop_ids.shape[1] - len(ids))  # naming an id twice does no harm
        self.stop_ids[row] = to_device(np.array(padded, dtype=np.int64), self.token_ids.device)


def has_penalties(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
