"""The engine's benchmarks, run on a CPU at a tiny size, and the arithmetic behind them. Times are never judged here."""

import argparse
import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import __main__ as command
from benchmarks.engine import ablations, speculation, speed, steps, structured
from benchmarks.lib import harness, process, report, tables, workloads
from benchmarks.lib.harness import RESULTS, Contender, Measure
from benchmarks.stages import stage_bench
from benchmarks.stages.showcases import ENGINE, TARGETS, engine_cpu, engine_cpu_smollm2
from nanovllm import kernels
from nanovllm.graphs.sizes import MAX_REPLAYED
from tests.weights import VOCAB, lively_qwen3

NAMES = (
    *("throughput", "sampling", "structured", "latency", "startup", "prefix", "mixed", "idle", "phases", "quantised"),
    *("kv_cache", "experts", "ablations", "speculation", "uses", "shape"),
)
QUICK = ["--quick", "--device", "cpu", "--rounds", "1", "--repeats", "1"]


# --- every benchmark from end to end ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_qwen3(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what every command wrote, each run as with `--quick`, in this process."""
    directory = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "run_process", run_here)
        patch.setattr(speed, "import_once", lambda contender: None)
        told = [*QUICK, "--model", str(model), "--out", str(directory)]
        # Patches would stay in this process, so of the ablations only options are tried
        some = ["--only", ablations.BASE, "--only", "no prefix cache", "--only", "flash_attn"]
        with pytest.raises(SystemExit, match="not complete: ablations"):
            command.main(["ablations", *told, *some])
        command.main([*(name for name in NAMES if name not in ("ablations", "structured")), *told])
        command.main(["structured", *QUICK, "--out", str(directory)])  # it needs a tokenizer, so the embedded model
    return directory


def run_here(
    contender: Contender, measure: Measure, arguments: dict[str, Any], options: argparse.Namespace, *_: Any
) -> dict[str, Any]:
    job = harness.job_of(contender, measure, arguments, options)
    try:
        return json.loads(json.dumps(process.run(json.loads(json.dumps(job)))))
    except ValueError as error:  # which would end a process of its own
        raise RuntimeError(str(error)) from error


@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_is_complete(name: str, results: Path) -> None:
    result = json.loads((results / f"{name}.json").read_text())
    assert result["name"] == name and result["machine"]["device"] == "cpu" and result["commit"]["hash"]
    shown = {figure["key"] for figure in result["figures"]}
    assert result["headline"] in result["shown"] and set(result["shown"]) <= shown
    for figure in result["figures"]:
        assert result["contender"] in figure["values"]
        assert all(value["min"] <= value["median"] <= value["max"] for value in figure["values"].values())
    text = json.dumps(result["rounds"])
    assert str(harness.ROOT) not in text and str(Path.home()) not in text


def figures_of(name: str, results: Path) -> dict[str, dict[str, dict[str, float]]]:
    return {f["key"]: f["values"] for f in json.loads((results / f"{name}.json").read_text())["figures"]}


def test_the_share_is_of_the_limit_of_the_same_run(results: Path) -> None:
    result = json.loads((results / "throughput.json").read_text())
    figures = figures_of("throughput", results)
    expected = 100 * figures["throughput"]["nanovllm"]["median"] / result["roofline"]["tokens_per_second"]
    assert figures["share"]["nanovllm"]["median"] == pytest.approx(expected)


def test_every_kind_of_sampling_is_measured_alone_and_in_small_batches(results: Path) -> None:
    found = figures_of("sampling", results)
    assert set(found) == {f"{key}{batch}" for key in speed.KINDS for batch in ("", "_1", "_2")}
    assert all(found[key]["nanovllm"]["median"] > 0 for key in speed.KINDS)


def test_an_output_that_is_not_what_the_schema_says_is_seen() -> None:
    author = {"name": "Nell", "city": ""}
    right = {"title": "a", "kind": "poem", "pages": 9, "author": author, "chapters": ["b"] * 3, "tags": []}
    assert structured.is_valid(json.dumps(right))
    wrong: list[dict[str, Any]] = [
        {"kind": "song"},
        {"pages": 0},
        {"chapters": ["b"] * 2},
        {"tags": ["c" * 25]},
        {"x": 1},
    ]
    assert not any(structured.is_valid(json.dumps(right | change)) for change in wrong)


def test_every_step_of_the_headline_is_of_one_kind(results: Path) -> None:
    result = json.loads((results / "phases.json").read_text())
    values = {k: v["nanovllm"]["median"] for k, v in figures_of("phases", results).items()}
    decodes = sum(values[f"steps, {kind}"] for kind in steps.KINDS if kind != steps.PROMPTS)
    _, max_tokens = workloads.headline(0, workloads.QUICK)
    assert decodes == max(max_tokens) - 1 and values[f"steps, {steps.PROMPTS}"] == 1
    least = sum(values[f"least_seconds, {kind}"] for kind in steps.KINDS)
    assert least == pytest.approx(result["roofline"]["seconds"])
    (results / "phases.h100.json").write_text(json.dumps(result))
    lines = report.table("phases.h100", results).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| with prompts", "| decode, 1 to 32", "| all"]


def test_a_variant_that_cannot_run_is_named(results: Path) -> None:
    result = json.loads((results / "ablations.json").read_text())
    assert result["failures"].keys() == {"flash_attn"} and "GPU" in result["failures"]["flash_attn"]
    assert result["figures"][0]["values"].keys() == {ablations.BASE, "no prefix cache"}


def test_the_trace_is_kept_beside_the_figures(results: Path) -> None:
    with gzip.open(results / "trace_nanovllm.json.gz") as file:
        events = json.load(file)["traceEvents"]
    marks = [e for e in events if e.get("name") == steps.MARK and e.get("cat") == "user_annotation"]
    assert len(marks) == steps.QUICK_DECODES["steps"]
    figures = figures_of("idle", results)
    parts = sum(figures[k]["nanovllm"]["median"] for k in ("idle_between_percent", "idle_inside_percent"))
    assert 0 < parts < 100


def test_guesses_are_as_good_as_was_chosen_and_who_loses_is_found(results: Path) -> None:
    result = tables.load("speculation", results)
    assert speculation.loses_from(result).keys() == speculation.WAYS.keys()
    wrong = {name: {"acceptance": way["acceptance"] - 0.4} for name, way in speculation.WAYS.items()}
    assert len(speculation.misses(result, wrong)) == len(wrong)
    assert tables.load("speculation_ngram", results)["headline"] == "ms_per_token_1"

    def figure(batch: int, **ms: float) -> dict[str, Any]:
        return {"key": f"ms_per_token_{batch}", "values": {name: {"median": value} for name, value in ms.items()}}

    figures = [figure(1, none=2, a=1, b=3, c=1), figure(2, none=2, a=2, b=1, c=1), figure(4, none=2, a=3, b=3, c=1)]
    assert speculation.loses_from({"figures": figures}) == {"a": 2, "b": 4, "c": None}


def test_on_an_h200_guessing_loses_only_where_steps_are_not_replayed() -> None:
    """As docs/speculation.md says under the table: such steps wait for launches, and twice the tokens take hardly
    longer."""
    figures = figures_of("speculation.h200", RESULTS)
    times = {int(k.rpartition("_")[2]): values for k, values in figures.items() if "ms_per_token" in k}
    for batch, values in times.items():
        for name, way in speculation.WAYS.items():
            lost = values[name]["median"] > values[speculation.NONE]["median"]
            assert not lost or batch * (1 + way["k"]) > MAX_REPLAYED, (batch, name)
    assert MAX_REPLAYED < 32 * 9
    for name in "k=8 at 0.6", "k=8 at 0.8":
        assert times[64][name]["median"] < 1.3 * times[32][name]["median"]


ABLATE = """
import json
from nanovllm import kernels
from benchmarks.engine.ablations import BASE, VARIANTS
fields = kernels.FusedKernels._fields
gone = {}
for name, variant in VARIANTS.items():
    if variant.patches:
        kernels.fused_kernels = lambda device: kernels.FusedKernels(*fields)
        for patch in variant.patches:
            patch()
        gone[name] = [field for field, kernel in kernels.fused_kernels(None)._asdict().items() if kernel is None]
print(json.dumps(gone))
"""


@pytest.mark.slow
def test_every_fused_kernel_has_its_ablation_and_every_patch_still_fits() -> None:
    """A patch that names something that is not there any more fails, here as on a GPU."""
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-c", ABLATE], capture_output=True, text=True, cwd=harness.ROOT)
    assert done.returncode == 0, done.stderr
    gone = [set(fields) for fields in json.loads(done.stdout).values()]
    fields = set(kernels.FusedKernels._fields)
    assert all(set(names) in gone for names in ablations.FUSED.values()) and fields in gone
    elsewhere = {
        "route",
        "grouped_mlp",
        "fp8_linear",
        "gelu_and_mul",
    }  # the ablations' model has nothing of these kinds
    assert {name for names in ablations.FUSED.values() for name in names} == fields - elsewhere


def test_an_ablation_adds_to_what_an_earlier_run_has_written(
    results: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.loads((results / "ablations.json").read_text())
    (tmp_path / "ablations.json").write_text(json.dumps(before))
    monkeypatch.setattr(harness, "run_process", run_here)
    told = ["--model", str(model), "--out", str(tmp_path), "--only", "blocks of 16"]
    command.main(["ablations", *QUICK, *told])
    after = json.loads((tmp_path / "ablations.json").read_text())
    values, added = (result["figures"][0]["values"] for result in (before, after))
    assert values == {name: value for name, value in added.items() if name != "blocks of 16"} != added
    assert after["failures"] == before["failures"]
    with pytest.raises(SystemExit, match="not complete: ablations"):
        command.main(["ablations", *QUICK, *told[:-1], "blocks of 61"])
    assert json.loads((tmp_path / "ablations.json").read_text()) == after


# --- the CPU table ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpu_results(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both models' results, from one small model in this process."""
    directory = tmp_path_factory.mktemp("cpu")
    options = argparse.Namespace(
        out=directory, model=model, device="cpu", threads=1, rounds=1, quick=True, impl="stages"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "run_process", run_here)
        for build in (engine_cpu, engine_cpu_smollm2):
            stage_bench.measure(build(VOCAB, quick=True), options)
    return directory


def test_the_engine_gives_hugging_faces_tokens_in_the_cpu_benchmark(cpu_results: Path) -> None:
    result = tables.load("engine_cpu", cpu_results)
    assert result["differing_tokens"] == {}
    for figure in result["figures"]:
        rival, _ = TARGETS[figure["key"]]
        assert {ENGINE, rival} <= figure["values"].keys()
    assert all(r["scenarios"]["one"]["ttft_ms"] > 0 for r in result["rounds"] if r["contender"] == ENGINE)


# --- tables and the check --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(results: Path, cpu_results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same results under the names that they have when they come from a card."""
    directory = tmp_path_factory.mktemp("recorded")
    for path in results.glob("*.json"):
        (directory / f"{path.stem}.h100.json").write_text(path.read_text())
    for path in cpu_results.iterdir():
        (directory / path.name).write_text(path.read_text())
    return directory


TABLES = ["engine.h100", "ablations.h100", "prefix.h100", "mixed.h100", "speculation.h100", "engine_cpu"]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_made_from_its_results_and_a_figure_edited_by_hand_is_found(
    name: str, recorded: Path, tmp_path: Path
) -> None:
    page = tmp_path / "README.md"
    page.write_text(report.regenerate(f"\n<!-- generated: {name} -->\n<!-- end generated -->\n", recorded))
    good = page.read_text()
    assert report.stale_pages(tmp_path, recorded) == [] and "Measured on" in good
    figures = [m.start() for m in re.finditer(r"(?<=\| )\d", good)]
    assert figures
    for position in figures:
        page.write_text(good[:position] + ("1" if good[position] != "1" else "2") + good[position + 1 :])
        assert report.stale_pages(tmp_path, recorded) == [page]


@pytest.mark.parametrize("name", TABLES)
def test_what_was_not_measured_has_no_table(name: str, tmp_path: Path) -> None:
    assert report.table(name, tmp_path) == ""


def test_the_engines_table_has_vllm_and_the_spread(recorded: Path, tmp_path: Path) -> None:
    result = json.loads((recorded / "throughput.h100.json").read_text())
    ours, theirs = {"median": 300.0, "min": 290.0, "max": 310.0}, {"median": 150.0, "min": 150.0, "max": 150.0}
    result["figures"][0]["values"] = {"nanovllm": ours, "vLLM": theirs}
    (tmp_path / "throughput.h100.json").write_text(json.dumps(result))
    lines = report.table("engine.h100", tmp_path).splitlines()
    assert "| throughput (tokens/s) | 300 (290 to 310) | 150 | 2.00× |" in lines


def test_the_check_compares_the_engine_too(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = tables.load("engine_cpu", recorded)
    for figure in measured["figures"]:
        if figure["key"] == "rate_16":
            figure["values"] = {"nanovllm": {"median": 50.0}, "HF one by one": {"median": 10.0}}
    (tmp_path / "engine_cpu.json").write_text(json.dumps(measured))
    arguments = ["bench", "engine", "--check", "--out", str(tmp_path)]

    def fresh(rate: float) -> Callable[..., dict[str, Any]]:
        again = json.loads(json.dumps(measured))
        next(f for f in again["figures"] if f["key"] == "rate_16")["values"]["nanovllm"]["median"] = rate
        return lambda *_: again

    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(stage_bench, "measure", fresh(40.0))
    stage_bench.main()
    monkeypatch.setattr(stage_bench, "measure", fresh(30.0))
    with pytest.raises(SystemExit, match="engine: the recorded gain is not borne out"):
        stage_bench.main()
    assert "4.00" in capsys.readouterr().out
