"""The data plane on several ranks: what the leader does, its workers repeat, each with its share of the model.

Every rank has an executor of its own, and samples by itself, from logits that all have seen. So one message per step
says everything: which sequences came and went, and the plan. No tensor and no token is sent.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from nanovllm.distributed.group import Group, devices_of
from nanovllm.engine.plan import Scheduled, Scored, StepMasks, StepPlan, StepResult
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.sampling_params import SamplingParams
from nanovllm.workers.executor import KnownSequence, LocalExecutor, PendingStep, RunnerSpec
from nanovllm.workers.launched_team import LaunchedTeam, is_launched, own_device, own_rank, serve
from nanovllm.workers.spawned_team import SpawnedTeam
from nanovllm.workers.team import Team

Change = tuple[int, Sequence[int], SamplingParams] | int  # a sequence that was added; the key of one that is gone


def make_worker(spec: RunnerSpec, group: Group) -> Callable[[Any], None]:
    """In a worker's process: load its share of the model. Returns what is called with every message, and repeats what
    the leader's executor did.

    The worker reads a step's result when the leader has read it, neither earlier nor later. So a sequence that comes
    back to a row brings the same tokens on every rank.
    """
    executor = LocalExecutor(spec.make_runner(group.device, group))
    pending: deque[tuple[int, PendingStep]] = deque()  # with their numbers

    def repeat(message: tuple[int, list[Change], tuple[Any, ...]] | StepMasks) -> None:
        if isinstance(message, StepMasks):  # of the newest step
            pending[-1][1].draw(message)
            return
        num_read, changes, (step, scheduled, freed_rows, masked, scored) = message
        while pending and pending[0][0] < num_read:
            pending.popleft()[1].result()
        for change in changes:
            if isinstance(change, int):
                executor.remove(change)
            else:
                executor.add(*change)
        plan = StepPlan(step, [Scheduled(*s) for s in scheduled], freed_rows, masked, [Scored(*s) for s in scored])
        pending.append((step, executor.submit(plan)))

    return repeat


@dataclass
class ParallelStep:
    """A step that all ranks have submitted."""

    executor: "ParallelExecutor"
    step: int
    pending: PendingStep

    def guesses(self) -> dict[int, list[int]]:
        with self.executor.team.in_step():
            return self.pending.guesses()

    def draw(self, masks: StepMasks) -> None:
        words = np.empty((masks.number, -(-self.executor.runner.vocab_size // 32)), dtype=np.int32)
        masks.fill(words)
        masks = masks._replace(fill=partial(np.copyto, src=words))  # once for all ranks
        with self.executor.team.in_step():
            self.executor.team.tell(masks)
            self.pending.draw(masks)

    def result(self) -> StepResult:
        with self.executor.team.in_step():
            result = self.pending.result()
            self.executor.num_read = self.step + 1
            return result


@dataclass
class ParallelExecutor:
    """The leader's executor. Raises RuntimeError when a rank is lost; every rank has ended then."""

    team: Team
    local: LocalExecutor
    changes: list[Change] = field(default_factory=list)  # since the last step
    num_read: int = 0  # all steps with a smaller number were read, or given up

    @classmethod
    def start(cls, spec: RunnerSpec, first: torch.device) -> "ParallelExecutor":
        """On devices from `first` on. Workers are started, unless torchrun has launched them already. They load while
        the leader does. In a worker's process this does not return (see `launched_team.serve`)."""
        size = spec.config.tensor_parallel_size
        make = partial(make_worker, spec)
        team: Team
        if not is_launched(size):
            team = SpawnedTeam(devices_of(first, size), make)
        elif own_rank() == 0:
            team = LaunchedTeam(own_device(first))
        else:
            serve(make, own_device(first))
        try:
            team.join()
            with team.in_step(loading=True):
                return cls(team, LocalExecutor(spec.make_runner(team.group.device, team.group)))
        except BaseException:
            team.close()
            raise

    @property
    def runner(self) -> ModelRunner:
        return self.local.runner

    @property
    def sequences(self) -> dict[int, KnownSequence]:
        return self.local.sequences

    def add(self, key: int, token_ids: Sequence[int], params: SamplingParams) -> None:
        self.local.add(key, token_ids, params)
        self.changes.append((key, list(token_ids), params))

    def remove(self, key: int) -> None:
        self.local.remove(key)
        self.changes.append(key)

    def submit(self, plan: StepPlan) -> ParallelStep:
        with self.team.in_step():
            changes, self.changes = self.changes, []
            scored = [tuple(s) for s in plan.scored]
            told = plan.step, [tuple(s) for s in plan.scheduled], plan.freed_rows, plan.masked, scored
            self.team.tell((self.num_read, changes, told))
            return ParallelStep(self, plan.step, self.local.submit(plan))

    def close(self) -> None:
        self.team.close()
        self.local.close()
