"""What the race hears of real engines: all from the start, nothing of the warm-up, and of each in the same words."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nanovllm.trace_view.recording import add_texts
from stages.core import SamplingParams
from stages.manifest import load_stage
from tools.race import race, replay
from tools.race.replay import EngineShow
from tools.race.views import EngineView, Moment, moments_of
from tools.race.worker import Log, run
from tools.race.workload import EMBEDDED_MODEL, Workload, load_race, load_tokenizer, race_workload


@pytest.fixture(scope="module")
def workload() -> Workload:
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    return race_workload(lambda text: tokenizer.encode(text).ids, 3, 2, seed=0)


@pytest.fixture(scope="module")
def expected(workload: Workload) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.max_tokens]
    outputs: list[list[int]] = load_stage(5).engine_class()(str(EMBEDDED_MODEL)).generate(workload.prompts, params)
    return outputs


@pytest.mark.parametrize("engine", ["stage_2", "stage_4", "nanovllm"])
def test_an_engine_tells_all_from_its_start(engine: str, workload: Workload, expected: list[list[int]]) -> None:
    """And nothing of the warm-up. The events are alike for a stage and for the engine, so that one view draws both."""
    said: list[dict[str, Any]] = []
    job = {
        "engine": engine,
        "model": str(EMBEDDED_MODEL),
        "device": "cpu",
        "workload": asdict(workload),
        "clock": "wall",
    }
    result = run(job, said.append, lambda: said.append({"go": True}))
    assert said[:2] == [{"ready": True}, {"go": True}]
    told = [Moment(*message["at"]) for message in said[2:]]
    known = moments_of(result["events"])
    assert all((m.tokens, m.finished) in [(k.tokens, k.finished) for k in known] for m in told)

    events = result["events"]
    assert result["outputs"] == expected
    assert [e["request"] for e in events if e["type"] == "added"] == [0, 1, 2]
    assert min(e["step"] for e in events if e["type"] == "scheduled") == 1
    times = [e["t"] for e in events]
    assert times[0] >= 0 and times == sorted(times) and times[-1] <= result["seconds"]
    assert known[-1][1:] == (workload.num_tokens, 3)
    view = EngineView(workload, workload.scenario.num_blocks)
    for event in map(add_texts(str), events):
        view.on_event(event)
    assert [request.ids for request in view.requests] == expected and not view.state.tables


def test_steps_count_from_the_start() -> None:
    """Whatever the warm-up has used up."""
    log = Log(lambda _: None, "wall")
    event = {"t": 0.5, "type": "token", "request": 0, "ids": [5]}
    log.on_event(event | {"step": 6})
    log.start()
    for step in (8, 3):
        log.on_event(event | {"step": step})
    assert [(e["step"], e["ids"]) for e in log.events] == [(2, [5]), (0, [5])]


def test_progress_is_told_now_and_then_and_events_are_all_kept() -> None:
    said: list[dict[str, Any]] = []
    log = Log(said.append, "cpu")
    log.on_event({"type": "token", "step": 0, "t": time.perf_counter(), "ids": [1]})  # before the start
    log.start()
    for i in range(100):  # of four steps, a little more than the 0.04 s after which it is told again
        log.on_event({"type": "token", "step": 1, "t": log.started + i / 97, "ids": [1, 2]})
    log.on_event({"type": "finished", "step": 1, "t": log.started + 1})
    assert [e["ids"] for e in log.events[:-1]] == [[1, 2]] * 100
    assert len(said) == 24 and said[0]["at"] == [pytest.approx(4 / 97), 10, 0]
    assert log.stop() < 1, "the CPU's clock, by which no second has passed"


@pytest.mark.slow
def test_real_engines_race_and_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "made"
    options = "--record --requests 4 --tokens 2 --stages 1 5 nanovllm --out".split()
    race.main([*options, str(directory)])
    said = capsys.readouterr().out
    assert said.count(" 4 of 4") == 3 and "\x1b" not in said
    assert [r.engine for r in load_race(directory)] == ["stage_1", "stage_5", "nanovllm"]
    replay.main(["--recording", str(directory), "--engine", "5", "--from", "0"])
    assert "step" in capsys.readouterr().out


@pytest.mark.gpu
def test_real_engines_race_on_a_gpu(tmp_path: Path) -> None:
    """Texts may differ there: in 16 bits it depends on the batch which of two equally good tokens wins."""
    options = ["--record", "--device", "cuda", "--requests", "6", "--tokens", "4", "--stages", "1", "6", "nanovllm"]
    race.main([*options, "--out", str(tmp_path)])
    recordings = load_race(tmp_path)
    assert [r.engine for r in recordings] == ["stage_1", "stage_6", "nanovllm"]
    for recording in recordings:
        assert [len(tokens) for tokens in recording.tokens] == recording.race.workload.max_tokens
        assert recording.race.machine["clock"] == "wall" and recording.race.card not in ("", "cpu")
        show = EngineShow(recording)
        show.seek(show.duration)
        assert set(show.view.state.status) == {"finished"} and not show.view.state.tables
