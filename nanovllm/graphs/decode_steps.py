"""The decode step, recorded once for each of a ladder of batch sizes, and replayed.

A decode step is hundreds of small kernels, and starting them one by one takes longer than running them. A CUDA graph
starts them all with one call. A replay repeats the same launches on the same memory. So everything that changes from
step to step is read from tensors that stay where they are. A batch is padded to the next size that was recorded, with
the scratch row, which writes to the scratch block.

A step that verifies guesses or computes a few tokens of a prompt is replayed as well. Every token is then a decode of
its own, in the row of its sequence, one position on. All keys are written before any is read, so each token sees
the tokens before it. The price: the context is read once per token, instead of once for all. So such a step has at
most `max_several` tokens, which read at most `max_keys` keys; keys of chunks count twice. Larger steps are for
`prompt_steps.py`. If that has no recording for such a step, it may read more.

A recording samples after every token. Where no token was asked for, as after most tokens of a prompt, it samples in the
scratch row, which nobody reads.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from nanovllm.engine.plan import Scheduled
from nanovllm.graphs.cuda_graph import Recorder, Step
from nanovllm.graphs.sizes import CHUNK_WEIGHT, MORE_ALONE, StepSizes
from nanovllm.pinned import host_buffers
from nanovllm.sampling.sampler import Sampled

NO_TOKENS = np.zeros((3, 0), dtype=np.int32)

# What is recorded: from three numbers of each of B tokens, [3, B] int32 on the device, to what the step sampled. The
# numbers are the row to sample in, the row to compute in, and the position there.
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
        length = 3 * aligned(largest)
        shared = torch.zeros(length, dtype=torch.int32, device=device)
        self._numbers = {size: shared[: 3 * aligned(size)].view(3, -1) for size in self.sizes}
        self.numbers = {size: numbers[:, :size] for size, numbers in self._numbers.items()}
        self._host = host_buffers(length, copies, device)
        self._replays: dict[int, Step] = {}
        # The largest first: the smaller ones then fit into the memory that it left in the pool.
        for size in tqdm(self.sizes[::-1], desc="recording decode steps", disable=device.type == "cpu", leave=False):
            self.load(size, NO_TOKENS)
            self._replays[size] = recorder(partial(step, self.numbers[size]))

    def replay(self, scheduled: Sequence[Scheduled], alone: bool = False) -> Sampled | None:
        """Compute this work if it fits a recording and a replay pays; otherwise do nothing and return None.

        alone: otherwise the work would be launched kernel by kernel.
        """
        several = [s for s in scheduled if s.num_tokens > 1 or not s.sample]
        if not several:  # almost always
            return self.run(np.array([(s.row, s.row, s.start) for s in scheduled], dtype=np.int32).T)
        if not self._fits(scheduled, several, alone):
            return None
        numbers = [(s.row, s.start, s.num_tokens, s.sample and len(s.guesses) + 1) for s in scheduled]
        row, start, length, num_sampled = np.array(numbers, dtype=np.int32).T
        # The tokens of a row stand side by side and in order: `ring_decode` relies on it.
        place, row = ragged_arange(length), np.repeat(row, length)
        asked = place >= np.repeat(length - num_sampled, length)
        step = self.run(np.stack((np.where(asked, row, self.scratch_row), row, np.repeat(start, length) + place)))
        return step if asked.all() else step._replace(chosen=np.flatnonzero(asked))

    def _fits(self, scheduled: Sequence[Scheduled], several: list[Scheduled], alone: bool = False) -> bool:
        """Whether the step is small enough: in its number of tokens, and in the keys that they read."""
        longer = [s for s in several if s.num_tokens > 1]
        num_tokens = sum(s.num_tokens for s in scheduled)
        of_chunk, max_keys = (1, MORE_ALONE * self.max_keys) if alone else (CHUNK_WEIGHT, self.max_keys)
        keys = sum(s.num_tokens * (s.start + s.num_tokens) * (1 if s.guesses else of_chunk) for s in longer)
        most = self.max_several if longer else num_tokens
        return num_tokens <= min(most, self.sizes[-1]) and keys <= max_keys

    def run(self, tokens: NDArray[Any]) -> Sampled:
        """Replay the smallest recording that has room for these decodes [3, N]: the row that each samples in, the row
        that it is computed in, and the position. Returns what was sampled after each of them."""
        n = tokens.shape[1]
        size = self.sizes[bisect_left(self.sizes, n)]
        self.load(size, tokens)
        return self._replays[size]().at(slice(n))

    def load(self, size: int, tokens: NDArray[Any]) -> None:
        """Send decodes [3, N] to the device, in one copy. The rest of the batch is the scratch row."""
        numbers, n = self._numbers[size], tokens.shape[1]
        host = next(self._host)[: numbers.numel()].view(3, -1)
        array = host.numpy()
        array[:, :n] = tokens
        array[:2, n:] = self.scratch_row
        array[2, n:] = 0
        numbers.copy_(host, non_blocking=True)


def aligned(size: int) -> int:
    """The length of a line of `size` numbers with its padding. Each line then begins at a multiple of 16 bytes, so one
    variant of a kernel serves all sizes."""
    return -(-size // 4) * 4


def ragged_arange(lengths: NDArray[Any]) -> NDArray[Any]:
    """0..lengths[0]-1, 0..lengths[1]-1, ... in one array, without a loop."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
