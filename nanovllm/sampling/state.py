"""The sampling parameters of the running sequences, on the device: one row for each sequence."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.pinned import to_device
from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class SamplingMetadata:
    """What decides the tokens that a step samples, besides their logits. Each of the N tokens has an entry."""

    temperature: Tensor  # [N] float32
    seeds: Tensor  # [N] int64
    indices: Tensor  # [N] how many output tokens the sequence had before this token
    all_greedy: bool = False  # known on the host: no row has a temperature, so no noise is computed

    def __getitem__(self, part: slice) -> "SamplingMetadata":
        return SamplingMetadata(self.temperature[part], self.seeds[part], self.indices[part], self.all_greedy)


@dataclass(frozen=True)
class Needs:
    """What some row of a step asks for beyond its temperature. Known on the host, so that nothing else is launched.

    num_candidates: how many of the largest logits settle top_k and top_p: the largest top_k where each row that is
                    ranked has a top_k, else the whole vocabulary; 0 if no row is ranked.
    num_logprobs:   the largest number of likeliest tokens to report; None if no row wants log-probabilities.
    """

    penalties: bool = False
    min_tokens: bool = False
    min_p: bool = False
    num_candidates: int = 0
    num_logprobs: int | None = None


class SamplingState:
    """Parameters of R rows. `install` writes them when a sequence moves into a row; nothing else changes them.

    token_ids [R, L] int32 belongs to the caller, who keeps it up to date: penalties count prompt and output so far.
    filters_are_plain: the plain tail has min_p, top_k and top_p, so a row that asks for nothing else is not special.
    """

    def __init__(
        self, token_ids: Tensor, vocab_size: int, eos_token_ids: Iterable[int], filters_are_plain: bool = False
    ) -> None:
        num_rows, device = token_ids.shape[0], token_ids.device
        self.device = device
        self.token_ids = token_ids
        self.vocab_size = vocab_size
        self.eos_token_ids = set(eos_token_ids)
        self.filters_are_plain = filters_are_plain
        # What every step reads
        self.num_prompt_tokens = torch.zeros(num_rows, dtype=torch.int32, device=device)  # [R]
        self.temperature = torch.zeros(num_rows, device=device)  # [R] float32
        self.seed = torch.zeros(num_rows, dtype=torch.int64, device=device)  # [R]
        # What only special rows need. One tensor of each dtype, so that a new row takes two transfers; the names below
        # are rows of them.
        self._floats = torch.zeros(5, num_rows, device=device)
        self._ints = torch.zeros(2, num_rows, dtype=torch.int64, device=device)
        self.top_p, self.log_min_p = self._floats[:2]  # [R] each; log_min_p of a row without one is -inf
        self.repetition_penalty, self.presence_penalty, self.frequency_penalty = self._floats[2:]  # [R] each
        self.top_k, self.min_tokens = self._ints  # [R] each; top_k of a row without one is V
        self.stop_ids = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)  # [R, S], wider when needed
        # On the host
        self.params = [SamplingParams()] * num_rows
        self.special: dict[int, SamplingParams] = {}  # the rows for which temperature and seed are not enough

    def install(self, rows: Sequence[int], params: Sequence[SamplingParams], num_prompt_tokens: Sequence[int]) -> None:
        """Write the parameters of the sequences that now stand in `rows`."""
        floats, ints = [], []
        for row, p in zip(rows, params, strict=True):
            self.params[row] = p
            self.special.pop(row, None)
            if self._is_special(p):
                self.special[row] = p
            log_min_p = math.log(p.min_p) if p.min_p else -math.inf
            floats.append((p.top_p, log_min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty))
            ints.append((self._top_k(p), p.min_tokens))
            if p.min_tokens:
                self._install_stop_ids(row, sorted(self.eos_token_ids | set(p.stop_token_ids)))
        index = to_device(np.array(rows, dtype=np.int64), self.device)
        self.num_prompt_tokens[index] = to_device(np.array(num_prompt_tokens, dtype=np.int32), self.device)
        self.temperature[index] = to_device(np.array([p.temperature for p in params], dtype=np.float32), self.device)
        self.seed[index] = to_device(np.array([p.seed for p in params], dtype=np.int64), self.device)
        self._floats[:, index] = to_device(np.array(floats, dtype=np.float32), self.device).T
        self._ints[:, index] = to_device(np.array(ints, dtype=np.int64), self.device).T

    def needs(self, rows: Iterable[int]) -> Needs | None:
        """What these rows ask for beyond temperature and seed; None if none of them asks for anything."""
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

    def all_greedy(self, rows: Iterable[int]) -> bool:
        return all(self.params[row].temperature == 0 for row in rows)

    def metadata(self, rows: Tensor, positions: Tensor, all_greedy: bool = False) -> SamplingMetadata:
        """The metadata of the tokens that go to `positions` [N] of `rows` [N]."""
        indices = positions - self.num_prompt_tokens[rows]
        return SamplingMetadata(self.temperature[rows], self.seed[rows], indices, all_greedy)

    def write(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Put sampled tokens [N] where the next step reads them; the -1 of a bad row as 0, which has an embedding."""
        self.token_ids[rows, positions] = token_ids.clamp(min=0).int()

    def _top_k(self, p: SamplingParams) -> int:
        return min(p.top_k, self.vocab_size) if p.top_k > 0 else self.vocab_size

    def _is_special(self, p: SamplingParams) -> bool:
        # Filters never remove the likeliest token, so they mean nothing to a greedy row.
        filtered = p.top_p < 1 or p.min_p > 0 or self._top_k(p) < self.vocab_size
        return (
            (filtered and p.temperature > 0 and not self.filters_are_plain)
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
        self.stop_ids[row] = to_device(np.array(padded, dtype=np.int64), self.device)


def has_penalties(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
