"""One rank in this process: plans go in, tokens come out, and nothing in between waits for the device.

An executor keeps the host's copy of every sequence's tokens, so that a preempted sequence can be put back into a
row without the control plane sending its tokens again.
"""

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from nanovllm.config import EngineConfig
from nanovllm.distributed.group import Group
from nanovllm.engine.plan import StepMasks, StepPlan, StepResult
from nanovllm.models.config import DTYPES
from nanovllm.models.loader import load_model
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.step_output import StepOutput
from nanovllm.runner.warm_up import import_beside
from nanovllm.sampling_params import SamplingParams

# With Python's default, the steps of a large batch collect garbage again and again, though they leave none. A full
# collection visits all that torch has loaded, and takes as long as many decode steps.
GC_THRESHOLD = 20_000, 10, 10


@dataclass(frozen=True)
class RunnerSpec:
    """What a rank needs to make its runner. Plain data: it is sent to the workers' processes."""

    path: str  # of the checkpoint's directory
    config: EngineConfig  # resolved
    eos_token_ids: frozenset[int]  # of model and tokenizer
    with_masks: bool = False  # whether outputs may be structured

    def make_runner(self, device: torch.device, group: Group | None = None) -> ModelRunner:
        """Load the model; of several ranks, which `group` joins, this rank's share of it."""
        c = self.config
        import_beside(device)
        loaded = load_model(
            self.path,
            device=device,
            dtype=DTYPES.get(c.dtype),  # None for "auto"
            max_model_len=c.max_model_len,
            load_format=c.load_format,
            quantization=c.quantization,
            expert_parallel=c.enable_expert_parallel,
            group=group,
        )
        loaded = replace(loaded, eos_token_ids=self.eos_token_ids)
        return ModelRunner(loaded, c, device, group=group, with_masks=self.with_masks)


@dataclass
class KnownSequence:
    """What the data plane remembers of a sequence for its whole life."""

    token_ids: list[int]  # prompt, then everything sampled whose step's result was read
    num_prompt_tokens: int
    params: SamplingParams


class PendingStep:
    """A submitted step. Once they are drawn, its tokens are on their way to the host; `result` waits for them."""

    def __init__(self, plan: StepPlan, runner: ModelRunner, sequences: dict[int, KnownSequence]) -> None:
        self.keys = [s.key for s in plan.scheduled if s.sample]
        self.runner, self.sequences = runner, sequences
        self.computed = runner.run(plan, sequences)
        self.output: StepOutput | None = None  # of a step that was given up before its masks came
        if not plan.masked:
            self.draw()

    def guesses(self) -> dict[int, list[int]]:
        guesses, sampling = self.computed.step.guesses, self.computed.sampling
        planned = {s.key: [g for g in s.guesses if g is not None] for s in sampling}
        if guesses is None or not any(None in s.guesses for s in sampling):
            return planned
        ids, first = guesses.tolist(), 0
        for s in sampling:
            planned[s.key] = ids[first : first + len(s.guesses)]
            first += len(s.guesses) + 1  # behind the last guess is nothing that is looked at
        return planned

    def draw(self, masks: StepMasks | None = None) -> None:
        with current(self.runner.device):
            self.output = self.runner.draw(self.computed, masks)
        del self.computed, self.runner  # the logits above all

    def result(self) -> StepResult:
        if self.output is None:
            return StepResult({})
        tokens = dict(zip(self.keys, self.output.read(), strict=True))
        for key, (token_ids, _) in tokens.items():
            sequence = self.sequences.get(key)
            if sequence is not None:  # else it was removed while the step ran
                sequence.token_ids += [max(token, 0) for token in token_ids]
        return StepResult(tokens, {} if self.output.prompts is None else self.output.prompts.read())


class LocalExecutor:
    """Drives one rank. From now on this process collects garbage less often, unless that is switched off."""

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
            return PendingStep(plan, self.runner, self.sequences)

    def close(self) -> None:
        self.sequences.clear()
        self.runner.close()


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` this thread's current one. PyTorch works where its tensors are, but Triton launches, and events are
    recorded, on the current device: on the first GPU, unless a thread says otherwise."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def numbered(device: torch.device) -> torch.device:
    """A GPU by its number: "cuda" is the current one, and each thread has its own."""
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device
