"""Steps run with their GPU as the thread's current one: Triton launches there, and events are recorded there."""

from typing import Any

import pytest
import torch

from nanovllm.engine.plan import StepMasks, StepPlan
from nanovllm.workers.executor import LocalExecutor, numbered


class Current:
    """Stands in for `torch.cuda.device` on a machine without a GPU."""

    index = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.before, Current.index = Current.index, self.device.index

    def __exit__(self, *error: object) -> None:
        Current.index = self.before


class Runner:
    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.seen: list[int] = []

    def run(self, plan: StepPlan, sequences: Any) -> None:
        self.seen.append(Current.index)

    def draw(self, computed: Any, masks: StepMasks | None) -> None:
        self.seen.append(Current.index)


def test_each_step_runs_on_the_gpu_of_its_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", Current)
    runners = [Runner("cuda:1"), Runner("cuda:0"), Runner("cpu"), Runner("cuda:1")]
    for runner in runners:
        LocalExecutor(runner).submit(StepPlan(0, []))  # type: ignore[arg-type]
    assert [runner.seen for runner in runners] == [[1, 1], [0, 0], [0, 0], [1, 1]]
    masked = LocalExecutor(runners[0]).submit(StepPlan(1, [], masked=[7]))  # type: ignore[arg-type]
    assert runners[0].seen == [1, 1, 1], "its tokens wait for their masks"
    masked.draw(StepMasks([], 0, lambda masks: None))
    assert runners[0].seen == [1, 1, 1, 1]
    assert Current.index == 0


def test_a_gpu_without_a_number_is_the_callers_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread that steps the engine would take its own."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [str(numbered(torch.device(name))) for name in ("cuda", "cuda:0", "cpu")] == ["cuda:1", "cuda:0", "cpu"]
