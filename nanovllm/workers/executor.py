"""The data plane behind one interface: plans go in, tokens come out, and nothing in between waits for the device.

`LocalExecutor` drives one rank in this process. It keeps the host's copy of every sequence's tokens, so that a sequence
that was preempted can be put back into a row without the control plane sending it again.
"""

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.engine.plan import StepPlan, StepResult
from nanovllm.runner.model_runner import ModelRunner, StepOutput
from nanovllm.sampling_params import SamplingParams

# With Python's default, the steps of a large batch collect garbage again and again, though they leave none. A full
# collection visits all that torch has loaded, and takes as long as many decode steps.
GC_THRESHOLD = 20_000, 10, 10


@dataclass
class KnownSequence:
    """What the data plane remembers of a sequence for its whole life."""

    token_ids: list[int]  # prompt, then everything sampled whose step's result was read
    num_prompt_tokens: int
    params: SamplingParams


class PendingStep:
    """A submitted step. Its tokens are on their way to the host; `result` waits for them."""

    def __init__(self, plan: StepPlan, output: StepOutput, sequences: dict[int, KnownSequence]) -> None:
        self.keys = [s.key for s in plan.scheduled if s.sample]
        self.output = output
        self.sequences = sequences

    def result(self) -> StepResult:
        tokens = dict(zip(self.keys, self.output.read(), strict=True))
        for key, (token_ids, _) in tokens.items():
            sequence = self.sequences.get(key)
            if sequence is not None:  # else it was removed while the step ran
                sequence.token_ids += [max(token, 0) for token in token_ids]
        return StepResult(tokens)


class LocalExecutor:
    """One rank, in this process, whose garbage is collected less often from now on, unless that is switched off."""

    def __init__(self, runner: ModelRunner) -> None:
        if gc.get_threshold()[0]:
            gc.set_threshold(*map(max, gc.get_threshold(), GC_THRESHOLD))
        self.runner = runner
        self.sequences: dict[int, KnownSequence] = {}

    def add(self, key: int, token_ids: Sequence[int], params: SamplingParams) -> None:
        self.sequences[key] = KnownSequence(list(token_ids), len(token_ids), params)

    def remove(self, key: int) -> None:
        self.sequences.pop(key, None)

    def submit(self, plan: StepPlan) -> PendingStep:
        with current(self.runner.device):
            return PendingStep(plan, self.runner.run(plan, self.sequences), self.sequences)

    def close(self) -> None:
        self.sequences.clear()
        self.runner.close()


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` this thread's current one. PyTorch works where its tensors are, but Triton launches, and events are
    recorded, on the current device: on the first GPU, unless a thread says otherwise."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
