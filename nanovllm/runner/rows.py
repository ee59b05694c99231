"""A row on the device for every running sequence: its tokens and its block table.

A step sends only what changed. The newest token never travels: the sampler writes it into the row, and the next step
reads it there. So step n + 1 can be submitted before the host has seen what step n sampled. The sampling parameters of
the same rows are in `sampling/state.py`.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from nanovllm.engine.plan import Scheduled
from nanovllm.pinned import Writes, to_device
from nanovllm.sampling_params import SamplingParams


class Known(Protocol):
    """What a sequence brings along when it moves into a row."""

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams


class Rows:
    """Persistent state of up to `num_rows` running sequences; one more row is scratch, for padding.

    token_ids [R + 1, max_model_len + 1] int32: every known token, the newest included. `install` writes what is known
        when a sequence moves in, the sampler every new token, and `runner/draft.py` the guesses after the last one.
    block_table [R + 1, M] int32: written by `append_blocks`; the scratch block where there is no block yet.
    numbers [num_numbers, R + 1] int32: what `sampling/state.py` keeps of each row. All three are parts of one memory.
    owner [R + 1], on the host: the key of the sequence in each row, -1 for none. The runner compares it with a plan.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        scratch_block: int,
        device: torch.device,
        num_numbers: int = 0,
    ) -> None:
        self.device = device
        self.block_size = block_size
        self.scratch_row, self.scratch_block = num_rows, scratch_block
        self.max_context_len = max_model_len
        max_blocks = -(-max_model_len // block_size)
        shapes = (num_numbers, num_rows + 1), (num_rows + 1, max_model_len + 1), (num_rows + 1, max_blocks)
        lengths = [-(-height * width // 64) * 64 for height, width in shapes]  # kernels want aligned tensors
        memory = torch.zeros(sum(lengths), dtype=torch.int32, device=device)
        parts = zip(memory.split(lengths), shapes, strict=True)
        self.numbers, self.token_ids, self.block_table = (
            part[: height * width].view(height, width) for part, (height, width) in parts
        )
        self.block_table.fill_(scratch_block)
        self.owner = [-1] * (num_rows + 1)
        self.writes = Writes(memory)  # new values, sent before the next step

    def install(self, scheduled: list[Scheduled], known: Sequence[Known]) -> None:
        """Move all new sequences of a step into their rows, with the tokens known so far, by `writes`."""
        for s, k in zip(scheduled, known, strict=True):
            first = s.row * self.token_ids.shape[1]
            places = np.arange(first, first + len(k.token_ids))
            self.writes.add(self.token_ids, places, np.array(k.token_ids, dtype=np.int32))
            self.owner[s.row] = s.key

    def append_blocks(self, scheduled: list[Scheduled]) -> None:
        """Append the new blocks of each row to its block table, by `writes`; it is then as long as the step needs."""
        flat = []
        for s in scheduled:
            end = s.row * self.block_table.shape[1] - (-(s.start + s.num_tokens) // self.block_size)
            flat += list(enumerate(s.new_blocks, start=end - len(s.new_blocks)))
        places, block_ids = np.array(flat).T
        self.writes.add(self.block_table, places, block_ids.astype(np.int32))

    def write_guesses(self, scheduled: list[Scheduled]) -> None:
        """Put the guesses of a plan after the last known token of their rows."""
        flat = [
            (s.row, position, token)
            for s in scheduled
            for position, token in enumerate(s.guesses, start=s.start + s.num_tokens - len(s.guesses))
        ]
        row, position, token_ids = to_device(np.array(flat, dtype=np.int32).T.copy(), self.device)
        self.token_ids[row, position] = token_ids
