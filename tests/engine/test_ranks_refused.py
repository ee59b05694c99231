"""A rank that cannot start for a reason that the user can mend: one line that says which, as with a single rank."""

import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanovllm import cli
from nanovllm.distributed.group import Group, PeerLost
from nanovllm.workers import executor, parallel_executor
from nanovllm.workers.launched_team import LaunchedTeam
from nanovllm.workers.spawned_team import SpawnedTeam
from nanovllm.workers.team import Team, failure_report
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TOO_LARGE = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
NO_ROOM = ValueError("no room for a KV block of 16 tokens; lower max_num_seqs")


def too_large(group: Group) -> Callable[[Any], object]:
    raise TOO_LARGE


class Lonely(Team):
    """The leader of a worker that is no process: all there is of it is its story."""

    def __init__(self, story: str) -> None:
        super().__init__()
        self.group, self.threads, self.story = Group(0, 2, CPU), 1, story
        self.close = weakref.finalize(self, list)

    def join(self) -> None: ...

    def _send(self, payload: bytes) -> None: ...

    def cause_of(self, lost: PeerLost) -> str:
        return self.story


def start(monkeypatch: pytest.MonkeyPatch, leader_meets: Exception, worker_meets: Exception) -> tuple[int, Lonely]:
    """`nanovllm generate` on two ranks; its exit status, and the team, which must have ended."""
    team = Lonely(f"rank 1 failed:\n{failure_report(worker_meets, 1)}")

    def load_model(*_: Any, **__: Any) -> None:
        raise leader_meets

    monkeypatch.setattr(parallel_executor, "SpawnedTeam", lambda devices, make: team)
    monkeypatch.setattr(executor, "load_model", load_model)
    return cli.main(["generate", "x", "--device", "cpu", "--tensor-parallel-size", "2"]), team


@pytest.mark.parametrize(
    ("leader_meets", "worker_meets", "parts"),
    [
        (TOO_LARGE, OSError("not asked"), ("cpu has too little free memory for", "20.00 GiB", "take a smaller model")),
        (PeerLost("gone"), TOO_LARGE, ("too little free memory", "rank 1: CUDA out of memory", "take a smaller model")),
        (PeerLost("gone"), NO_ROOM, ("rank 1: no room for a KV block of 16 tokens", "lower max_num_seqs")),
    ],
)
def test_the_command_line_says_it_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    leader_meets: Exception,
    worker_meets: Exception,
    parts: tuple[str, ...],
) -> None:
    status, team = start(monkeypatch, leader_meets, worker_meets)
    printed = capsys.readouterr().err
    assert status == 1 and printed.count("\n") == 1 and printed.startswith("nanovllm: ")
    assert [part for part in parts if part not in printed] == [], printed
    assert "Traceback" not in printed and not team.close.alive


def test_what_nobody_can_mend_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)closed: rank 1 failed:.*ZeroDivisionError: planted"):
        start(monkeypatch, PeerLost("gone"), ZeroDivisionError("planted"))


@pytest.mark.parametrize("error", [TOO_LARGE, NO_ROOM])
def test_in_the_middle_of_the_work_it_is_no_mistake_of_the_user_s(error: Exception) -> None:
    team = Lonely(f"rank 1 failed:\n{failure_report(error, 1)}")
    with pytest.raises(RuntimeError) as raised, team.in_step():
        raise PeerLost("gone")
    assert type(raised.value) is RuntimeError and str(raised.value).startswith("a rank was lost")
    assert str(error) in str(raised.value) and "\0" not in str(raised.value)


def test_the_traceback_is_in_the_note() -> None:
    team = Lonely(f"rank 1 failed:\n{failure_report(NO_ROOM, 1)}")
    with pytest.raises(ValueError, match=r"^rank 1: no room") as raised, team.in_step(loading=True):
        raise PeerLost("gone")
    assert "rank 1 failed:\n" in raised.value.__notes__[0] and not team.close.alive


def test_a_story_left_in_the_store_says_as_much() -> None:
    """Where ranks were launched, it lies where they met."""
    team = LaunchedTeam.__new__(LaunchedTeam)
    team.group, store = Group(0, 2, CPU), dist.HashStore()
    team._connections = SimpleNamespace(store=store)  # type: ignore[assignment]
    team.close = weakref.finalize(team, list)
    store.set("report 1", failure_report(NO_ROOM, 1))
    error = team.failed(PeerLost("gone"), "the ranks could not start", starting=True)
    assert type(error) is ValueError and str(error) == f"rank 1: {NO_ROOM}"


@pytest.mark.slow
def test_a_process_that_runs_out_of_memory() -> None:
    team = SpawnedTeam([CPU] * 2, too_large)
    team.join()
    with pytest.raises(torch.OutOfMemoryError, match=r"^rank 1: CUDA out of memory"), team.in_step(loading=True):
        team.group.smallest(1)  # as an executor does when it starts
    assert not team.close.alive


SCRIPT = """
import os, sys, torch
from nanovllm import LLM
from nanovllm.workers import executor
load_model = executor.load_model
def load(*arguments, **options):
    if os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    return load_model(*arguments, **options)
executor.load_model = load
try:
    LLM(tensor_parallel_size=2, device="cpu", num_kv_blocks=8, max_model_len=64)
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_process_that_was_launched_runs_out_of_memory() -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    common["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        [leader, worker] = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert "rank 1: CUDA out of memory" in leader[0] and "take a smaller model" in leader[0], leader[1] + worker[1]
