"""Log-probabilities of the sampled token and of the likeliest tokens, under the model's own distribution."""

from array import array
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from struct import unpack_from
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.engine.plan import TokenLogprobs
from nanovllm.kernels import fused_kernels


class TopLogprobs(NamedTuple):
    """Log-probabilities of N rows, on the device until `to` is called. Column 0 is the sampled token's."""

    token_ids: Tensor  # [N, 1 + n] int64
    values: Tensor  # [N, 1 + n] float32
    ranks: Tensor  # [N] int64, of the sampled token, from 1

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "TopLogprobs":
        return TopLogprobs(*(column.to(device, non_blocking=non_blocking) for column in self))

    def spread(self, index: Tensor, n: int) -> "TopLogprobs":
        """These rows, put at the places `index` of n rows. The values of the other rows mean nothing."""
        return TopLogprobs(*(c.new_zeros(n, *c.shape[1:]).index_copy_(0, index, c) for c in self))

    def per_row(self, wanted: Sequence[int | None]) -> list[TokenLogprobs | None]:
        """token id -> (log-probability, rank) per row, for as many of the likeliest tokens as the row wants. Waits for
        the device if the values are still there."""
        token_ids, values, ranks = (column.numpy(force=True) for column in self)
        width, raw_ids, raw_values = values.shape[1], token_ids.tobytes(), values.tobytes()
        rows: list[TokenLogprobs | None] = [None] * len(ranks)
        for i, (n, rank) in enumerate(zip(wanted, ranks.tolist(), strict=True)):
            if n is not None:
                first, end = width * i, width * i + 1 + n
                rows[i] = RowLogprobs(raw_ids[8 * first : 8 * end], raw_values[4 * first : 4 * end], rank)
        return rows


class RowLogprobs(Mapping[int, tuple[float, int]]):
    """The numbers of one row, as bytes. Every look makes a dict of them, except for the sampled token: most of an
    answer is not read before its end, and much of it never.

    token_ids [1 + n] int64 and logprobs [1 + n] float32, the sampled token's first; its rank, from 1.
    """

    __slots__ = "logprobs", "rank", "token_ids"

    def __init__(self, token_ids: bytes, logprobs: bytes, rank: int) -> None:
        self.token_ids, self.logprobs, self.rank = token_ids, logprobs, rank

    def items(self) -> ItemsView[int, tuple[float, int]]:
        found: dict[int, tuple[float, int]] = {}
        pairs = zip(array("q", self.token_ids), array("f", self.logprobs), strict=True)
        for place, (token_id, value) in enumerate(pairs):
            found.setdefault(token_id, (value, place or self.rank))
        return found.items()

    def __getitem__(self, token_id: int) -> tuple[float, int]:
        if (token_id,) == unpack_from("q", self.token_ids):
            return unpack_from("f", self.logprobs)[0], self.rank
        return dict(self.items())[token_id]

    def __iter__(self) -> Iterator[int]:
        return (token_id for token_id, _ in self.items())

    def __len__(self) -> int:
        return len(self.items())


def top_logprobs(logits: Tensor, sampled: Tensor, n: int) -> TopLogprobs:
    """Log-probabilities before temperature, penalties and filters, as vLLM reports by default.

    logits: [N, V] of any float dtype. sampled: [N] int64; -1 in a bad row, whose numbers mean nothing. n: how many of
    the likeliest tokens. This is the reference for `kernels/fused/top_logprobs.py`.
    """
    rows = [of_row(row.float(), token, n) for row, token in zip(logits, sampled.clamp(min=0), strict=True)]
    return TopLogprobs(*map(torch.stack, zip(*rows, strict=True)))


def of_row(logits: Tensor, sampled: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """One row of `top_logprobs`: logits [V] float32, sampled [] -> [1 + n], [1 + n], []

    Among equal logits, the lowest ids come first, as for a greedy row. `topk` leaves their order open.
    """
    nth = logits.topk(min(max(n, 1), len(logits))).values[-1]
    reaching = (~(logits < nth)).nonzero()[:, 0]  # n ids or more, also beside a NaN
    order = logits[reaching].argsort(descending=True, stable=True)[:n]
    ids = torch.cat((sampled[None], reaching[order]))
    # The rank compares logits, because close logits may have the same log-probability.
    return ids, logits.log_softmax(-1)[ids], (logits > logits[sampled]).sum() + 1


def log_probabilities(logits: Tensor, token_ids: Tensor, n: int) -> TopLogprobs:
    """Log-probabilities of the sampled tokens [N] and of the n likeliest tokens, from raw logits [N, V]."""
    find = fused_kernels(logits.device).top_logprobs or top_logprobs
    return TopLogprobs(*find(logits, token_ids, n))
