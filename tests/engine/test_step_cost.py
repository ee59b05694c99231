"""What a step costs the leader of several ranks: bytes, and the time until it can begin with its own part."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.distributed.group import Group
from nanovllm.engine.plan import Scheduled, StepPlan
from nanovllm.workers import team as team_module
from nanovllm.workers.parallel_executor import ParallelExecutor
from nanovllm.workers.spawned_team import SpawnedTeam

GREEDY = SamplingParams(temperature=0, max_tokens=9)
LENGTH = 4000  # of each sequence: nothing of it may be in the message of a step
STEPS = 60


def no_rank(group: Group) -> Callable[[Any], object]:
    raise AssertionError("nobody starts this")


def a_rank_that_only_listens(group: Group) -> Callable[[Any], object]:
    return lambda message: None


class Nothing:
    """Stands for the leader's own part."""

    def submit(self, plan: StepPlan) -> None: ...
    def add(self, *sequence: Any) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every message."""
    found: list[int] = []
    dumps = team_module.pickle.dumps

    def measured(message: object, **how: Any) -> bytes:
        payload = dumps(message, **how)
        found.append(len(payload))
        return payload

    monkeypatch.setattr(team_module.pickle, "dumps", measured)
    return found


def tell_steps(team: SpawnedTeam, num_seqs: int) -> list[float]:
    """Seconds of each of some decode steps, all but the first, which brings the sequences. A sequence gets a block
    every 16 tokens."""

    def steps(executor: ParallelExecutor) -> Iterator[float]:
        for key in range(num_seqs):
            executor.add(key, list(range(LENGTH)), GREEDY)
        for step in range(STEPS):
            blocks = [(step + key,) if key % 16 == step % 16 else () for key in range(num_seqs)]
            plan = StepPlan(step, [Scheduled(key, key, LENGTH + step, 1, True, blocks[key]) for key in range(num_seqs)])
            began = time.perf_counter()
            executor.submit(plan)
            yield time.perf_counter() - began

    local: Any = Nothing()
    with closing(ParallelExecutor(team, local)) as executor:
        return list(steps(executor))[1:]


# Seen on two busy cores: 45, 514 and 3920 bytes in 47, 70 and 153 us
@pytest.mark.parametrize(("num_seqs", "most_bytes"), [(1, 100), (32, 800), (256, 24 * 256)])
def test_a_step_is_told_in_few_bytes(sizes: list[int], num_seqs: int, most_bytes: int) -> None:
    """However long the sequences are: a decode names each by a few numbers, and no token is among them."""
    times = tell_steps(SpawnedTeam([torch.device("cpu")], no_rank), num_seqs)
    first, *rest = sizes
    assert first > num_seqs * LENGTH and max(rest) < most_bytes
    assert statistics.median(times) < 2e-3
    print(f"\na step of {num_seqs} sequences: {max(rest)} bytes, {1e6 * statistics.median(times):.0f} us to tell")


@pytest.mark.slow
def test_a_step_is_told_to_a_rank_that_hears_it(sizes: list[int]) -> None:
    """The same with a worker at the other end, whose answer to the message before is waited for."""
    for num_seqs in (1, 32, 256):
        team = SpawnedTeam([torch.device("cpu")] * 2, a_rank_that_only_listens)
        team.join()
        times = tell_steps(team, num_seqs)
        assert statistics.median(times) < 5e-3
        print(f"\na step of {num_seqs} sequences, told to a worker: {1e6 * statistics.median(times):.0f} us")
