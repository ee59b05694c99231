"""The sampling parameters of the running sequences, on the device: one row for each sequence."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.pinned import Writes, to_device
from nanovllm.sampling_params import MAX_BAD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams

LONGS, INTS, FLOATS = 8, 1, 6  # how many numbers of each kind a row has
WORDS = 2 * LONGS + INTS + FLOATS  # of 32 bits


@dataclass(frozen=True)
class SamplingMetadata:
    """What decides the tokens that a step samples, besides their logits. Each of the N tokens has an entry."""

    temperature: Tensor  # [N] float32
    seeds: Tensor  # [N] int64
    indices: Tensor  # [N] how many output tokens the sequence had before this token
    all_greedy: bool = False  # known on the host: no row has a temperature, so no noise is computed

    def __getitem__(self, part: slice) -> "SamplingMetadata":
        return SamplingMetadata(self.temperature[part], self.seeds[part], self.indices[part], self.all_greedy)


class Needs(NamedTuple):
    """What some row of a step asks for beyond its temperature. Known on the host, so that nothing else is launched. A
    tuple, since tuples are fast to hash: each step puts those of its rows into a set.

    num_candidates: how many of the largest logits decide top_k and top_p. A row is ranked if it has top_k or top_p. If
                    every ranked row has a top_k, the largest top_k; else the size of the vocabulary. 0: none is ranked.
    num_bad_words, num_stop_ids, num_biased:  the length of the longest such list.
    longest_bad_word:  the number of tokens of the longest spelling.
    num_logprobs:   the largest number of likeliest tokens to report; None if no row wants log-probabilities.
    """

    mask: bool = False
    num_bad_words: int = 0
    longest_bad_word: int = 0
    num_stop_ids: int = 0
    num_biased: int = 0
    penalties: bool = False
    min_p: bool = False
    num_candidates: int = 0
    num_logprobs: int | None = None


class SamplingState:
    """Sampling parameters of R rows, the last of which is scratch. `install` writes them when a sequence moves into a
    row. After that only the masks change, which `allow` writes.

    All tensors keep their addresses and widths, so that recorded steps may read them. A list has room for as many
    entries as `SamplingParams` allows. Its length is in a tensor of its own; entries behind the length are left over
    from other sequences.

    token_ids [R, L] int32 belongs to the caller, who keeps it up to date: penalties count prompt and output so far.
    numbers [WORDS, R] int32: memory for what `install` writes, of which the caller has `Writes`; None makes some.
    in_kernels: the plain tail does all that a row may ask for, except log-probabilities and grammars.
    """

    def __init__(
        self,
        token_ids: Tensor,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        in_kernels: bool = False,
        numbers: Tensor | None = None,
    ) -> None:
        num_rows, device = token_ids.shape[0], token_ids.device
        self.device = device
        self.token_ids = token_ids
        self.vocab_size = vocab_size
        self.eos_token_ids = set(eos_token_ids)
        self.in_kernels = in_kernels
        # All numbers of a row are in one tensor, so that `install` is one write. The names below are views of it.
        self._numbers = token_ids.new_zeros(WORDS, num_rows) if numbers is None else numbers
        # Where the words of row 0 stand, and how far from there those of the next row are
        self._first = np.arange(WORDS) * num_rows
        self._first[: 2 * LONGS] = (2 * num_rows * np.arange(LONGS)[:, None] + np.arange(2)).ravel()
        self._step = np.repeat([2, 1], [2 * LONGS, INTS + FLOATS])
        longs = self._numbers[: 2 * LONGS].view(-1).view(torch.int64).view(LONGS, num_rows)
        self.num_prompt_tokens = self._numbers[2 * LONGS]  # [R] int32
        floats = self._numbers[2 * LONGS + INTS :].view(torch.float32)
        self.seed, self.top_k, self.min_tokens = longs[:3]  # [R] each; top_k of a row without one is V
        # [R] each, about the edits of single tokens: the number of entries in each list, whether the mask counts, and
        # whether there is any edit at all, penalties included
        self.num_stop_ids, self.num_biased, self.num_bad_words, self.masked, self.edited = longs[3:]
        self.temperature, self.top_p, self.log_min_p = floats[:3]  # [R] each; log_min_p of a row without one is -inf
        self.repetition_penalty, self.presence_penalty, self.frequency_penalty = floats[3:]  # [R] each

        def ids(width: int) -> Tensor:
            return torch.zeros(num_rows, width, dtype=torch.int32, device=device)

        self.stop_ids = ids(MAX_STOP_IDS + len(self.eos_token_ids))  # [R, S], the ids that min_tokens holds back
        self.biased_ids = ids(MAX_LOGIT_BIAS)  # [R, B]
        self.bias = torch.zeros(num_rows, MAX_LOGIT_BIAS, device=device)  # [R, B] float32
        self.bad_tokens = ids(MAX_BAD_TOKENS)  # [R, T], one spelling after another
        self.bad_ends = ids(MAX_BAD_WORDS)  # [R, W], where in `bad_tokens` each spelling ends
        self.mask = ids(-(-vocab_size // 32))  # [R, ceil(V / 32)], a set bit for each token that is allowed
        # On the host
        self.params = [SamplingParams()] * num_rows
        self.special: dict[int, Needs] = {}  # of the rows for which temperature and seed are not enough

    def install(
        self,
        rows: Sequence[int],
        params: Sequence[SamplingParams],
        num_prompt_tokens: Sequence[int],
        writes: Writes | None = None,
    ) -> None:
        """Write the parameters of the sequences that now stand in `rows`. Lists are sent at once. Numbers are added to
        `writes`, which the caller sends; without `writes` they are sent at once, too."""
        longs, floats = [], []
        for row, p in zip(rows, params, strict=True):
            self.params[row] = p
            self.special.pop(row, None)
            if self._is_special(p):
                self.special[row] = self._needs(p)
            log_min_p = math.log(p.min_p) if p.min_p else -math.inf
            penalties = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
            floats.append((p.temperature, p.top_p, log_min_p, *penalties))
            lengths = self._install_lists(row, p) if self._is_edited(p) else (0,) * 5
            longs.append((p.seed, self._top_k(p), p.min_tokens, *lengths))
        places = self._first + self._step * np.array(rows)[:, None]  # [N, WORDS]
        prompts = np.array(num_prompt_tokens, dtype=np.int32)[:, None]
        values = np.array(longs, dtype=np.int64), prompts, np.array(floats, dtype=np.float32)
        told = writes or Writes(self._numbers.view(-1))
        told.add(self._numbers, places, np.hstack([part.view(np.int32) for part in values]))
        if writes is None:
            told.send()

    def needs(self, rows: Iterable[int]) -> Needs | None:
        """What these rows ask for beyond temperature and seed; None if none of them asks for anything."""
        # Most rows of a step ask for the same.
        special = {self.special[row] for row in rows if row in self.special} if self.special else set()
        if not special:
            return None
        *most, logprobs = zip(*special, strict=True)  # `num_logprobs` is the last
        largest = max((n for n in logprobs if n is not None), default=None)
        return Needs._make([*map(max, most), largest])

    def all_greedy(self, rows: Iterable[int]) -> bool:
        return all(self.params[row].temperature == 0 for row in rows)

    def metadata(self, rows: Tensor, positions: Tensor, all_greedy: bool = False) -> SamplingMetadata:
        """The metadata of the tokens that go to `positions` [N] of `rows` [N]."""
        indices = positions - self.num_prompt_tokens[rows]
        return SamplingMetadata(self.temperature[rows], self.seed[rows], indices, all_greedy)

    def allow(self, rows: Tensor, masks: Tensor) -> None:
        """Give rows [B] masks [B, ceil(V / 32)]: from now on only tokens that the masks allow are drawn.

        The scratch row may be among the rows, even several times, and gets no mask.
        """
        index = rows.long()
        self.mask.index_copy_(0, index, masks)
        self.masked.index_fill_(0, index, 1)
        self.masked[-1:].zero_()

    def write(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Put sampled tokens [N] where the next step reads them. A bad row's -1 becomes 0, which has an embedding."""
        self.token_ids[rows, positions] = token_ids.clamp(min=0).int()

    def _needs(self, p: SamplingParams) -> Needs:
        ranked = p.top_p < 1 or self._top_k(p) < self.vocab_size
        return Needs(
            mask=p.allowed_token_ids is not None,
            num_bad_words=len(p.bad_words_ids),
            longest_bad_word=max(map(len, p.bad_words_ids), default=0),
            num_stop_ids=len(self._stop_ids(p)),
            num_biased=len(p.logit_bias or ()),
            penalties=has_penalties(p),
            min_p=p.min_p > 0,
            num_candidates=self._top_k(p) if ranked else 0,
            num_logprobs=p.logprobs,
        )

    def _top_k(self, p: SamplingParams) -> int:
        return min(p.top_k, self.vocab_size) if p.top_k > 0 else self.vocab_size

    def _is_special(self, p: SamplingParams) -> bool:
        if p.logprobs is not None or p.structured_outputs is not None or self.in_kernels:
            return p.logprobs is not None or p.structured_outputs is not None
        # Filters never remove the likeliest token, so they mean nothing to a greedy row.
        filtered = p.top_p < 1 or p.min_p > 0 or self._top_k(p) < self.vocab_size
        return (filtered and p.temperature > 0) or self._is_edited(p)

    def _is_edited(self, p: SamplingParams) -> bool:
        """Whether scores of single tokens change. (Temperature and filters look at all scores alike.)"""
        listed = bool(p.logit_bias or p.bad_words_ids or self._stop_ids(p))
        return listed or has_penalties(p) or p.allowed_token_ids is not None

    def _stop_ids(self, p: SamplingParams) -> list[int]:
        """The token ids that min_tokens holds back."""
        ids = self.eos_token_ids.union(p.stop_token_ids) if p.min_tokens else ()
        return [i for i in ids if 0 <= i < self.vocab_size]  # config.json may name -1, or more than there are

    def _install_lists(self, row: int, p: SamplingParams) -> tuple[int, int, int, int, int]:
        """Write the lists of an edited row. Returns its numbers from `num_stop_ids` on."""

        def write(tensor: Tensor, values: Sequence[float] | NDArray[Any]) -> int:
            array = np.asarray(values, dtype=np.float32 if tensor.is_floating_point() else np.int32)
            if len(array):
                tensor[row, : len(array)] = to_device(array, self.device)
            return len(array)

        num_stop_ids = write(self.stop_ids, self._stop_ids(p))
        bias = p.logit_bias or {}
        num_biased = write(self.biased_ids, list(bias))
        write(self.bias, list(bias.values()))
        write(self.bad_tokens, list(chain.from_iterable(p.bad_words_ids)))
        num_bad_words = write(self.bad_ends, list(accumulate(map(len, p.bad_words_ids))))
        if p.allowed_token_ids is not None:
            write(self.mask, packed(p.allowed_token_ids, self.vocab_size))
        return num_stop_ids, num_biased, num_bad_words, int(p.allowed_token_ids is not None), 1


def packed(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """A set of tokens as bits [ceil(V / 32)] int32: token i is bit i % 32 of word i // 32."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def has_penalties(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
