"""What every running sequence keeps on the device, in a row of its own: tokens, block table, sampling parameters.

A step sends only what changed. Above all the newest token never travels: the sampler writes it into the row, and the
next step reads it there, so that step n + 1 can be submitted before the host has seen what step n sampled.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.engine.plan import Scheduled
from nanovllm.sampling_params import SamplingParams


class Known(Protocol):
    """What a sequence brings along when it moves into a row."""

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy to the device without waiting for it: from pinned memory, in stream order."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Rows:
    """Persistent state of up to `num_rows` running sequences; one more row is scratch, for padding.

    token_ids [R + 1, max_model_len + 1] int32: every known token, the newest included.
    block_table [R + 1, M] int32: the scratch block where there is no block yet.
    temperature [R + 1] float32, seed [R + 1] int64, num_prompt_tokens [R + 1] int32.
    """

    def __init__(
        self, num_rows: int, max_model_len: int, block_size: int, scratch_block: int, device: torch.device
    ) -> None:
        self.device = device
        self.block_size = block_size
        self.scratch_row, self.scratch_block = num_rows, scratch_block
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = torch.zeros(num_rows + 1, max_model_len + 1, dtype=torch.int32, device=device)
        self.block_table = torch.full((num_rows + 1, max_blocks), scratch_block, dtype=torch.int32, device=device)
        self.temperature = torch.zeros(num_rows + 1, device=device)
        self.seed = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.num_prompt_tokens = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        # Host side: what stands in each row, to know what is new in a plan
        self.owner = [-1] * (num_rows + 1)
        self.params = [SamplingParams()] * (num_rows + 1)

    def install(self, scheduled: list[Scheduled], known: Sequence[Known]) -> None:
        """Move sequences into their rows, all of a step at once: known tokens, prompt lengths, temperature, seed."""
        rows = np.array([s.row for s in scheduled], dtype=np.int32)
        lengths = np.array([len(k.token_ids) for k in known])
        ids = np.concatenate([k.token_ids for k in known])
        flat = np.stack((np.repeat(rows, lengths), ragged_arange(lengths), ids))
        row_of_token, column, token_ids = to_device(flat.astype(np.int32), self.device)
        self.token_ids[row_of_token, column] = token_ids
        index = to_device(rows, self.device)
        self.num_prompt_tokens[index] = self.column([k.num_prompt_tokens for k in known], np.int32)
        self.temperature[index] = self.column([k.params.temperature for k in known], np.float32)
        self.seed[index] = self.column([k.params.seed for k in known], np.int64)
        for s, k in zip(scheduled, known, strict=True):
            self.owner[s.row], self.params[s.row] = s.key, k.params

    def append_blocks(self, scheduled: list[Scheduled]) -> None:
        """Put what each row was newly given at the end of its block table, which is as long as the step needs."""
        flat = []
        for s in scheduled:
            first = -(-(s.start + s.num_tokens) // self.block_size) - len(s.new_blocks)
            flat += [(s.row, first + i, block) for i, block in enumerate(s.new_blocks)]
        row, column, block_ids = to_device(np.array(flat, dtype=np.int32).T.copy(), self.device)
        self.block_table[row, column] = block_ids

    def write_guesses(self, scheduled: list[Scheduled]) -> None:
        """Put the guesses of a plan behind the last known token of their rows."""
        flat = [
            (s.row, position, token)
            for s in scheduled
            for position, token in enumerate(s.guesses, start=s.start + s.num_tokens - len(s.guesses))
        ]
        row, position, token_ids = to_device(np.array(flat, dtype=np.int32).T.copy(), self.device)
        self.token_ids[row, position] = token_ids

    def column(self, values: Sequence[object], dtype: npt.DTypeLike) -> Tensor:
        return to_device(np.array(values, dtype=dtype), self.device)


def ragged_arange(lengths: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """0..lengths[0]-1, 0..lengths[1]-1, ... in one array, without a loop."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)


def decode_inputs_reference(
    rows: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    block_size: int,
    input_ids: Tensor,
    slots: Tensor,
    context_len: Tensor,
    table: Tensor,
) -> None:
    """`kernels.decode_inputs` in plain PyTorch, on any device."""
    table.copy_(block_table[rows])
    input_ids.copy_(token_ids[rows, positions])
    blocks = block_table[rows, positions // block_size].long()  # [B]
    slots.copy_(blocks * block_size + positions % block_size)
    context_len.copy_(positions + 1)
