"""The benchmark of steps, from a grid on a tiny model to a card; and the drivers of what is simulated."""

import argparse
import asyncio
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import __main__ as command
from benchmarks.engine import step_costs, step_scenes
from benchmarks.lib.process import Engine
from benchmarks.serving import added, drive, mock, simulated
from nanovllm import LLM, AsyncLLM, RequestOutput, SamplingParams
from nanovllm.simulate.costs import CARDS, Card, ServerTime, StepShape, load_costs
from nanovllm.simulate.step_time import Recordings
from tests.ports import free_port
from tests.test_engine_benchmarks import run_here
from tests.weights import lively_qwen3, lively_qwen3_moe

TINY: dict[str, Any] = {
    "decodes": {"batches": [1, 3], "contexts": [16, 40]},
    "chunks": {"sizes": [8, 16], "contexts": [0, 24]},
    "prompts": [2],
    "mixed": {"batches": [2], "sizes": [8], "context": 16},
    "shared": {"beginnings": [32], "numbers": [1, 2], "batches": [4], "prompts": [2], "own": 8},
    "masked": [1],
    "guesses": {"batches": [2], "numbers": [1, 3], "context": 16},
    "calls": [1, 3],
    "steps": 3,
    "pauses": 1,
    "most_tokens": 2**11,
    "highest_id": 500,
}
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 8, "num_kv_blocks": 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_qwen3(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def points_of(model: Path, scenes: list[str], overlapped: bool, **config: Any) -> dict[str, dict[str, Any]]:
    """By name, what a grid of these scenes finds."""
    engine = Engine("nanovllm", str(model), {**OPTIONS, **config}, 0.0)
    try:
        [found] = step_scenes.measure(engine, 1, TINY, scenes, overlapped, "cpu")
    finally:
        engine.llm.close()
    assert found["kv_tokens"] == 128 * 16 and found["wake"] >= 0 and all(seconds > 0 for *_, seconds in found["intake"])
    return {point["name"]: point for point in found["points"]}


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_grid_has_the_steps_that_it_names(model: Path, overlapped: bool) -> None:
    """Alone, as on a CPU, and with asynchronous scheduling and without it in turns, as on a GPU."""
    config = {"async_scheduling": overlapped}
    found = points_of(model, ["decodes", "chunks", "mixed"], overlapped, **config)
    shapes = {name: StepShape(*point["shape"]) for name, point in found.items()}
    assert all(point["device"] > 0 for point in found.values())
    assert shapes["3 decodes at 40"].decodes == shapes["3 decodes at 40"].samples == 3
    assert 3 * 40 < shapes["3 decodes at 40"].decode_keys < 3 * 60
    chunk = shapes["chunks of 16 behind 24, 1"]
    assert chunk[:4] == (0, 0, 1, 16) and chunk.prompt_pairs == 16 * (24 + 16) + 16 * 17 // 2
    several = shapes["2 prompts of 8, 1"]
    assert (several.prompts, several.prompt_tokens) == (2, 16)
    beside = shapes["2 decodes beside chunks of 8, 1"]
    assert (beside.decodes, beside.prompts, beside.prompt_tokens) == (2, 1, 8)
    assert any(point["host"] is not None for point in found.values())


def test_what_a_call_takes_beside_its_requests_and_steps(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = LLM.prepare

    def slow(llm: LLM, params: SamplingParams) -> SamplingParams:
        time.sleep(0.02)
        return prepare(llm, params)

    monkeypatch.setattr(LLM, "prepare", slow)  # which only `generate` calls
    engine = Engine("nanovllm", str(model), OPTIONS, 0.0)
    found = step_scenes.Bench(engine, TINY, False, "wall").calls()
    engine.llm.close()
    assert [number for number, _, _ in found] == [1, 3]
    assert all(0.015 * number < more < whole for number, more, whole in found)


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_grid_of_shared_keys(model: Path, overlapped: bool) -> None:
    """All but the first sequence behind a beginning share its 32 keys."""
    found = points_of(model, ["shared"], overlapped, async_scheduling=overlapped)
    shapes = {name: StepShape(*point["shape"]) for name, point in found.items()}
    one, two = (shapes[f"4 decodes behind {number} beginnings of 32"] for number in (1, 2))
    assert (one.decodes, one.shared_keys) == (4, 3 * 32) and (two.decodes, two.shared_keys) == (4, 2 * 32)
    assert (one.shared_beginnings, two.shared_beginnings) == (32, 64)
    assert 32 + 4 * 8 < one.decode_keys < 32 + 4 * 40 and one.decode_keys + 32 == pytest.approx(two.decode_keys, abs=8)
    chunk = shapes["2 prompts of 8 behind a shared 32, 1"]
    assert (chunk.prompts, chunk.prompt_tokens, chunk.shared_keys) == (2, 16, 0)
    assert chunk.prompt_pairs == sum(32 * n + n * (n + 1) // 2 for n in step_scenes.spread(2, 8))


def test_a_grid_of_guesses(model: Path) -> None:
    speculative = {"method": "ngram", "k": 3}
    found = points_of(model, ["guesses"], False, speculative=speculative)
    shape = StepShape(*found["2 decodes with 3 guesses each"]["shape"])
    assert (shape.decodes, shape.guesses, shape.samples) == (2, 6, 2)


@pytest.mark.slow
def test_a_card_is_measured_and_simulated(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the grid to figures beside those of the real engine. How close they are is not judged here."""
    monkeypatch.setattr(step_costs.harness, "run_process", run_here)
    monkeypatch.setattr(step_scenes, "QUICK_GRID", TINY)
    monkeypatch.setattr(
        added, "server_time", lambda seconds: {"request": 1e-3, "engine_token": 1e-5, "api_token": 5e-5}
    )
    told = ["--quick", "--device", "cpu", "--repeats", "1", "--model", str(model), "--out", str(tmp_path)]
    command.main(["step_costs", *told])
    [path] = tmp_path.glob("*.json")
    card = Card.read(path)
    assert path.name == f"cpu.{model.name.lower()}.json" and card.residuals["median_percent"] < 100
    # Which of the terms gets the time is up to noise at this size: a term may be 0, and never all of them
    terms = card.time.device.values(), card.time.host.values(), (card.intake.request, card.intake.prompt_token)
    assert all(max(values) > 0 and min(values) >= 0 for values in map(list, terms))
    costs = load_costs(str(path), model)
    assert costs.measured and costs.device_seconds(StepShape(decodes=3, decode_keys=90, samples=3)) > 0

    simulated.main(
        [
            "--card",
            str(path),
            "--model",
            str(model),
            "--quick",
            "--only",
            "engine",
            "--only",
            "AsyncLLM",
            "--out",
            str(tmp_path),
        ]
    )
    rows = simulated.tables.load("serving_simulated", tmp_path)["rows"]
    assert [row["where"] for row in rows] == ["engine", "AsyncLLM"]
    for row in rows:
        assert row["simulated"].keys() == row["measured"].keys() == simulated.LABELS.keys()
        assert all(value > 0 for value in (*row["simulated"].values(), *row["measured"].values()))
    assert len(simulated.table({"serving_simulated": simulated.tables.load("serving_simulated", tmp_path)})) > 10


@pytest.mark.slow
def test_launching_belongs_to_the_step_that_is_launched() -> None:
    """While a step is launched kernel by kernel, nobody reads the result of the step before."""
    recordings = Recordings(decodes=(8,), prompts=(64,), max_sequences=9, max_operations=64.0, layer_operations=1.0)
    recorded = {"name": "a", "shape": [0, 0, 1, 64, 2080, 1, 0, 0, 64], "device": 0.001, "host": 0.002}
    launched = {**recorded, "shape": [0, 0, 1, 65, 2145, 1, 0, 0, 65]}
    assert step_costs.with_its_launches(recorded, recordings) == recorded
    assert step_costs.with_its_launches(launched, recordings) == {**launched, "device": 0.003, "host": None}
    assert step_costs.with_its_launches(launched, Recordings()) == launched  # nothing is recorded: as on a CPU


def test_a_step_that_no_card_can_compute_so_fast_is_left_out() -> None:
    [path] = CARDS.glob("h200.*.json")
    card = Card.read(path)
    shape = [0, 0, 1, 16_384, 2**27, 1, 0, 0, 16_384]
    points = [*card.points, {"name": "too fast", "shape": shape, "device": 0.01, "host": None}]
    again = step_costs.fitted(replace(card, points=points))
    assert again.residuals["left_out"] == [*card.residuals["left_out"], "too fast"]
    assert again.time == step_costs.fitted(card).time


def test_what_http_costs_is_measured() -> None:
    found = added.server_time(seconds=1)
    assert 0 < found["api_token"] < 0.01 and 0 < found["engine_step"] < 0.01 and 0 <= found["request"] < 0.1
    assert 0 <= found["engine_token"] < 1e-4 and 0 <= found["api_step"] < 0.01


def test_what_callers_of_async_llm_cost_is_measured() -> None:
    found = asyncio.run(added.async_time(number=5, num_tokens=200))
    assert 0 < found["engine_token"] < 0.01 and 0 <= found["engine_step"] < 0.01
    assert 0 < found["request"] < 0.1 and 0 <= found["api_step"] < 0.1 and 0 <= found["api_token"] < 0.01


def test_what_a_request_waits_for_is_measured_where_it_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its step, or between the end of its step and the caller."""
    check, hand_out = AsyncLLM.check, AsyncLLM._hand_out

    def slow_check(llm: AsyncLLM, *arguments: Any) -> Any:
        time.sleep(0.01)
        return check(llm, *arguments)

    def slow_hand_out(llm: AsyncLLM, outputs: list[RequestOutput]) -> None:
        time.sleep(0.03 * any(output.outputs[0].token_ids[1:] == [] for output in outputs))
        hand_out(llm, outputs)

    monkeypatch.setattr(AsyncLLM, "check", slow_check)
    monkeypatch.setattr(AsyncLLM, "_hand_out", slow_hand_out)
    found = asyncio.run(added.async_time(number=5, num_tokens=50))
    assert 0.01 <= found["request"] < 0.03 <= found["api_step"] + 12 * found["api_token"] < 0.1


def test_what_the_step_loop_waits_for_counts_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of callers, and though it takes no time of the CPU."""
    publish = AsyncLLM._publish

    def late(llm: AsyncLLM) -> None:
        time.sleep(0.002)
        publish(llm)

    monkeypatch.setattr(AsyncLLM, "_publish", late)
    found = asyncio.run(added.async_time(number=2, num_tokens=50))
    assert 0.0015 < found["engine_step"] < 0.02 and found["engine_token"] < 0.001


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'nanovllm[ray]'")
def test_what_ray_serve_adds_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replica is engine and server in one. So a token costs more there than in a server's engine. It costs less
    than a step of the story model, which is not computed here."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(mock.ROOT))
    found = added.ray_time(free_port(), seconds=1)
    assert 1e-4 < found["engine_token"] < 0.006 and 1e-4 < found["api_token"] < 0.1 and 1e-3 < found["request"] < 1


def test_replicas_of_ray_are_simulated_with_what_ray_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured only if somebody wants to know, for Ray takes a while to start."""
    measured, ports = {"request": 0.01, "engine_token": 0.002, "api_token": 0.001}, []

    async def async_time() -> dict[str, float]:
        return {}

    def ray_time(port: int, seconds: float) -> dict[str, float]:
        ports.append(port)
        return measured

    monkeypatch.setattr(added, "async_time", async_time)
    monkeypatch.setattr(added, "ray_time", ray_time)
    monkeypatch.setattr(added, "server_time", lambda seconds: {"request": 0.5})
    options = argparse.Namespace(
        device="cpu",
        model=mock.EMBEDDED_MODEL,
        port=1234,
        rates=[1.0],
        ray_rates=[2.0],
        only=["server"],
        fake_device=False,
    )
    [own] = simulated.settings(options)
    assert own.server == ServerTime(request=0.5) and not ports
    options.only = None
    *_, ray = simulated.settings(options)
    assert (ray.title, ray.rates, ray.replicas, ray.server) == (simulated.RAY, [2.0], 2, ServerTime(**measured))
    assert ports == [1234]

    figures = dict.fromkeys(simulated.LABELS, 1.0)
    row = {"where": ray.title, "rate": 2.0, "server": measured, "measured": figures, "simulated": figures}
    machine = {"device": "cpu", "processor": "any", "cores": 2, "torch": "any"}
    commit = {"hash": "any", "modified": False}
    result = {"rows": [row], "machine": machine, "commit": commit, "seconds": 1.0, "source": "any"}
    told = f"{ray.title} adds 10.0 ms to a request and 2.00 ms per token to a step"
    assert f"{told}." in "".join(simulated.table({"serving_simulated": result}))
    row["server"] = {**measured, "engine_step": 0.003}
    assert f"{told}, and 3.00 ms to each step." in "".join(simulated.table({"serving_simulated": result}))


def test_figures_of_answers() -> None:
    answers = [
        {"tokens": 3, "first": 0.1, "finished": True, "end": 2.0},
        {"tokens": 5, "first": 0.3, "finished": True, "end": 4.0},
    ]
    found = drive.figures(answers, [0.01, 0.02, 0.05])
    assert found == {"tokens_per_second": 2.0, "first_p50": 100, "first_p99": 300, "gap_p50": 20, "gap_p99": 50}
    with pytest.raises(RuntimeError, match="1 of 2 requests got no whole answer"):
        drive.figures([answers[0], {**answers[1], "finished": False}], [])


def test_arrivals_are_the_same_for_everybody() -> None:
    asked = drive.arrivals(50.0, 4.0, 1)
    assert asked == drive.arrivals(50.0, 4.0, 1) and 150 < len(asked) < 250
    assert [one.time for one in asked] == sorted(one.time for one in asked)


def test_a_mixture_of_experts_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is started."""
    model = lively_qwen3_moe(tmp_path)
    with pytest.raises(SystemExit, match="not complete: step_costs"):
        command.main(["step_costs", "--quick", "--model", str(model), "--out", str(tmp_path)])
    assert "is a mixture of experts; measure a model without experts" in capsys.readouterr().out
