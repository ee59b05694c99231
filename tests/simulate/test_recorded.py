"""The simulation beside what the benchmarks have recorded on an H200."""

from pathlib import Path

import pytest

from benchmarks.engine import simulated
from benchmarks.lib import harness, tables
from nanovllm.simulate.costs import CARDS, Card, StepShape, load_costs
from nanovllm.simulate.needs import Needs

RUNS = {run.contender if run.result in ("mixed", "tensor_parallel") else run.result: run for run in simulated.RUNS}


def rows_of(*names: str) -> dict[tuple[str, str], float]:
    """How far each metric is off, in percent."""
    rows = simulated.compare("h200", harness.RESULTS, [RUNS[name] for name in names])
    return {(row["scenario"], row["metric"]): simulated.off_by(row) for row in rows}


def test_small_batches_and_gaps_beside_long_prompts() -> None:
    found = rows_of("latency") | rows_of("default budget")
    times = {key: off for key, off in found.items() if key[1] in ("ms_per_token", "gap_p50_ms")}
    assert len(times) == 4 and all(abs(off) < 5 for off in times.values()), times
    others = {key: off for key, off in found.items() if key not in times}
    assert len(others) == 5 and all(abs(off) < 20 for off in others.values()), others


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
    assert card.time.device["step"] > needs.weight_bytes / read
    assert card.time.device["decode_key"] >= 0.999 * needs.key_bytes / read
    assert card.time.device["token_beyond_knee"] >= 0.999 * needs.token_operations / done
    assert card.residuals["median_percent"] < 5
