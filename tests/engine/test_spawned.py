"""The processes of several ranks by themselves, with parts that are no model."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from nanovllm.distributed.group import PeerLost
from nanovllm.workers import spawned_team as spawned
from nanovllm.workers.spawned_team import SpawnedTeam, make_store
from nanovllm.workers.team import ctrl_c_waits
from tests.engine.parts import a_part_that_cannot_start
from tests.stages.ranks import check_gone, on_linux

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def test_a_worker_that_cannot_start_says_why() -> None:
    team = SpawnedTeam([torch.device("cpu")] * 2, a_part_that_cannot_start)
    [pid] = [worker.pid for worker in team._workers.values()]
    team.join()
    with (
        pytest.raises(RuntimeError, match=r"(?s)closed: rank 1 failed:.*Traceback.*OSError: no such part"),
        team.in_step(),
    ):
        team.group.smallest(1)  # as an executor does when it starts
    assert pid is not None
    check_gone([pid], [])


def test_nobody_is_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that neither starts nor dies."""

    class Silent:
        name, exitcode = "rank 1", None

        def join(self, timeout: float) -> None: ...

        def is_alive(self) -> bool:
            return False

    monkeypatch.setattr(spawned, "TIMEOUT", timedelta(seconds=0.05))
    monkeypatch.setattr(spawned, "GRACE", 0.05)
    team, worker = SpawnedTeam([CPU], a_part_that_cannot_start), Silent()
    ours, theirs = multiprocessing.Pipe()
    team._workers[ours] = worker  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"the ranks could not start: a rank has not answered for 0\.05 s"):
        team.join()
    assert not team.close.alive
    theirs.close()


@on_linux
def test_nobody_but_this_machine_can_reach_the_ranks() -> None:
    """The port where they meet is one of the loopback interface."""
    listening = []
    store = make_store()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            address, port = line.split()[1].split(":")
            if line.split()[3] == "0A" and int(port, 16) == store.port:
                listening.append((table, address))
    assert listening == [("tcp", "0100007F")]


def test_ctrl_c_waits_for_the_end_of_a_step_whatever_thread_it_comes_through() -> None:
    """The second one does not wait. A process with other threads gets its signals through any of them."""
    over, done = threading.Event(), []
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt), ctrl_c_waits():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            done.append("all of it")
        with pytest.raises(KeyboardInterrupt), ctrl_c_waits():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            done.append("this, too")
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            done.append("not this")
    finally:
        over.set()
        other.join()
    assert done == ["all of it", "this, too"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_does_not_wait_for_a_model_to_load() -> None:
    """Which may take minutes. All ranks end, so that it does not matter where each of them was."""
    team, done = SpawnedTeam([CPU], a_part_that_cannot_start), []
    with pytest.raises(KeyboardInterrupt), team.in_step(loading=True):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        done.append("not this")
    assert done == [] and not team.close.alive


UNGUARDED = """
from nanovllm import LLM
LLM(tensor_parallel_size=2, device="cpu")
"""


def test_a_script_without_the_guard_is_told_of_it(tmp_path: Path) -> None:
    """Its ranks run it again, and would start ranks of their own; Python's words for that do not name the remedy."""
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=100)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "rank 1 died (exit code 1)" in last and 'if __name__ == "__main__":' in last


@pytest.mark.parametrize(("story", "one_line"), [("rank 1 died (exit code -9)", True), ("rank 1: a\ntraceback", False)])
def test_a_rank_that_is_gone_without_a_word_costs_a_line(story: str, one_line: bool) -> None:
    team = SpawnedTeam([CPU], a_part_that_cannot_start)
    error = team.failed(PeerLost(story), "a rank was lost", starting=False)
    assert isinstance(error, RuntimeError) and isinstance(error, OSError) == one_line
    assert str(error) == f"a rank was lost: {story}"


SCRIPT = """
import json, time, torch
from nanovllm.workers.spawned_team import SpawnedTeam
def part(group):
    return lambda message: time.sleep(100)
if __name__ == "__main__":
    team = SpawnedTeam([torch.device("cpu")] * 2, part)
    team.join()
    with team.in_step():
        team.tell("compute for long")
        print(json.dumps([[w.pid for w in team._workers.values()], [s.name for s in team._segments]]), flush=True)
        time.sleep(100)
"""


@pytest.mark.slow
def test_a_leader_that_is_killed_takes_workers_with_it_that_compute(tmp_path: Path) -> None:
    """They hear of it although they listen to nobody."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as leader:
        assert leader.stdout is not None
        pids, segments = json.loads(leader.stdout.readline())
        leader.kill()
    assert len(pids) == len(segments) == 1
    check_gone(pids, segments)
