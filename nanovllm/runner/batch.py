"""From a plan to tensors: which tokens a step computes, where they stand, which slots they fill, what is sampled.

Vectorised over the tokens of the step. All numbers of a step travel to the device in one copy. What depends on device
state (the newest tokens, the slots) is looked up there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.attention.interface import AttentionMetadata
from nanovllm.engine.plan import Scheduled
from nanovllm.graphs.decode_steps import ragged_arange
from nanovllm.graphs.sizes import FEW_PLACES, MOST_CUT_TOKENS, has_long_context
from nanovllm.kernels import fused_kernels
from nanovllm.pinned import to_device
from nanovllm.runner.rows import Rows


@dataclass
class Batch:
    """One step's work on the device: T tokens of S sequences. The logits of N of the tokens choose new tokens: for
    each sequence that samples, the logits of its last known token and of every guess."""

    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    attention: AttentionMetadata
    sampled_tokens: Tensor | None  # [N] int32: which of the T tokens have their logits computed; None is all of them
    sampled_rows: Tensor  # [N] int32: the row each of them belongs to
    next_positions: Tensor  # [N] int32: where the sampled token goes in its row


def make_batch(scheduled: Sequence[Scheduled], rows: Rows) -> Batch:
    """The tensors for the work of a plan, in its order (decodes first)."""
    parts = pack(scheduled)
    packed = to_device(np.concatenate(parts).astype(np.int32), rows.device)
    length, longest = np.diff(parts[3]), int(parts[4].max())
    not_decode = np.flatnonzero(length != 1)
    num_decodes = int(not_decode[0]) if len(not_decode) else len(scheduled)
    few = len(parts[0]) <= MOST_CUT_TOKENS and len(scheduled) <= FEW_PLACES
    maxima = int(length.max()), longest
    return look_up(
        packed.split([len(p) for p in parts]), rows, num_decodes, *maxima, few and has_long_context(scheduled)
    )


def pack(scheduled: Sequence[Scheduled]) -> list[npt.NDArray[Any]]:
    """The numbers of a step, int64: row and position [T] of each token; row [S], first token [S + 1] and context length
    [S] of each sequence; and for each token that will be sampled, [N], the token whose logits choose it, its row, and
    where in the row it goes."""
    numbers = [(s.row, s.start, s.num_tokens, s.sample, len(s.guesses) + 1) for s in scheduled]
    row, start, length, sample, num_sampled = np.array(numbers, dtype=np.int64).reshape(-1, 5).T
    query_start = np.zeros(len(scheduled) + 1, dtype=np.int64)
    np.cumsum(length, out=query_start[1:])
    context_len = start + length
    chosen = np.flatnonzero(sample)
    num_sampled = num_sampled[chosen]
    before_end = np.repeat(num_sampled, num_sampled) - ragged_arange(num_sampled)  # [N] from a sequence's end, from 1
    return [
        np.repeat(row, length),
        np.repeat(start, length) + ragged_arange(length),
        row,
        query_start,
        context_len,
        np.repeat(query_start[1:][chosen], num_sampled) - before_end,
        np.repeat(row[chosen], num_sampled),
        np.repeat(context_len[chosen], num_sampled) - before_end + 1,
    ]


def look_up(
    parts: Sequence[Tensor],
    rows: Rows,
    num_decodes: int,
    max_query_len: int,
    max_context_len: int,
    long_context: bool,
) -> Batch:
    """Look up what depends on the device's state. parts: what `pack` returns, int32, on the device. The last four
    arguments are as in `AttentionMetadata`."""
    row_of_token, positions, row_index, query_start, context_len, *sampled = parts
    blocks = rows.block_table[row_of_token, positions // rows.block_size]  # [T]
    slots = blocks.long() * rows.block_size + positions % rows.block_size
    table = rows.block_table[row_index, : -(-max_context_len // rows.block_size)].contiguous()
    known = num_decodes, max_query_len, max_context_len, long_context
    attention = AttentionMetadata(slots, query_start, context_len, table, *known)
    return Batch(rows.token_ids[row_of_token, positions], positions, attention, *sampled)


class DecodeInputs:
    """Makes the batches of recorded decode steps: one token per row, in memory that recordings of all sizes share."""

    def __init__(self, rows: Rows, max_tokens: int) -> None:
        self.rows = rows
        ints = rows.token_ids.new_zeros  # int32, on the same device
        self.input_ids, self.context_len = ints(max_tokens), ints(max_tokens)
        self.slots = ints(max_tokens, dtype=torch.int64)
        self.query_start = torch.arange(max_tokens + 1, dtype=torch.int32, device=rows.device)
        self.block_table = ints(max_tokens, rows.block_table.shape[1])

    def look_up(self, numbers: Tensor) -> Batch:
        """numbers [3, B] int32: the row to sample in, the row to compute in, and the position. Fills in what follows
        from them, as part of what is recorded."""
        sampled_rows, rows, positions = numbers.unbind()  # [B] each
        b, known = len(positions), self.rows
        input_ids, slots, context_len = self.input_ids[:b], self.slots[:b], self.context_len[:b]  # [B] each
        table = self.block_table[:b]  # [B, M]
        fill_in = fused_kernels(known.device).decode_inputs or decode_inputs_reference
        tables = known.token_ids, known.block_table, known.block_size
        fill_in(rows, positions, *tables, input_ids, slots, context_len, table)
        maxima = b, 1, known.max_context_len  # of which the first is the number of decodes
        attention = AttentionMetadata(slots, self.query_start[: b + 1], context_len, table, *maxima)
        # A new token is sampled after each token, and goes right after its context.
        return Batch(input_ids, positions, attention, None, sampled_rows, context_len)


def decode_inputs_reference(
    rows: Tensor, positions: Tensor, token_ids: Tensor, block_table: Tensor, block_size: int,
    input_ids: Tensor, slots: Tensor, context_len: Tensor, table: Tensor,
) -> None:  # fmt: skip
    """`kernels.fused.decode_inputs` in plain PyTorch, on any device."""
    table.copy_(block_table[rows])
    input_ids.copy_(token_ids[rows, positions])
    blocks = block_table[rows, positions // block_size].long()  # [B]
    slots.copy_(blocks * block_size + positions % block_size)
    context_len.copy_(positions + 1)
