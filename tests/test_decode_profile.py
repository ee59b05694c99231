"""What is recorded of a decode step, as far as a CPU can tell; on a GPU, the recording itself."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.stage_5_continuous_batching import ContinuousBatchingEngine
from stages.stage_6_cuda_graphs import CUDAGraphEngine
from tests.weights import lively_qwen3
from tools.pictures import decode_profile
from tools.pictures.decode_profile import Operation, busy_us


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_qwen3(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.mark.parametrize("engine_class", [ContinuousBatchingEngine, CUDAGraphEngine])
def test_a_decode_step_is_traced_and_leaves_nothing_behind(engine_class: Any, model: Path) -> None:
    engine = engine_class(model, max_num_seqs=3, num_blocks=16)
    events = decode_profile.trace(engine, batch=3, prompt_tokens=8)
    names = [name for _, name, _, _ in events]
    layers = engine.config.num_hidden_layers
    assert sum("linear" in name for name in names) == 7 * layers + 1, "one decode step, and all of it"
    starts = [start for _, _, start, _ in events]
    assert {track for track, *_ in events} == {"cpu"} and starts == sorted(starts) and starts[0] >= 0
    assert decode_profile.step_ms(engine, batch=3, prompt_tokens=8, steps=3) > 0
    assert len(engine.pool.free_list) == 16 and not engine.scheduler.running


def test_a_recording_is_read_as_it_was_made(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step: list[Operation] = [
        ("cpu", "a", 3.14, 20.0),
        ("gpu", "a", 1000.0, 1.26),
        ("cpu", "b", 1000.04, 0.5),
        ("cpu", "a", 2e4, 7),
    ]
    monkeypatch.setattr(decode_profile, "trace", lambda engine, batch: step)
    command = ["profile", "--device", "cpu", "--model", str(model), "--batch", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    decode_profile.main()
    recording = decode_profile.load_recording(tmp_path)
    assert recording is not None and recording["batch"] == 2
    assert recording["stages"].keys() == {"stage 5", "stage 6"}
    for stage in recording["stages"].values():
        assert stage["step_ms"] > 0
        assert [event[:2] for event in stage["events"]] == [event[:2] for event in step]
        assert [event[2:] for event in stage["events"]] == [(3.1, 20.0), (1000.0, 1.3), (1000.0, 0.5), (20000.0, 7.0)]
    assert str(tmp_path) not in (tmp_path / "decode_profile.cpu.json").read_text()
    capsys.readouterr()
    assert decode_profile.load_recording(tmp_path / "empty") is None
    assert "there is no recording" in capsys.readouterr().out


def test_busy_time_counts_overlaps_once() -> None:
    events: list[Operation] = [("gpu", "a", 10, 5), ("gpu", "b", 12, 1), ("gpu", "c", 14, 4), ("cpu", "d", 0, 99)]
    assert busy_us([*events, ("gpu", "e", 30, 2)], "gpu") == 8 + 2


def test_launching_takes_time_whatever_is_computed() -> None:
    assert decode_profile.launch_ms(repeats=2) > 0.5


def test_the_recording_that_is_shipped_names_its_card_and_is_small() -> None:
    for path in decode_profile.RECORDINGS.glob("decode_profile.*.json"):
        recording = json.loads(path.read_text(encoding="utf-8"))
        assert path.stat().st_size < 200_000 and recording["card"] and recording["torch"]
        assert recording["stages"]["stage 6"]["graph_bytes"] > 0
