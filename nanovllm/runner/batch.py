"""From a plan to tensors: which tokens a step computes, where they stand, which slots they fill, who is sampled.

Vectorised over the tokens of the step. All numbers of a step travel to the device in one copy; what depends on device
state (the newest tokens, the slots) is looked up there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from nanovllm.attention.interface import AttentionMetadata
from nanovllm.engine.plan import Scheduled
from nanovllm.runner.rows import Rows, ragged_arange, to_device


@dataclass
class Batch:
    """One step's work on the device. T tokens of S sequences. The logits behind N of them choose tokens: of each
    sequence that samples, behind the last known one and behind every guess."""

    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    attention: AttentionMetadata
    sampled_tokens: Tensor  # [N] int32: which of the T tokens have their logits computed
    sampled_rows: Tensor  # [N] int32: the row each of them belongs to
    next_positions: Tensor  # [N] int32: where the sampled token goes in its row


def make_batch(scheduled: list[Scheduled], rows: Rows) -> Batch:
    """The tensors for the work of a plan, in its order (decodes first)."""
    parts = pack(scheduled)
    packed = to_device(np.concatenate(parts).astype(np.int32), rows.device)
    length, longest = np.diff(parts[3]), int(parts[4].max())
    not_decode = np.flatnonzero(length != 1)
    num_decodes = int(not_decode[0]) if len(not_decode) else len(scheduled)
    return batch_of(packed.split([len(p) for p in parts]), rows, num_decodes, int(length.max()), longest)


def pack(scheduled: list[Scheduled]) -> list[npt.NDArray[Any]]:
    """The numbers of a step, int64: row and position [T] of each token; row [S], first token [S + 1] and context length
    [S] of each sequence; and for each token that will be sampled, [N], the token whose logits choose it, its row, and
    where in the row it goes."""
    numbers = [(s.row, s.start, s.num_tokens, s.sample, len(s.guesses) + 1) for s in scheduled]
    row, start, length, sample, num_draws = np.array(numbers, dtype=np.int64).reshape(-1, 5).T
    query_start = np.zeros(len(scheduled) + 1, dtype=np.int64)
    np.cumsum(length, out=query_start[1:])
    context_len = start + length
    chosen = np.flatnonzero(sample)
    num_draws = num_draws[chosen]
    before_end = np.repeat(num_draws, num_draws) - ragged_arange(num_draws)  # [N] counted from a sequence's end, from 1
    return [
        np.repeat(row, length),
        np.repeat(start, length) + ragged_arange(length),
        row,
        query_start,
        context_len,
        np.repeat(query_start[1:][chosen], num_draws) - before_end,
        np.repeat(row[chosen], num_draws),
        np.repeat(context_len[chosen], num_draws) - before_end + 1,
    ]


def batch_of(parts: Sequence[Tensor], rows: Rows, num_decodes: int, max_query_len: int, max_context_len: int) -> Batch:
    """Look up on the device what depends on its state. parts: what `pack` gives, int32, on the device; the last three
    arguments as in `AttentionMetadata`."""
    row_of_token, positions, row_index, query_start, context_len, *sampled = parts
    blocks = rows.block_table[row_of_token, positions // rows.block_size]  # [T]
    slots = blocks.long() * rows.block_size + positions % rows.block_size
    table = rows.block_table[row_index, : -(-max_context_len // rows.block_size)].contiguous()
    maxima = num_decodes, max_query_len, max_context_len
    attention = AttentionMetadata(slots, query_start, context_len, table, *maxima)
    return Batch(rows.token_ids[row_of_token, positions], positions, attention, *sampled)
