"""The simulation beside what the benchmarks have recorded on an H200."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import SHAPE, simulated, step_costs
from benchmarks.lib import harness, tables
from benchmarks.serving import drive
from benchmarks.serving import simulated as serving_simulated
from nanovllm.config import EngineConfig
from nanovllm.simulate.costs import CARDS, Card, IntakeTime, ServerTime, StepShape, load_costs
from nanovllm.simulate.needs import Needs

CARD = Card.read(CARDS / "h200.qwen3-0.6b.json")
RUNS = {(run.result, run.contender): run for run in simulated.RUNS}


def rows_of(*runs: simulated.Compared) -> dict[tuple[str, str], float]:
    """How far each metric is off, in percent."""
    rows = simulated.compare("h200", harness.RESULTS, runs)
    return {(row["scenario"], row["metric"]): simulated.off_by(row) for row in rows}


def test_small_batches_and_gaps_beside_long_prompts() -> None:
    small, mixed = rows_of(RUNS["latency", "nanovllm"]), rows_of(RUNS["mixed", "default budget"])
    for (scenario, metric), off in (small | mixed).items():
        is_time = metric in ("ms_per_token", "gap_p50_ms")
        assert abs(off) < (5 if is_time else 20), (scenario, metric, off)
    assert len(small) == 6 and len(mixed) == 3


def test_a_shared_prefix() -> None:
    """If the keys that are shared were read from memory, decodes would take nearly twice as long. "All at once" some
    sequences have keys of their own, which are read from memory while the shared ones come from the cache."""
    found = rows_of(RUNS["prefix", "nanovllm"])
    rates = [off for (_, metric), off in found.items() if metric == "requests_per_second"]
    assert len(rates) == 2 and all(abs(off) < 5 for off in rates), found


SERVED = tables.load("serving_simulated.h200", harness.RESULTS)


@pytest.mark.parametrize("row", SERVED["rows"], ids=lambda row: f"{row['where']} {row['rate']:g}")
def test_callers_and_clients(row: dict[str, Any], tmp_path: Path) -> None:
    """Beside a run of `benchmarks.serving.simulated`, whose commit has the card's engine, but other callers."""
    measured = row["measured"]
    config = json.loads((SHAPE / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 49_152}))
    costs = load_costs("h200", tmp_path)
    options = EngineConfig(num_kv_blocks=4000, kvcache_block_size=256, max_model_len=4096, async_scheduling=True)
    resolved = options.resolve(on_gpu=True, model_max_len=4096)
    asked = drive.arrivals(row["rate"], SERVED["seconds"], 1, gpu=True)
    found = serving_simulated.simulate(costs, asked, resolved, 1, ServerTime(**row["server"]))
    assert found["tokens_per_second"] == pytest.approx(measured["tokens_per_second"], rel=0.05)
    assert found["gap_p50"] == pytest.approx(measured["gap_p50"], rel=0.1)
    assert found["first_p50"] == pytest.approx(measured["first_p50"], rel=0.16)


def test_a_call_takes_time_beside_its_steps() -> None:
    costs = load_costs("h200", SHAPE)

    def seconds(intake: IntakeTime) -> float:
        return simulated.VirtualEngine(costs, 10_000, intake).timed([[n] * 10 for n in range(3)], [2] * 3)

    assert seconds(IntakeTime(call=1.0, answer=0.1)) == pytest.approx(seconds(IntakeTime()) + 1.3)


@pytest.mark.slow
def test_uses_that_the_fit_has_not_seen() -> None:
    """Short chats, long documents, several choices, and contexts of 32,000 tokens."""
    found = rows_of(RUNS["uses", "nanovllm"])
    assert len(found) == 7
    assert all(abs(off) < (5 if metric == "requests_per_second" else 10) for (_, metric), off in found.items()), found


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Llama-3.2-1B", "Qwen2.5-7B"])
def test_the_headline_of_models_that_were_not_measured(model: str) -> None:
    off = rows_of(RUNS[f"shape.{model}", "nanovllm"])["headline", "tokens_per_second"]
    assert abs(off) < 10


@pytest.mark.slow
def test_the_headline() -> None:
    [off] = rows_of(RUNS["throughput", "nanovllm"]).values()
    assert abs(off) < 5


def test_a_model_that_was_not_measured() -> None:
    """An 8B model on one, two and four ranks, from what a model a fourteenth as large takes."""
    for ranks, contender in (1, "nanovllm, 1 rank"), (2, "nanovllm, 2 ranks"), (4, "nanovllm, 4 ranks"):
        record = tables.figures(tables.load("tensor_parallel.h200", harness.RESULTS))
        costs = load_costs("h200", simulated.LARGE_SHAPE, ranks)
        assert not costs.measured
        for batch in (1, 32):
            ms = 1e3 * costs.device_seconds(StepShape(decodes=batch, decode_keys=256 * batch, samples=batch))
            assert ms == pytest.approx(record[f"ms_per_token_{batch}"]["values"][contender]["median"], rel=0.25)


@pytest.mark.parametrize("path", sorted(CARDS.glob("*.json")), ids=lambda path: path.name)
def test_no_card_is_faster_than_its_memory_and_its_products(path: Path) -> None:
    card = Card.read(path)
    needs, rates = Needs(card.architecture, card.itemsize), card.rates
    read, done = rates["bytes_per_second"], rates["operations_per_second"]
    (first, seconds), (few, less), (many, more) = card.time.table[0], *card.time.table[-2:]
    assert first == 1 and seconds > needs.weight_bytes / read
    assert card.time.device["decode_key"] >= 0.999 * needs.key_bytes / read
    assert card.time.device["prompt_pair"] >= 0.999 * needs.pair_operations / done
    assert more - less >= 0.999 * (many - few) * needs.token_operations / done
    assert card.residuals["median_percent"] < 3 and card.residuals["worst_percent"] < 25
    # Tiles of queries are filled differently by prompts of different lengths, which no count says
    assert card.residuals.get("prompts behind what they share", {"worst_percent": 0})["worst_percent"] < 30


@pytest.mark.parametrize("path", sorted(CARDS.glob("*.json")), ids=lambda path: path.name)
def test_a_card_has_the_factors_that_its_points_give(path: Path) -> None:
    card = Card.read(path)
    again = step_costs.fitted(card).time
    assert again.recordings == card.time.recordings
    for point in card.points:
        shape = StepShape(*point["shape"])
        assert card.time.device_seconds(shape) == pytest.approx(point["fitted"], rel=1e-6)
        assert again.device_seconds(shape) == pytest.approx(point["fitted"], rel=0.01)
        assert again.host_seconds(shape) == pytest.approx(card.time.host_seconds(shape), rel=0.01)
