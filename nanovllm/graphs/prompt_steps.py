"""Steps with prompts, recorded for a ladder of numbers of tokens, and replayed.

The kernels of a large step take longer than their launches, with a small model only from thousands of tokens on. Below
that size a step is replayed like a decode step (see `decode_steps.py`). How its tokens are shared among its sequences
changes from step to step. So all sequences, decodes too, go through the prefill kernel, whose grid serves any way
of sharing them. A step that is smaller than its recording is padded: the missing tokens are one sequence of the
scratch row, and the missing sequences have no tokens. For few tokens behind long contexts there are further recordings,
in which attention cuts the contexts.
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
from nanovllm.graphs.decode_steps import DecodeStep, DecodeSteps
from nanovllm.graphs.masked_tails import MaskedTail, MaskedTails
from nanovllm.graphs.sizes import FEW_CUT_TOKENS, StepSizes, has_long_context
from nanovllm.pinned import host_buffers
from nanovllm.sampling.sampler import Sampled

# The numbers that say what a step computes, as `runner/batch.py` has them: row and position [T] of each token; row [S],
# first token [S + 1] and context length [S] of each sequence; and for each token to sample [N], the token whose logits
# choose it, its row and its position.
Pack = Callable[[Sequence[Scheduled]], list[npt.NDArray[Any]]]
# What is recorded: from these numbers, int32 on the device, to what the step sampled. The second argument says whether
# it is for long contexts.
PromptStep = Callable[[Sequence[Tensor], bool], Sampled]

COPIES_IN_FLIGHT = 3  # one step runs, one is submitted, one is being written


class PromptSteps:
    """A recording for T tokens of S sequences, and as many samples, for each (T, S) of `sizes.with_prompts`; and
    another one for each of `sizes.for_long_contexts`.

    token_ids, copies: as in `DecodeSteps`.
    """

    def __init__(
        self, sizes: StepSizes, token_ids: Tensor, pack: Pack, step: PromptStep, recorder: Recorder, copies: int
    ) -> None:
        self.sizes, self.places, self.pack = sizes.prompts, sizes.places, pack
        self.scratch_row, device = len(token_ids) - 1, token_ids.device
        length = sum(widths(self.sizes[-1], self.places[-1])) if self.sizes else 0
        self._numbers = torch.zeros(length, dtype=torch.int32, device=device)  # of any size
        self._host = host_buffers(length, copies, device)
        self._replays: dict[tuple[int, int, bool], Step] = {}
        for size, places in sizes.with_prompts[::-1]:  # the largest first, as in `DecodeSteps`
            self._load(size, places, [])
            lengths = widths(size, places)
            parts = self._numbers[: sum(lengths)].split(lengths)
            for long in (False, True) if (size, places) in sizes.for_long_contexts else (False,):
                self._replays[size, places, long] = recorder(partial(step, parts, long))

    def replay(self, scheduled: Sequence[Scheduled]) -> Sampled | None:
        """Compute this work if a recording has room for it; otherwise do nothing and return None."""
        num_tokens = sum(s.num_tokens for s in scheduled)
        num_sampled = sum(len(s.guesses) + 1 for s in scheduled if s.sample)
        if not self.sizes or num_tokens > self.sizes[-1]:
            return None
        needed = max(num_sampled, len(scheduled) + 1)
        if needed > self.places[-1]:
            return None
        size = self.sizes[bisect_left(self.sizes, num_tokens)]
        places = self.places[bisect_left(self.places, needed)]
        self._load(size, places, scheduled)
        long = (size, places, True) in self._replays and has_long_context(scheduled)
        return self._replays[size, places, long]().at(slice(num_sampled))

    def _load(self, size: int, places: int, scheduled: Sequence[Scheduled]) -> None:
        """Send a step's numbers to the device, in one copy."""
        missing = size - sum(s.num_tokens for s in scheduled)
        padding = [Scheduled(-1, self.scratch_row, 0, missing, sample=False, new_blocks=())] if missing else []
        lengths = widths(size, places)
        host = next(self._host)[: sum(lengths)]
        # A missing sequence begins after the last token; a missing sample is taken from the scratch row.
        fills = [0, 0, self.scratch_row, size, 1, 0, self.scratch_row, 0]
        array, end = host.numpy(), 0
        for part, length, fill in zip(self.pack([*scheduled, *padding]), lengths, fills, strict=True):
            start, end = end, end + length
            array[start : start + len(part)], array[start + len(part) : end] = part, fill
        self._numbers[: len(host)].copy_(host, non_blocking=True)


def widths(size: int, places: int) -> list[int]:
    """The lengths of a recording's numbers, in the order of `Pack`."""
    return [size, size, places, places + 1, *[places] * 4]


class RecordedSteps:
    """All recorded steps of the target model behind one call: decode steps, and steps with prompts.

    masked: the tail of decode steps with masks, and the words of a mask; None if no step has masks, or no such tail can
            be recorded.
    """

    def __init__(
        self,
        sizes: StepSizes,
        token_ids: Tensor,
        decode_step: DecodeStep,
        prompt_step: PromptStep,
        pack: Pack,
        recorder: Recorder,
        masked: tuple[MaskedTail, int] | None = None,
    ) -> None:
        self.decodes = DecodeSteps(sizes, token_ids, decode_step, recorder, COPIES_IN_FLIGHT)
        self.prompts = PromptSteps(sizes, token_ids, pack, prompt_step, recorder, COPIES_IN_FLIGHT)
        self.tails = None if masked is None else MaskedTails(self.decodes, *masked, recorder)

    def replay(self, scheduled: Sequence[Scheduled]) -> Sampled | None:
        """Compute this work by the cheapest recording; if no recording has room, do nothing and return None."""
        if all(s.num_tokens > FEW_CUT_TOKENS for s in scheduled) and has_long_context(scheduled):
            replayed = self.prompts.replay(scheduled) or self.decodes.replay(scheduled)
        else:
            replayed = self.decodes.replay(scheduled) or self.prompts.replay(scheduled)
        return replayed or self.decodes.replay(scheduled, alone=True)
