"""Measurements and the tables made from them. Times are never judged here: a busy machine turns no test red."""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib import harness, process, report, tables
from benchmarks.lib.workloads import Request, Scenario, make_requests
from benchmarks.stages import runners, stage_bench
from benchmarks.stages.runners import stage_contender
from benchmarks.stages.showcases import OTHERS, SHOWCASES
from stages.manifest import load_stages
from tests.weights import VOCAB, lively_qwen3

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_qwen3(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def options(out: Path, model: Path, **changes: Any) -> argparse.Namespace:
    given = {"out": out, "model": model, "device": "cpu", "threads": 1, "rounds": 1, "quick": True}
    given["impl"] = "stages"
    return argparse.Namespace(**given | changes)


def in_this_process(contender: harness.Contender, *work: Any) -> dict[str, Any]:
    """Stands in for `run_process`."""
    return json.loads(json.dumps(process.run(json.loads(json.dumps(harness.job_of(contender, *work))))))


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a quick result of every showcase, each run in this process."""
    directory = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "run_process", in_this_process)
        for build in [*SHOWCASES.values(), OTHERS["ladder"]]:
            stage_bench.measure(build(VOCAB, quick=True), options(directory, model))
    return directory


# --- showcases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*(f"stage_{n}" for n in SHOWCASES), "ladder"])
def test_a_quick_showcase_is_complete(name: str, results: Path) -> None:
    result = tables.load(name, results)
    assert result["machine"]["threads"] >= 1 and result["commit"]["hash"]
    assert not result["differing_tokens"], "greedy tokens in float32 are the same from everybody"
    figures = {figure["key"]: figure for figure in result["figures"]}
    assert set(result["shown"]) <= figures.keys() and result["headline"] in result["shown"]
    for key in result["shown"]:
        assert {result["contender"], result["rival"]} <= figures[key]["values"].keys()
    assert any(name.startswith("HF") for name in figures[result["headline"]]["values"])
    assert harness.headline_gain(result) > 0
    text = json.dumps(result)
    assert str(ROOT) not in text and str(Path.home()) not in text


def test_every_stage_that_exists_has_a_showcase() -> None:
    assert set(SHOWCASES) >= {stage.number for stage in load_stages() if stage.number <= 6}


def test_paged_blocks_hold_more_and_waste_less(results: Path) -> None:
    """Counts do not depend on the machine, so these are judged."""
    figures = {f["key"]: f["values"] for f in tables.load("stage_3", results)["figures"]}
    assert figures["at_once"]["stage 3"]["median"] > figures["at_once"]["stage 2"]["median"]
    assert figures["waste"]["stage 3"]["median"] < figures["waste"]["stage 2"]["median"]


def test_prefix_caching_stores_the_shared_beginning_once(results: Path) -> None:
    figures = {f["key"]: f["values"] for f in tables.load("stage_4", results)["figures"]}
    assert figures["slots"]["stage 4"]["median"] < figures["slots"]["stage 3"]["median"] * 0.75


def test_the_tiny_pool_of_stage_5_is_survived(results: Path) -> None:
    figures = {f["key"]: f["values"] for f in tables.load("stage_5", results)["figures"]}
    assert figures["survived"]["stage 5"]["median"] == 1
    assert figures["preemptions"]["stage 5"]["median"] > 0


# --- harness ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_round_starts_with_another_contender_and_each_process_is_fresh(model: Path, tmp_path: Path) -> None:
    scenario = Scenario("short", [make_requests([(8, 3), (5, 2)], VOCAB, seed=1)])
    throughput = harness.Figure("f", "throughput", "tokens/s", "higher", harness.metric("short", "tokens_per_second"))
    stages = [stage_contender(2), stage_contender(3)]
    showcase = harness.Showcase("s", "", "", stages, [throughput], scenarios=[scenario])
    result = stage_bench.measure(showcase, options(tmp_path, model, rounds=2))
    records = result["rounds"]
    assert [(r["round"], r["contender"]) for r in records] == [
        (0, "stage 2"),
        (0, "stage 3"),
        (1, "stage 3"),
        (1, "stage 2"),
    ]
    assert len({r["pid"] for r in records}) == 4
    assert result["machine"]["threads"] == 1
    [figure] = result["figures"]
    for name, value in figure["values"].items():
        mine = [r["scenarios"]["short"]["tokens_per_second"] for r in records if r["contender"] == name]
        assert (value["min"], value["max"]) == (min(mine), max(mine))
    assert harness.differing_tokens(records) == {}
    records[1]["scenarios"]["short"]["tokens_digest"] = "other"
    records[2]["scenarios"]["short"]["tokens_digest"] = "other"
    assert harness.differing_tokens(records)["short"]


def test_a_contender_that_fails_says_why(tmp_path: Path) -> None:
    chosen = options(tmp_path, tmp_path / "nothing")
    scenarios = [asdict(Scenario("short", [[Request([1], 1)]]))]
    arguments = {"model": str(chosen.model), "device": "cpu", "clock": "wall", "scenarios": scenarios}
    with pytest.raises(RuntimeError, match=r"stage 2 failed(.|\n)*ValueError: model="):
        harness.run_process(stage_contender(2), runners.measure, arguments, chosen)


def test_rotation_gives_everybody_the_first_place() -> None:
    contenders = [stage_contender(n) for n in (1, 2, 3)]
    firsts = [harness.order_of_round(contenders, n)[0].name for n in range(3)]
    assert sorted(firsts) == ["stage 1", "stage 2", "stage 3"]


def test_results_of_a_card_have_its_name() -> None:
    directory = Path("results")
    assert harness.result_path("stage_3", "cpu", directory) == directory / "stage_3.json"
    assert harness.result_path("stage_3", "NVIDIA H100 80GB HBM3", directory) == directory / "stage_3.h100.json"
    assert harness.result_path("s", "NVIDIA GeForce RTX 4070 Laptop GPU", directory) == directory / "s.4070.json"


def test_gain_counts_in_the_direction_that_is_better() -> None:
    values = {"a": {"median": 2.0}, "b": {"median": 4.0}}
    assert tables.gain({"better": "higher", "values": values}, "b", "a") == 2
    assert tables.gain({"better": "lower", "values": values}, "b", "a") == 0.5


# --- tables ----------------------------------------------------------------------------------------------------------


def page(*names: str) -> str:
    return "# Title\n" + "".join(f"\n<!-- generated: {name} -->\n<!-- end generated -->\n" for name in names)


@pytest.fixture
def site(tmp_path: Path, results: Path) -> Path:
    """A project whose README and docs have every kind of table, all up to date."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(report.regenerate(page("stages", "ladder"), results))
    (tmp_path / "docs" / "results.md").write_text(report.regenerate(page("stage_3"), results))
    return tmp_path


def test_tables_are_made_once_and_stay(site: Path, results: Path) -> None:
    text = (site / "README.md").read_text()
    assert "5. Continuous batching" in text and "stage 4: prefix caching" in text
    assert report.stale_pages(site, results) == []


def test_a_figure_edited_by_hand_is_found(site: Path, results: Path) -> None:
    for path in (site / "README.md", site / "docs" / "results.md"):
        good = path.read_text()
        numbers = [i for i, c in enumerate(good) if c.isdigit() and good.rfind("|", 0, i) > good.rfind("\n", 0, i)]
        for position in numbers[:: max(1, len(numbers) // 10)]:
            digit = "1" if good[position] != "1" else "2"
            path.write_text(good[:position] + digit + good[position + 1 :])
            assert report.stale_pages(site, results) == [path]
        path.write_text(good)
    assert report.stale_pages(site, results) == []


def test_a_new_measurement_makes_a_table_stale(site: Path, results: Path, tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    for path in results.iterdir():
        result = json.loads(path.read_text())
        if result["name"] == "stage_3":
            result["figures"][0]["values"]["stage 3"]["median"] += 100
        (fresh / path.name).write_text(json.dumps(result))
    assert len(report.stale_pages(site, fresh)) == 2


def test_a_table_of_what_was_not_measured_is_an_error(tmp_path: Path) -> None:
    for name in ("stages", "ladder", "stage_3"):
        with pytest.raises(ValueError, match=r"measured|benchmark"):
            report.table(name, tmp_path)


def test_the_tables_of_this_project_are_what_its_results_say() -> None:
    assert report.stale_pages(ROOT, harness.RESULTS) == []


def test_recorded_results_name_no_place() -> None:
    for path in harness.RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        if "model" in result:  # kernels have none
            assert not result["model"]["name"].startswith(("/", "~")), path.name
        assert "hostname" not in path.read_text(), path.name


def test_a_loss_is_told(results: Path) -> None:
    result = copy.deepcopy(tables.load("stage_3", results))
    equal = next(f for f in result["figures"] if f["key"] == "equal")
    equal["values"]["stage 2"]["median"], equal["values"]["stage 3"]["median"] = 100.0, 80.0
    assert tables.losses(result)[-1].startswith("stage 3 loses 20% against stage 2")
    assert "loses 20%" in "".join(stage_bench.whole_table(result))


def test_numbers_have_few_digits() -> None:
    shown = [tables.number(v, "ms") for v in (1234.5, 123.4, 12.34, 1.234)]
    assert shown == ["1,234", "123", "12.3", "1.23"]
    assert [tables.number(1.0, "yes/no"), tables.number(3.0, "")] == ["yes", "3"]


# --- commands --------------------------------------------------------------------------------------------------------


def fake_process(results: Path, stage: int, factor: float = 1.0) -> Any:
    """Stands in for `run_process`: what was measured in the fixture, with the time of the showcased stage stretched."""
    recorded = tables.load(f"stage_{stage}", results)
    pids = itertools.count()

    def run_process(contender: harness.Contender, *_: Any) -> dict[str, Any]:
        scenarios = next(copy.deepcopy(r["scenarios"]) for r in recorded["rounds"] if r["contender"] == contender.name)
        for measured in scenarios.values():
            measured["ttft_ms"] = 10 * factor if contender.name == recorded["contender"] else 50.0
        facts = {**recorded["machine"], "clock": "cpu"}
        return {"pid": next(pids), "facts": facts, "repetitions": [scenarios]}

    return run_process


def test_stage_bench_writes_what_it_prints(
    model: Path, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "run_process", fake_process(results, 4))
    command = ["bench", "4", "--quick", "--rounds", "2", "--model", str(model), "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", command)
    stage_bench.main()
    written = tables.load("stage_4", tmp_path)
    assert [r["contender"] for r in written["rounds"]] == [
        *("stage 3", "stage 4", "HF generate"),
        *("stage 4", "HF generate", "stage 3"),
    ]
    assert "5.00 times better than stage 3" in " ".join(capsys.readouterr().out.split())
    turned_round = written | {"contender": "stage 3", "rival": "stage 4"}
    assert tables.remarks(turned_round)[0].endswith("stage 3 is not better than stage 4")
    # The check measures again: the same holds, a stage twice as slow does not
    monkeypatch.setattr("sys.argv", [*command, "--check"])
    stage_bench.main()
    monkeypatch.setattr(harness, "run_process", fake_process(results, 4, factor=2))
    with pytest.raises(SystemExit, match="stage 4: the recorded gain is not borne out"):
        stage_bench.main()
    assert tables.load("stage_4", tmp_path) == written


def test_the_check_has_a_stated_tolerance() -> None:
    assert stage_bench.holds(3.0, 4.0) and stage_bench.holds(9.0, 4.0)
    assert not stage_bench.holds(2.7, 4.0)
    assert not stage_bench.holds(0.99, 1.2), "a stage that lost its gain has failed, whatever the tolerance"


def test_the_ladder_is_drawn(results: Path, tmp_path: Path) -> None:
    stage_bench.draw(tables.load("ladder", results), tmp_path / "figures" / "ladder.png")
    drawn = (tmp_path / "figures" / "ladder.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    stage_bench.draw(tables.load("ladder", results), tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes() == drawn


def test_a_showcase_that_needs_a_gpu_is_only_tried_out_without_one(
    model: Path, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "run_process", fake_process(results, 6))
    command = ["bench", "6", "--rounds", "1", "--model", str(model), "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", command)
    stage_bench.main()  # lost or won, it is no failure
    out = " ".join(capsys.readouterr().out.split())
    assert "The showcase of stage 6 needs a GPU" in out and "a quick run: these figures mean nothing" in out
    monkeypatch.setattr(stage_bench, "random_checkpoint", lambda shape: Path(f"random {shape}"))
    monkeypatch.setattr(stage_bench, "vocab_size", lambda model: VOCAB)
    monkeypatch.setattr(stage_bench, "measure", lambda showcase, chosen: {"model": chosen.model, "quick": chosen.quick})
    monkeypatch.setattr(stage_bench, "misses", lambda result: ["lost"])
    for given, taken in ((harness.EMBEDDED_MODEL, Path("random Qwen3-0.6B")), (model, model)):
        chosen = argparse.Namespace(device="cuda", model=given, quick=False, impl="stages")
        assert stage_bench.run("6", chosen) == ({"model": taken, "quick": False}, ["lost"])


def test_no_checkpoint_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no checkpoint in it"):
        stage_bench.vocab_size(tmp_path)
