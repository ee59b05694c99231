"""The decode step, recorded once for each of a ladder of batch sizes, and replayed.

A decode step is hundreds of small kernels, and starting them one by one takes longer than running them. A CUDA graph
starts them all with one call. A replay repeats the same launches on the same memory. So everything that changes from
step to step is read from tensors that stay where they are. A batch is padded to the next size that was recorded, with
the scratch row, which writes to the scratch block.

A step that verifies guesses or computes a few tokens of a prompt is replayed as well. Every token is then a decode of
its own, in the row of its sequence, one position on. All keys are written before any is read, so each token sees
the tokens before it. The price: the context is read once per token, instead of once for all. So such a step has at
most `max_several` tokens, which read at most `max_keys` keys. Larger steps are for `prompt_steps.py`.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nanovllm.engine.plan import Scheduled
from nanovllm.graphs.cuda_graph import Recorder, Step
from nanovllm.graphs.sizes import StepSizes
from nanovllm.pinned import host_buffers, to_device
from nanovllm.sampling.sampler import Sampled

# What is recorded: from the rows and positions of B tokens, [2, B] int32 on the device, to what the step sampled.
DecodeStep = Callable[[Tensor], Sampled]


class DecodeSteps:
    """A recording for each size of `sizes.decodes`.

    token_ids [R + 1, L] int32: the known tokens of each row; the last row is scratch, for padding.
    copies: number of buffers on the host, one more than the number of steps that the host may be ahead of the device.
    """

    def __init__(self, sizes: StepSizes, token_ids: Tensor, step: DecodeStep, recorder: Recorder, copies: int) -> None:
        self.sizes, self.max_several, self.max_keys = sizes.decodes, sizes.max_several, sizes.max_keys
        self.token_ids, self.scratch_row = token_ids, len(token_ids) - 1
        largest, device = self.sizes[-1], token_ids.device
        shared = torch.zeros(2 * largest, dtype=torch.int32, device=device)
        self.numbers = {size: shared[: 2 * size].view(2, size) for size in self.sizes}  # rows, then positions
        self._host = host_buffers(2 * largest, copies, device)
        self._replays: dict[int, Step] = {}
        # The largest first: the smaller ones then fit into the memory that it left in the pool.
        for size in tqdm(self.sizes[::-1], desc="recording decode steps", disable=device.type == "cpu", leave=False):
            self.load(size, [])
            self._replays[size] = recorder(partial(step, self.numbers[size]))

    def replay(self, scheduled: Sequence[Scheduled]) -> Sampled | None:
        """Compute this work if it fits a recording and a replay pays; otherwise do nothing and return None."""
        several = [s for s in scheduled if s.num_tokens > 1 or not s.sample]
        if not several:  # almost always
            return self.run([(s.row, s.start) for s in scheduled])
        tokens = self._tokens(scheduled, several)
        if tokens is None:
            return None
        behind = [s.sample and i >= s.num_tokens - len(s.guesses) - 1 for s in scheduled for i in range(s.num_tokens)]
        if all(behind):
            return self.run(tokens)
        # A recording samples after every token. Where that was not asked for, the token that stood there is put back.
        array, chosen = np.array(tokens), np.flatnonzero(behind)
        row, before = np.delete(array, chosen, axis=0).T
        numbers = to_device(np.concatenate((row, before + 1, chosen)), self.token_ids.device)
        row_kept, kept, sampled = numbers.split((len(row), len(row), len(chosen)))
        known = self.token_ids[row_kept, kept]
        step = self.run(tokens)
        self.token_ids[row_kept, kept] = known
        return step.at(sampled)

    def _tokens(self, scheduled: Sequence[Scheduled], several: list[Scheduled]) -> list[tuple[int, int]] | None:
        """Row and position of every token of the step, those of a row side by side and in order: `ring_decode` relies
        on it. None if there are too many tokens, or they would read too much."""
        longer = [s for s in several if s.num_tokens > 1]
        num_tokens = sum(s.num_tokens for s in scheduled)
        keys = sum(s.num_tokens * (s.start + s.num_tokens) for s in longer)
        most = self.max_several if longer else num_tokens
        if num_tokens > min(most, self.sizes[-1]) or keys > self.max_keys:
            return None
        return [(s.row, s.start + i) for s in scheduled for i in range(s.num_tokens)]

    def run(self, tokens: list[tuple[int, int]]) -> Sampled:
        """Replay the smallest recording that has room for these decodes, each a row and the position that it computes.
        Returns what was sampled after each of them."""
        size = self.sizes[bisect_left(self.sizes, len(tokens))]
        self.load(size, tokens)
        return self._replays[size]().at(slice(len(tokens)))

    def load(self, size: int, tokens: list[tuple[int, int]]) -> None:
        """Send rows and positions to the device, in one copy. The rest of the batch is the scratch row."""
        host = next(self._host)[: 2 * size].view(2, size)
        array, n = host.numpy(), len(tokens)
        if n:
            array[:, :n] = np.array(tokens, dtype=np.int32).T
        array[0, n:] = self.scratch_row
        array[1, n:] = 0
        self.numbers[size].copy_(host, non_blocking=True)
