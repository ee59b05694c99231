"""The processes of an engine with several ranks: whatever ends one of them, the call fails promptly, says why, and
nothing is left behind (CASES T1, T5)."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.plan import StepPlan
from tests.engine.ranks import (
    check_closed,
    check_idle,
    engine_checkpoints,
    executor_of,
    generate,
    pids_of,
    segments_of,
    tokens,
)
from tests.stages.ranks import PROMPTLY, check_gone, cpu_seconds, in_shared_memory, stat
from tests.stages.requests import Failing
from tests.weights import lively_qwen3

__all__ = ["engine_checkpoints"]  # a fixture
ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "tensor_parallel_size": 2, "device": "cpu", "num_kv_blocks": 40, "max_model_len": 600, "skip_tokenizer_init": True,
}  # fmt: skip
LONG = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def tiny(engine_checkpoints: Path) -> Path:
    return lively_qwen3(engine_checkpoints, num_hidden_layers=1)


def kill_the_worker(llm: LLM) -> None:
    os.kill(pids_of(llm)[-1], signal.SIGKILL)


def in_step_three(llm: LLM, act: Callable[[], object]) -> None:
    """Do something before the third step from now, when the workers wait for its message."""
    submit, steps = executor_of(llm).submit, iter(range(10**6))

    def acting(plan: StepPlan) -> Any:
        if next(steps) == 2:
            act()
        return submit(plan)

    executor_of(llm).submit = acting  # type: ignore[method-assign]


def in_mid_step(llm: LLM, act: Callable[[], object]) -> None:
    """Do something in the last layer of the third step, where the ranks wait for each other's part of a sum."""
    target, steps = executor_of(llm).runner.target, iter(range(10**6))
    bind = target.bind_attention

    def acting(meta: Any) -> Any:
        attend, number = bind(meta), next(steps)

        def attend_and_act(layer: int, *qkv: Any) -> Any:
            if number == 2 and layer == 0:
                act()
            return attend(layer, *qkv)

        return attend_and_act

    target.bind_attention = acting  # type: ignore[method-assign]


def check_death(llm: LLM, message: str) -> None:
    pids, segments = pids_of(llm), segments_of(llm)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        generate(llm, [[1, 2, 3], [4, 5]], LONG)
    assert time.monotonic() - began < PROMPTLY
    assert not llm.engine.has_unfinished()
    check_closed(llm, pids, segments)


@pytest.mark.parametrize("when", [pytest.param(in_step_three, marks=pytest.mark.slow), in_mid_step])
def test_tensor_parallel_t5_a_worker_is_killed(tiny: Path, when: Callable[..., None]) -> None:
    with LLM(tiny, **CONFIG, async_scheduling=when is in_mid_step) as llm:
        generate(llm, [[1, 2, 3]], LONG)
        when(llm, lambda: kill_the_worker(llm))
        check_death(llm, r"rank 1 died \(exit code -9\)")


@pytest.mark.slow
def test_tensor_parallel_t5_a_worker_hangs(tiny: Path) -> None:
    """Stopped, it neither dies nor answers. Who waits for it is told in time, and it is no more."""
    with LLM(tiny, **CONFIG) as llm:
        generate(llm, [[1, 2, 3]], LONG)
        in_mid_step(llm, lambda: os.kill(pids_of(llm)[-1], signal.SIGSTOP))
        check_death(llm, r"rank 1 was stopped: it has shown no sign of life for 3 s")


def test_tensor_parallel_t5_a_worker_raises(tiny: Path) -> None:
    """Its traceback is in the error."""
    with LLM(tiny, **CONFIG) as llm:
        generate(llm, [[1, 2, 3]], LONG)
        in_step_three(llm, lambda: executor_of(llm).changes.append((99, None, None)))  # type: ignore[arg-type]
        check_death(llm, r"(?s)rank 1 failed:.*Traceback.*executor\.add.*TypeError.*NoneType")


@pytest.mark.slow
def test_tensor_parallel_t5_the_leader_fails_in_mid_step(tiny: Path) -> None:
    """The workers would take its next step for the rest of this one; the error is the leader's own."""
    with LLM(tiny, **CONFIG) as llm:
        expected = tokens(generate(llm, [[1, 2, 3]], LONG))
        pids, segments = pids_of(llm), segments_of(llm)
        target = executor_of(llm).runner.target
        target.model = Failing(target.model, 2, ZeroDivisionError)  # type: ignore[assignment]
        with pytest.raises(ZeroDivisionError, match="planted"):
            generate(llm, [[1, 2, 3]], LONG)
        check_closed(llm, pids, segments)
    with LLM(tiny, **CONFIG) as llm:  # created, closed, created
        assert tokens(generate(llm, [[1, 2, 3]], LONG)) == expected


def test_tensor_parallel_t1_two_at_once_and_the_end_of_one(tiny: Path) -> None:
    """Neither hears of the other. One is closed twice; the other, idle, uses no core, and is dropped unclosed."""
    one, other = (LLM(tiny, **CONFIG) for _ in range(2))
    expected = tokens(generate(one, [[1, 2, 3]], LONG))
    assert expected == tokens(generate(other, [[1, 2, 3]], LONG))
    [pid], [segment] = pids_of(one), segments_of(one)
    one.close()
    check_closed(one, [pid], [segment])
    assert expected == tokens(generate(other, [[1, 2, 3]], LONG))
    check_idle(other)
    [pid], [segment] = pids_of(other), segments_of(other)
    assert stat(pid) and in_shared_memory(segment)
    time.sleep(0.1)
    before = cpu_seconds(pid), time.process_time()
    time.sleep(0.4)
    assert cpu_seconds(pid) - before[0] < 0.1 and time.process_time() - before[1] < 0.1
    del other
    gc.collect()
    check_gone([pid], [segment])


@pytest.mark.slow
def test_a_long_message_gets_a_longer_segment_and_the_old_one_goes(tiny: Path) -> None:
    prompt = [i % 500 for i in range(40)]
    with LLM(tiny, **CONFIG | {"max_model_len": 60, "num_kv_blocks": 60}) as llm:
        expected = tokens(generate(llm, [prompt], LONG))
        [before] = segments_of(llm)
        executor_of(llm).changes.append((10**6, list(range(50_000)), LONG))
        assert tokens(generate(llm, [prompt], LONG)) == expected
        [after] = segments_of(llm)
        assert before != after and in_shared_memory(after) and not in_shared_memory(before)


# --- Ctrl-C ---


SCRIPT = """
import json, os, signal, sys
from nanovllm import LLM, SamplingParams
def tell(llm):
    team = llm.engine.executor.team
    print(json.dumps([[w.pid for w in team._workers.values()], [s.name for s in team._segments]]), flush=True)
def on_event(event):
    if event["step"] == 5 and event["type"] == "scheduled" and mode:
        tell(llm)
        run = runner.run
        def interrupted(*arguments):
            runner.run = run
            os.killpg(0, signal.SIGINT)  # as Ctrl-C in a terminal does: to the leader and to its workers
            return run(*arguments)
        runner.run = interrupted
if __name__ == "__main__":
    mode = sys.argv[2]
    llm = LLM(sys.argv[1], on_event=on_event, **json.loads(sys.argv[3]))
    runner = llm.engine.executor.runner
    params = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    try:
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    mode, params = "", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    print(llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids, flush=True)
    tell(llm)
    if sys.argv[2] == "wait":
        sys.stdin.read()
"""


def run_script(path: Path, directory: Path, mode: str) -> "subprocess.Popen[str]":
    script = directory / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # or it warns, without a network, that this host has no name
    return subprocess.Popen(
        [sys.executable, str(script), str(path), mode, json.dumps(CONFIG)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


def test_tensor_parallel_t5_ctrl_c_and_a_leader_that_is_killed(tiny: Path, tmp_path: Path) -> None:
    """Ctrl-C in mid-step leaves the engine usable; a leader that is killed takes its workers with it."""
    with run_script(tiny, tmp_path, "wait") as leader:
        try:
            assert leader.stdout is not None
            pids, segments = json.loads(leader.stdout.readline())
            assert leader.stdout.readline() == "interrupted\n"
            assert len(json.loads(leader.stdout.readline())) == 4
            assert json.loads(leader.stdout.readline()) == [pids, segments]
            assert len(pids) == 1 and all(map(in_shared_memory, segments))
        finally:
            leader.kill()
    check_gone(pids, segments)


@pytest.mark.slow
def test_tensor_parallel_t5_a_program_that_ends_without_closing(tiny: Path, tmp_path: Path) -> None:
    with run_script(tiny, tmp_path, "end") as leader:
        out, error = leader.communicate(timeout=60)
    assert leader.returncode == 0 and error == "", error
    pids, segments = json.loads(out.splitlines()[-1])
    check_gone(pids, segments)
