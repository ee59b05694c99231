"""What is recorded of a decode step, as far as a CPU can tell; on a GPU, the recording itself."""

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


def test_every_contender_is_recorded_with_its_time_and_its_trace(model: Path) -> None:
    recording = decode_profile.record(model, {"one": ContinuousBatchingEngine, "two": CUDAGraphEngine}, "cpu")
    assert recording["model"] == model.name and recording["stages"].keys() == {"one", "two"}
    for stage in recording["stages"].values():
        assert stage["step_ms"] > 0 and stage["seconds_to_build"] > 0
        assert sum("linear" in name for _, name, _, _ in stage["events"]) == 7 * 2 + 1


def test_without_a_recording_the_notebook_says_how_to_make_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert decode_profile.load_recording(tmp_path / "empty") is None
    assert "there is no recording" in capsys.readouterr().out


def test_busy_time_counts_overlaps_once() -> None:
    events: list[Operation] = [("gpu", "a", 10, 5), ("gpu", "b", 12, 1), ("gpu", "c", 14, 4), ("cpu", "d", 0, 99)]
    assert busy_us([*events, ("gpu", "e", 30, 2)], "gpu") == 8 + 2


def test_launching_takes_time_whatever_is_computed() -> None:
    assert decode_profile.launch_ms(repeats=2) > 0.5


def test_the_recording_that_is_shipped_names_its_card_and_is_small() -> None:
    recording = decode_profile.load_recording()
    assert recording is not None and "NVIDIA" in recording["card"] and recording["torch"]
    assert recording["stages"]["stage 6"]["graph_bytes"] > 0
    assert {track for track, *_ in recording["stages"]["stage 5"]["events"]} == {"cpu", "launch", "gpu"}
    assert sum(path.stat().st_size for path in decode_profile.RECORDINGS.iterdir()) < 100_000
