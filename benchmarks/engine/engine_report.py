"""The tables of the engine, from the JSON of its benchmarks. What was not measured yet has no table.

engine.CARD      throughput, share of the limit, small batches, start-up and idle time, beside vLLM
ablations.CARD   what each part is worth
prefix.CARD, mixed.CARD   all that was measured
phases.CARD      where the time of the headline workload goes
engine_cpu       both models beside Hugging Face
speculation, speculation.CARD   what guessing ahead gains, by batch size, and from where on it loses
gpu_tests.CARD   which tests passed there
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine import gpu_tests, phases
from benchmarks.engine.engine_cpu import ENGINE, TARGETS
from benchmarks.lib import wording
from benchmarks.lib.harness import gain

SUMMARISED = ("throughput", "latency", "startup", "idle")

Results = dict[str, dict[str, Any]]  # by the name of the benchmark


def read(names: list[str], directory: Path) -> Results:
    """Those results that exist. `names` are those of the files."""
    found = {name: directory / f"{name}.json" for name in names}
    return {n.partition(".")[0]: json.loads(p.read_text(encoding="utf-8")) for n, p in found.items() if p.is_file()}


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def cell(figure: dict[str, Any], contender: str) -> str:
    """The median, and the spread where there is one."""
    value = figure["values"].get(contender)
    if value is None:
        return "–"
    low, middle, high = (wording.number(value[k], figure["unit"]) for k in ("min", "median", "max"))
    return middle if low == high else f"{middle} ({low} to {high})"


def ratio(figure: dict[str, Any], contender: str, rival: str) -> str:
    if not {contender, rival} <= figure["values"].keys():
        return "–"
    return f"{wording.number(gain(figure, contender, rival), 'times')}×"


def origin(results: Results) -> str:
    """Where, with what, from which code, in how many rounds."""
    first = next(iter(results.values()))
    facts = first["machine"]
    parts = [facts["device"] if facts["device"] != "cpu" else f"{facts['processor']}, {facts['threads']} thread"]
    parts += [f"{name} {facts[name]}" for name in ("torch", "triton", "transformers") if name in facts]
    engines = {e["engine"] for r in results.values() for e in r.get("engines", {}).values()} - {"nanovllm"}
    commits = list(dict.fromkeys(wording.commit(r) for r in results.values()))
    rounds = ", ".join(f"{n} {len({r['round'] for r in result['rounds']})}" for n, result in results.items())
    models = dict.fromkeys(r["model"]["name"] for r in results.values())
    weights = "random weights of this shape" if facts["device"] != "cpu" else "float32"
    return (
        f"Measured on {', '.join([*parts, *sorted(engines)])}; {', '.join(models)} ({weights}); "
        f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}. Medians, with the spread over all rounds "
        f"({rounds})."
    )


def engine_table(card: str, directory: Path) -> list[str]:
    results = read([f"{name}.{card}" for name in SUMMARISED], directory)
    if not results:
        return []
    lines = [row("", "nanovllm", "vLLM", "gain"), "|---|--:|--:|--:|"]
    for result in results.values():
        for figure in result["figures"]:
            if figure["key"] in result["shown"]:
                shown = cell(figure, "nanovllm"), cell(figure, "vLLM"), ratio(figure, "nanovllm", "vLLM")
                lines.append(row(wording.label(figure), *shown))
    lines += ["", f"Workloads: {'; '.join(r['workload'] for r in results.values())}."]
    lines += [f"The {note}." for r in results.values() for note in r["notes"]]
    if {"throughput", "latency"} <= results.keys():
        weights = results["throughput"]["roofline"]["weights_ms"]
        alone = results["latency"]["figures"][0]["values"]["nanovllm"]["median"]
        lines.append(
            f"Reading the weights once takes {weights:.2f} ms, a token at batch 1 {alone / weights:.1f} times that."
        )
    return [*lines, "", origin(results)]


def ablations_table(card: str, directory: Path) -> list[str]:
    results = read([f"ablations.{card}"], directory)
    if not results:
        return []
    [result] = results.values()
    figures = result["figures"]
    header = [text for figure in figures for text in (wording.label(figure), "change")]
    lines = [row("", *header), "|---|" + "--:|" * len(header)]
    for variant in result["figures"][0]["values"]:
        cells, usual = [], result["contender"]
        for figure in figures:
            base, value = (figure["values"].get(n, {}).get("median") for n in (usual, variant))
            change = "" if None in (base, value) or variant == usual else f"{100 * (value / base - 1):+.1f}%"
            cells += [cell(figure, variant), change]
        lines.append(row(variant, *cells))
    lines += [row(variant, *["failed"] * len(header)) for variant in result["failures"]]
    return [*lines, "", f"Workload: {result['workload']}.", "", origin(results)]


def whole_table(name: str) -> Callable[[str, Path], list[str]]:
    """Every figure of every contender of one benchmark."""

    def table(card: str, directory: Path) -> list[str]:
        results = read([f"{name}.{card}"], directory)
        if not results:
            return []
        result = results[name]
        contenders = wording.contenders(result)
        lines = [row(result["title"], *contenders), "|---|" + "--:|" * len(contenders)]
        lines += [row(wording.label(f), *(cell(f, c) for c in contenders)) for f in result["figures"]]
        return [*lines, "", f"Workload: {result['workload']}.", "", origin(results)]

    return table


def phases_table(card: str, directory: Path) -> list[str]:
    """Of each kind of step the shortest round."""
    results = read([f"phases.{card}"], directory)
    if not results:
        return []
    [result] = results.values()
    figures = {figure["key"]: figure for figure in result["figures"]}
    lines = [row("steps", "number", "time (s)", "at least (s)", "above that (s)"), "|---|" + "--:|" * 4]
    totals = [0.0, 0.0]
    for kind in phases.KINDS:
        steps, seconds, least = (figures[f"{key}, {kind}"] for key in ("steps", "seconds", "least_seconds"))
        spent, needed = (figure["values"]["nanovllm"]["min"] for figure in (seconds, least))
        if spent:
            cells = cell(steps, "nanovllm"), f"{spent:.2f}", f"{needed:.2f}", f"{spent - needed:.2f}"
            lines.append(row(kind, *cells))
            totals = [totals[0] + spent, totals[1] + needed]
    lines.append(row("all", "", *(f"{n:.2f}" for n in (*totals, totals[0] - totals[1]))))
    where = origin(results).replace("Medians, with the spread over all rounds", "The shortest of all rounds")
    return [*lines, "", where]


def cpu_table(_: str, directory: Path) -> list[str]:
    results = read(["engine_cpu", "engine_cpu_smollm2"], directory)
    if not results:
        return []
    names = ["nanovllm", "HF one by one", "HF padded batch"]
    lines = [row("model", "what is measured", *names, "gain", "at least"), "|---|---|" + "--:|" * 5]
    for result in results.values():
        model = Path(result["model"]["name"]).name
        for figure in result["figures"]:
            rival, target = TARGETS[figure["key"]]
            gained = f"{ratio(figure, ENGINE, rival)} {rival}"
            lines.append(row(model, wording.label(figure), *(cell(figure, n) for n in names), gained, f"{target:g}×"))
            model = ""
    lines += ["", *(f"- {r['model']['name']}: {r['workload']}; {wording.clock(r)}" for r in results.values())]
    return [*lines, "", origin(results)]


def speculation_table(card: str, directory: Path) -> list[str]:
    names = [f"{name}.{card}" if card else name for name in ("speculation", "speculation_ngram")]
    results = read(names, directory)
    lines: list[str] = []
    if "speculation" in results:
        result = results["speculation"]
        none, *ways = wording.contenders(result)
        lines += [row("batch", "without guesses (ms)", *ways), "|---|" + "--:|" * (1 + len(ways))]
        *times, per_step, accepted = result["figures"]
        for figure in times:
            batch = figure["key"].rpartition("_")[2]
            lines.append(row(batch, cell(figure, none), *(ratio(figure, way, none) for way in ways)))
        for figure in (per_step, accepted):
            medians = (figure["values"][way]["median"] for way in ways)
            lines.append(row(figure["label"], "–", *(wording.number(m, "times") for m in medians)))
        lost = (result["loses_from"][way] for way in ways)
        lines += [row("loses from batch", "–", *("–" if batch is None else str(batch) for batch in lost)), ""]
        lines += ["The time a token, and how many times shorter guessing makes it. "]
        lines[-1] += f"Workload: {result['workload']}; {wording.clock(result)}."
        lines += ["", origin({"speculation": result})]
    if "speculation_ngram" in results:
        result = results["speculation_ngram"]
        none, *ways = wording.contenders(result)
        figure, per_step, _ = result["figures"]
        gains = (
            f"{ratio(figure, way, none)} with {way} ({cell(per_step, way)} tokens a step that guesses)" for way in ways
        )
        model = Path(result["model"]["name"]).name
        text = f"{model}, {result['workload']}: {cell(figure, none)} ms a token without guesses, "
        text += f"gains {', '.join(gains)}; "
        lines += ["", f"{text}{wording.clock(result)}; commit {wording.commit(result)}."]
    return lines


TABLES: dict[str, Callable[[str, Path], list[str]]] = {
    "engine": engine_table,
    "ablations": ablations_table,
    "prefix": whole_table("prefix"),
    "mixed": whole_table("mixed"),
    "phases": phases_table,
    "engine_cpu": cpu_table,
    "speculation": speculation_table,
    "gpu_tests": gpu_tests.table,
}
