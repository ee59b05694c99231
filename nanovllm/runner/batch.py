"""From a plan to tensors: which tokens a step computes, where they stand, which slots they fill, who is sampled.

Vectorised over the tokens of the step. All numbers of a step travel to the device in one copy; what depends on device
state (the newest tokens, the slots) is looked up there.
"""

from dataclasses import dataclass

import numpy as np
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
    sampled_tokens: Tensor  # [N] which of the T tokens have their logits computed
    sampled_rows: Tensor  # [N] the row each of them belongs to
    next_positions: Tensor  # [N] where the sampled token goes in its row


def make_batch(scheduled: list[Scheduled], rows: Rows) -> Batch:
    """The tensors for the work of a plan, in its order (decodes first)."""
    num_sequences = len(scheduled)
    row, start, length, sample = np.array([(s.row, s.start, s.num_tokens, s.sample) for s in scheduled]).T
    query_start = np.zeros(num_sequences + 1, dtype=np.int64)
    np.cumsum(length, out=query_start[1:])
    context_len = start + length
    chosen = np.flatnonzero(sample)
    num_draws = np.array([len(scheduled[i].guesses) + 1 for i in chosen], dtype=np.int64)
    before_end = np.repeat(num_draws, num_draws) - ragged_arange(num_draws)  # [N] counted from a sequence's end, from 1
    parts = [
        np.repeat(row, length),  # [T]
        np.repeat(start, length) + ragged_arange(length),  # [T]
        row,
        query_start,
        context_len,
        np.repeat(query_start[1:][chosen], num_draws) - before_end,
        np.repeat(row[chosen], num_draws),
        np.repeat(context_len[chosen], num_draws) - before_end + 1,
    ]
    packed = to_device(np.concatenate(parts).astype(np.int32), rows.device)
    row_of_token, positions, row_index, starts, contexts, sampled_tokens, sampled_rows, next_positions = packed.split(
        [len(p) for p in parts]
    )
    max_context_len = int(context_len.max())
    num_columns = -(-max_context_len // rows.block_size)
    blocks = rows.block_table[row_of_token, positions // rows.block_size]  # [T]
    not_decode = np.flatnonzero(length != 1)
    return Batch(
        input_ids=rows.token_ids[row_of_token, positions],
        positions=positions,
        attention=AttentionMetadata(
            slots=blocks.long() * rows.block_size + positions % rows.block_size,
            query_start=starts,
            context_len=contexts,
            block_table=rows.block_table[row_index, :num_columns].contiguous(),
            num_decodes=int(not_decode[0]) if len(not_decode) else num_sequences,
            max_query_len=int(length.max()),
            max_context_len=max_context_len,
        ),
        sampled_tokens=sampled_tokens,
        sampled_rows=sampled_rows,
        next_positions=next_positions,
    )
