"""The tail of a decode step with masks, recorded apart from its model.

Where grammars say which tokens may come next, the host knows the masks only when the model of the step runs already. So
such a step is two recordings. The first is one of `decode_steps.py`, and leaves logits. The second draws from these
logits again, once the masks are there. It reads rows, positions and logits where the first recording of the same size
has them, and has the same padding.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from nanovllm.engine.plan import Scheduled
from nanovllm.graphs.cuda_graph import Recorder, Step
from nanovllm.graphs.decode_steps import NO_TOKENS, DecodeSteps
from nanovllm.pinned import host_buffers
from nanovllm.sampling.masks import Masks
from nanovllm.sampling.sampler import Sampled

# What is recorded: from the numbers [3, B] of a recorded decode step, the rows [B] that get masks, and their
# masks [B, W], all int32 on the device, to what the step sampled. If fewer than B rows get masks, the others of these B
# are the scratch row.
MaskedTail = Callable[[Tensor, Tensor, Tensor], Sampled]

COPIES = 2  # masks need the tokens of the step before, so no other step but one that was given up can be under way


class MaskedTails:
    """Recordings of `tail`, one for each size of `decodes` that a step with one token per sequence can need.

    width: W, the words of 32 bits in a mask.
    """

    def __init__(self, decodes: DecodeSteps, tail: MaskedTail, width: int, recorder: Recorder) -> None:
        self.scratch_row, self.width = decodes.scratch_row, width
        # No step has more sequences than there are rows before the scratch row.
        self.sizes = [size for size in decodes.sizes if size <= self.scratch_row]
        length, device = self.sizes[-1] * (1 + width), decodes.token_ids.device
        self._words = torch.zeros(length, dtype=torch.int32, device=device)  # of any size: rows [B], then masks [B, W]
        self._host = host_buffers(length, COPIES, device)
        self._replays: dict[int, Step] = {}
        for size in self.sizes[::-1]:  # the largest first, as in `DecodeSteps`
            decodes.load(size, NO_TOKENS)
            self._load(size, [], lambda masks: None)
            rows, masks = self._words[: size * (1 + width)].split([size, size * width])
            self._replays[size] = recorder(partial(tail, decodes.numbers[size], rows, masks.view(size, width)))

    def fit(self, scheduled: Sequence[Scheduled]) -> bool:
        """Whether a decode recording computes this work with one token per sequence: then there is a tail for it."""
        return all(s.sample and s.num_tokens == 1 for s in scheduled)

    def replay(self, num_tokens: int, rows: Sequence[int], fill: Callable[[Masks], None]) -> Sampled:
        """Draw again the `num_tokens` tokens of the decode recording that was replayed last.

        fill: writes the masks [M, W] of the sequences in `rows`. Other sequences draw the same tokens as before.
        """
        size = self.sizes[bisect_left(self.sizes, num_tokens)]
        self._load(size, rows, fill)
        return self._replays[size]().at(slice(num_tokens))

    def _load(self, size: int, rows: Sequence[int], fill: Callable[[Masks], None]) -> None:
        """Send rows and masks to the device, in one copy. The scratch row may have masks of an earlier step."""
        length = size + len(rows) * self.width
        host = next(self._host)[:length]
        array: npt.NDArray[Any] = host.numpy()
        fill(array[size:].reshape(-1, self.width))
        array[: len(rows)], array[len(rows) : size] = rows, self.scratch_row
        self._words[:length].copy_(host, non_blocking=True)
