"""Stage 7's processes: whatever ends one of them, the call fails promptly, says why, and nothing is left behind."""

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.ranks import Group, PeerLost, Team, leave_with_the_first
from tests.stages.ranks import PROMPTLY, Starter, check_gone, on_linux, pids_of, stat
from tests.stages.requests import greedy
from tests.stages.subject import Subject, since
from tests.weights import lively_qwen3

pytestmark = on_linux

ROOT = Path(__file__).parents[2]


def between_steps(engine: Any, act: Callable[[], Any]) -> None:
    """Do something when the workers have their keys and values, and wait for the next message."""
    first = engine.trace.step

    def on_event(event: Any) -> None:
        if event["type"] == "scheduled" and event["step"] == first + 3 and event["request"] == 0:
            act()

    engine.trace.on_event = on_event


def in_mid_step(engine: Any, act: Callable[[], Any]) -> None:
    """Do something in the last layer of a step, where the ranks wait for each other's part of a sum."""
    model, calls = engine.model, 0

    def forward(input_ids: Tensor, positions: Tensor, attend: Any) -> Any:
        nonlocal calls
        calls += 1

        def attend_and_act(layer: int, *qkv: Tensor) -> Any:
            if calls == 3 and layer == model.config.num_hidden_layers - 1:
                act()
            return attend(layer, *qkv)

        return model(input_ids, positions, attend_and_act)

    engine.model = forward
    engine.model.logits = model.logits


def kill_the_last(engine: Any) -> None:
    os.kill(pids_of(engine)[-1], signal.SIGKILL)


def check_death(engine: Any, message: str) -> None:
    """The call fails at once and says why; nothing is left; to close again does nothing."""
    pids = pids_of(engine)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        engine.generate([[1, 2, 3], [4, 5]], greedy(10, ignore_eos=True))
    assert time.monotonic() - began < PROMPTLY
    check_gone(pids)
    with pytest.raises(RuntimeError, match="this engine is closed"):
        engine.generate([[1]], greedy(1))
    engine.close()


@since(7)
def test_tensor_parallel_t5_a_worker_is_killed_in_mid_step(story_ranks: Any) -> None:
    story_ranks.generate([[1, 2, 3]], greedy(2))
    in_mid_step(story_ranks, lambda: kill_the_last(story_ranks))
    check_death(story_ranks, r"rank \d died \(exit code -9\)")


@since(7)
def test_tensor_parallel_t5_a_worker_raises(awkward_ranks: Any) -> None:
    """Its traceback is in the error."""
    awkward_ranks.generate([[1, 2, 3]], greedy(2))
    between_steps(awkward_ranks, lambda: awkward_ranks.team.tell("no step"))
    check_death(awkward_ranks, r"(?s)rank \d failed:.*Traceback.*AttributeError.*'pieces'")


@pytest.mark.slow
@since(7)
@pytest.mark.parametrize("when", [between_steps, None])
def test_tensor_parallel_t5_a_worker_is_killed(start_ranks: Starter, checkpoints: Path, when: Any) -> None:
    """Between two steps, or between two calls; the process goes on, and makes another engine."""
    engine = start_ranks(lively_qwen3(checkpoints))
    engine.generate([[1, 2, 3]], greedy(2))
    if when is None:
        kill_the_last(engine)
    else:
        when(engine, lambda: kill_the_last(engine))
    check_death(engine, r"rank \d died \(exit code -9\)")


@pytest.mark.slow
@since(7)
def test_the_leader_fails_in_mid_step(start_ranks: Starter, checkpoints: Path) -> None:
    """The workers would wait for its part for ever; the error is the leader's own."""
    engine = start_ranks(lively_qwen3(checkpoints, num_hidden_layers=1))
    engine.generate([[1, 2, 3]], greedy(2))
    pids = pids_of(engine)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    engine.model = fail
    with pytest.raises(ZeroDivisionError, match="planted"):
        engine.generate([[1, 2, 3]], greedy(2))
    check_gone(pids)


@pytest.mark.slow
@since(7)
def test_an_engine_that_nobody_keeps_ends_its_workers(start_ranks: Starter, checkpoints: Path) -> None:
    engine = start_ranks(lively_qwen3(checkpoints, num_hidden_layers=1))
    engine.generate([[1, 2, 3]], greedy(2))
    pids = pids_of(engine)
    assert all(stat(pid) for pid in pids)
    del engine
    gc.collect()
    check_gone(pids)


@since(7)
def test_nobody_but_this_machine_can_reach_the_ranks() -> None:
    """The port where they meet is one of the loopback interface, 127.0.0.1."""
    team = Team([torch.device("cpu")] * 2)
    not_a_rank: Any = len  # nobody waits for it
    try:
        team.start(not_a_rank, ())
        assert team.store is not None
        port = f"{team.store.port:04X}"
        sockets = [
            line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()
        ]
    finally:
        team.close()
    assert [at for _, at, _, state, *_ in sockets if at.endswith(f":{port}") and state == "0A"] == [f"0100007F:{port}"]


@pytest.mark.slow
@since(7)
def test_a_worker_that_cannot_start_says_why() -> None:
    team = Team([torch.device("cpu")] * 2)
    not_a_rank: Any = len  # a group has none
    team.start(not_a_rank, ())
    [pid] = [worker.pid for worker in team.workers.values()]
    with pytest.raises(RuntimeError, match=r"(?s)could not start: rank 1 failed:.*TypeError.*len"):
        team.join()
    team.close()
    assert pid is not None
    check_gone([pid])


UNGUARDED = """
import torch
from stages.ranks import Team
team = Team([torch.device("cpu")] * 2)
team.start(len, ())
team.join()
"""


@pytest.mark.slow
@since(7)
@pytest.mark.parametrize("how", ["file", "stdin"])
def test_a_script_that_cannot_be_imported_is_told_so(tmp_path: Path, how: str) -> None:
    """The new Python imports it before it comes to anything of ours."""
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command, text = [sys.executable, str(script) if how == "file" else "-"], UNGUARDED if how == "stdin" else None
    run = subprocess.run(command, input=text, capture_output=True, text=True, env=environment, timeout=60)
    last = run.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: the ranks could not start: rank 1 died (exit code 1) (a script that"), last
    assert last.endswith('needs `if __name__ == "__main__":`, and has to be a file)')


def test_under_nccl_a_death_ends_what_waits_for_the_dead() -> None:
    """Where the leader waits on its GPU, somebody else must notice, and abort; the step then fails."""
    aborted: list[bool] = []
    group = Group(0, 2, torch.device("cuda"))
    group.backend = SimpleNamespace(abort=lambda: aborted.append(True))
    ours, theirs = multiprocessing.Pipe(duplex=False)  # like a process's sentinel, readable at its end
    sentinels: Any = [ours]
    thread = threading.Thread(target=leave_with_the_first, args=(sentinels, group))
    thread.start()
    assert group.backend is not None
    theirs.close()
    thread.join(PROMPTLY)
    group.leave()
    assert aborted == [True]
    with pytest.raises(PeerLost, match="no longer connected"):
        group.all_reduce(torch.zeros(1))
    team = Team([torch.device("cpu")] * 2)  # it was never connected
    with pytest.raises(RuntimeError, match="lost in the middle of a step"), team.step("no step"):
        pass
    assert not team.close.alive


SCRIPT = """
import importlib, json, os, signal, sys
from stages.core import SamplingParams
engine_class = importlib.import_module(sys.argv[1]).TensorParallelEngine
def tell(engine):
    team = engine.team
    print(json.dumps([w.pid for w in team.workers.values()]), flush=True)
def on_event(event):
    if event["step"] == 3 and event["type"] == "scheduled":
        tell(engine)
        os.killpg(0, signal.SIGINT)  # as Ctrl-C in a terminal does: to the leader and to its workers
engine = engine_class(sys.argv[2], on_event=on_event)
try:
    engine.generate([[1, 2, 3]], SamplingParams(0, 500, ignore_eos=True))
except KeyboardInterrupt:
    print("interrupted", flush=True)
engine.trace.on_event = None
print(engine.generate([[1, 2, 3]], SamplingParams(0, 4, ignore_eos=True)), flush=True)
if sys.argv[3] == "wait":
    tell(engine)
    sys.stdin.read()
"""


def run_script(subject: Subject, path: Path, mode: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # or it warns, without a network, that this host has no name
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, subject.module.__name__, str(path), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


@since(7)
def test_tensor_parallel_t5_ctrl_c_and_a_leader_that_is_killed(subject: Subject, checkpoints: Path) -> None:
    """Ctrl-C between two steps leaves the engine usable; a leader that is killed takes its workers with it."""
    with run_script(subject, lively_qwen3(checkpoints), "wait") as leader:
        try:
            assert leader.stdout is not None
            pids = json.loads(leader.stdout.readline())
            assert leader.stdout.readline() == "interrupted\n"
            assert len(json.loads(leader.stdout.readline())[0]) == 4
            assert json.loads(leader.stdout.readline()) == pids and len(pids) == 1
        finally:
            leader.kill()
    check_gone(pids)


@pytest.mark.slow
@since(7)
def test_tensor_parallel_t5_a_program_that_ends_without_closing(subject: Subject, checkpoints: Path) -> None:
    with run_script(subject, lively_qwen3(checkpoints), "end") as leader:
        out, error = leader.communicate(timeout=60)
    assert leader.returncode == 0 and error == "", error
    check_gone(json.loads(out.splitlines()[0]))
