"""The simulation beside what the benchmarks have recorded on an H200."""

import json
from pathlib import Path

import pytest

from benchmarks.engine import SHAPE, simulated, step_costs
from benchmarks.lib import harness, tables
from benchmarks.serving import drive
from benchmarks.serving import simulated as serving_simulated
from nanovllm.config import EngineConfig
from nanovllm.simulate.costs import CARDS, Card, ServerTime, StepShape, load_costs
from nanovllm.simulate.needs import Needs

RUNS = {run.contender if run.result in ("mixed", "tensor_parallel") else run.result: run for run in simulated.RUNS}


def rows_of(*names: str) -> dict[tuple[str, str], float]:
    """How far each metric is off, in percent."""
    rows = simulated.compare("h200", harness.RESULTS, [RUNS[name] for name in names])
    return {(row["scenario"], row["metric"]): simulated.off_by(row) for row in rows}


def test_small_batches_and_gaps_beside_long_prompts() -> None:
    """The card is of commit 9e5f456, the records are of efe93a1 (small batches) and 9172c4c. Since then decodes have
    become up to a tenth quicker, and the first tokens of small batches quicker by more than that. None has become
    slower."""
    small, mixed = rows_of("latency"), rows_of("default budget")
    times = {key: off for key, off in (small | mixed).items() if key[1] in ("ms_per_token", "gap_p50_ms")}
    assert len(times) == 4 and all(-12 < off < 5 for off in times.values()), times
    assert abs(times["batch 8", "ms_per_token"]) < 5
    firsts = [small[f"batch {batch}", "first_token_ms"] for batch in (1, 8, 32)]
    assert all(-40 < off < 20 for off in firsts) and abs(firsts[-1]) < 20, firsts
    others = {key: off for key, off in mixed.items() if key not in times}
    assert len(others) == 2 and all(abs(off) < 20 for off in others.values()), others


@pytest.mark.parametrize(
    ("rate", "tokens_per_second", "gap"), [(8, 1524.2, 0.573), (32, 5966.1, 0.639), (64, 12271, 0.825)]
)
def test_gaps_of_async_llm(rate: int, tokens_per_second: float, gap: float, tmp_path: Path) -> None:
    """Beside `python -m benchmarks.serving.simulated --only AsyncLLM` on an H200, at the card's own commit. With more
    than 64 requests a second the callers count as well. Their time on that machine is not known."""
    config = json.loads((SHAPE / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 49_152}))
    costs = load_costs("h200", tmp_path)
    options = EngineConfig(num_kv_blocks=4000, kvcache_block_size=256, max_model_len=4096, async_scheduling=True)
    resolved = options.resolve(on_gpu=True, model_max_len=4096)
    found = serving_simulated.simulate(costs, drive.arrivals(rate, 30, 1, gpu=True), resolved, 1, ServerTime())
    assert found["tokens_per_second"] == pytest.approx(tokens_per_second, rel=0.05)
    assert found["gap_p50"] == pytest.approx(gap, rel=0.1)


@pytest.mark.slow
def test_the_headline() -> None:
    [off] = rows_of("throughput").values()
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


@pytest.mark.parametrize("path", sorted(CARDS.glob("*.json")), ids=lambda path: path.name)
def test_a_card_has_the_factors_that_its_points_give(path: Path) -> None:
    card = Card.read(path)
    again = step_costs.fitted(card).time
    assert again.recordings == card.time.recordings
    for point in card.points:
        shape = StepShape(*point["shape"])
        assert again.device_seconds(shape) == pytest.approx(point["fitted"], rel=0.01)
        assert again.host_seconds(shape) == pytest.approx(card.time.host_seconds(shape), rel=0.01)
