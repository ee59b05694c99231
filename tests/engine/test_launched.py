"""The engine under torchrun: it joins the ranks that are there. Rank 0 leads, the others serve inside `LLM()`.

Two machines are two torchrun agents here. Faults are tried without the agents, since an agent whose rank has failed
ends its other ranks by itself.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.workers import launched_team as launched
from nanovllm.workers.launched_team import FIRST, HEAD, Connections, address_towards, is_launched, own_device
from tests.engine.ranks import STORY_MODEL
from tests.ports import free_port
from tests.stages.ranks import PROMPTLY

ROOT = Path(__file__).parents[2]
PROMPTS = [[1, 2, 3], [40, 50], [7] * 20]
CONFIG: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 40, "max_model_len": 100, "skip_tokenizer_init": True}
PARAMS = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)

SCRIPT = """
import json, os, signal, sys, time
from nanovllm import LLM, SamplingParams
from nanovllm.runner.model_runner import ModelRunner
mode, prompts, config = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
run, steps, began = ModelRunner.run, iter(range(100)), []
def acting(*arguments):
    if next(steps) == 3:
        began.append(time.monotonic())
        if mode == os.environ["RANK"] + " raises": raise OSError("planted")
        if mode == os.environ["RANK"] + " dies": os.kill(os.getpid(), signal.SIGKILL)
        if mode == os.environ["RANK"] + " hangs": os.kill(os.getpid(), signal.SIGSTOP)
    return run(*arguments)
ModelRunner.run = acting
params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
with LLM(tensor_parallel_size=2, **config) as llm:
    print("leads", flush=True)
    try:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        print(json.dumps([output.outputs[0].token_ids for output in outputs]), flush=True)
    except RuntimeError as error:
        print(json.dumps([time.monotonic() - began[0], str(error)]), flush=True)
        raise
try:
    LLM(tensor_parallel_size=2, **config)
except RuntimeError as error:
    print(error)
"""


def launch(directory: Path, mode: str, *, agents: bool) -> list[tuple[int, list[str], str]]:
    """Exit status, lines and errors of both ranks, or of both agents."""
    script = directory / "script.py"
    script.write_text(SCRIPT)
    port = free_port()
    arguments = [str(script), mode, json.dumps(PROMPTS), json.dumps(CONFIG)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    results = []
    with ExitStack() as stack:
        processes = []
        for rank in range(2):
            command = [sys.executable, *arguments]
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            if agents:
                where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
                run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank)]
                command, place = [*run, *where, *arguments], {}
            process = subprocess.Popen(
                command, env=environment | place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                start_new_session=True,
            )  # fmt: skip
            stack.callback(kill_all_of, process)
            processes.append(process)
        for process in processes:
            if mode == "1 hangs" and process is processes[1]:
                os.kill(process.pid, signal.SIGCONT)
            out, error = process.communicate(timeout=60)
            results.append((process.returncode, out.splitlines(), error))
    return results


def kill_all_of(process: "subprocess.Popen[str]") -> None:
    """An agent ends its ranks when it is asked to end."""
    with suppress(subprocess.TimeoutExpired):
        process.terminate()
        process.wait(timeout=20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_two_machines_are_one_engine(tmp_path: Path) -> None:
    """The tokens are those of one rank; when the leader closes the engine, all leave; there is no second one."""
    (status, lines, error), (other_status, other_lines, other_error) = launch(tmp_path, "well", agents=True)
    assert (status, other_status) == (0, 0), error + other_error
    with LLM(STORY_MODEL, **CONFIG) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], PARAMS, use_tqdm=False)
    assert lines[0] == "leads" and json.loads(lines[1]) == [output.outputs[0].token_ids for output in outputs]
    assert "there can be one only" in lines[2] and other_lines == []


@pytest.mark.slow
def test_a_machine_whose_rank_dies_fails_both(tmp_path: Path) -> None:
    (status, lines, _), (other_status, _, other_error) = launch(tmp_path, "1 dies", agents=True)
    assert status == other_status == 1 and "exitcode  : -9" in other_error
    took, why = json.loads(lines[1])
    assert took < PROMPTLY and "a rank was lost, so this engine is closed" in why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "message"),
    [("1 raises", r"rank 1 failed:"), ("1 hangs", "rank 1 was stopped: it has shown no sign of life for 3 s")],
)
def test_a_rank_that_fails_is_an_error_in_time(tmp_path: Path, mode: str, message: str) -> None:
    """And the other leaves, if it can: this one is woken up when all is over."""
    began = time.monotonic()
    (status, lines, _), (other_status, _, other_error) = launch(tmp_path, mode, agents=False)
    took, why = json.loads(lines[1])
    assert status == other_status == 1
    assert took < PROMPTLY and message in why
    assert ("OSError: planted" in why) == ("OSError: planted" in other_error) == (mode == "1 raises")
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_a_leader_that_dies_takes_the_others_with_it(tmp_path: Path) -> None:
    (status, lines, _), (other_status, _, other_error) = launch(tmp_path, "0 dies", agents=False)
    assert status == -signal.SIGKILL and lines == ["leads"]
    assert other_status == 1 and "gone" in other_error


# --- without processes ---


def test_who_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are wanted, or else a refusal before anything is joined; one alone starts its own."""
    for name in launched.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not is_launched(2)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert is_launched(2)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=4, but 2 processes were launched.*make the two equal"):
        LLM(STORY_MODEL, device="cpu", tensor_parallel_size=4)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not is_launched(2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert own_device(torch.device("cuda")) == torch.device("cuda", 1) and own_device(torch.device("cpu")).type == "cpu"
    with pytest.raises(ValueError, match="3 CUDA GPUs, there are 2"):
        own_device(torch.device("cuda", 1))


class Wire:
    """Stands for the group of both ends: what one sends lies there until the other takes it."""

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()
        self.sending = True

    def broadcast(self, x: Tensor) -> Tensor:
        if self.sending:
            self.sent.append(x.clone())
            return x
        return x.copy_(self.sent.popleft())


def test_messages_of_any_length_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short one behind a long one, too, and those that just fit or just do not."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    leader, worker = (Connections(torch.device("cpu")) for _ in range(2))
    wire: Any = Wire()
    leader.messages = worker.messages = wire
    room = FIRST - HEAD
    messages = [bytes(i % 251 for i in range(size)) for size in (1, room - 1, room, room + 1, 5 * FIRST, 3, 0)]
    for message in messages:
        wire.sending = True
        leader.send(message)
        assert len(wire.sent) == (1 if len(message) <= room else 2)
        wire.sending = False
        assert worker.receive() == message and not wire.sent


def test_ranks_of_one_machine_meet_on_its_loopback() -> None:
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"
