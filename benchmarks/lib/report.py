"""The tables of README and docs, made from the measured JSON: nobody types a figure.

    python -m benchmarks.lib.report            # write every table anew
    python -m benchmarks.lib.report --check    # fail if one differs from what the JSON says

A table stands between `<!-- generated: NAME -->` and `<!-- end generated -->`, where NAME is `stages` (a row for each
figure of every stage), `ladder`, one of the engine's (see `benchmarks/engine/engine_report.py`), or a result such as
`stage_3` or `stage_3.h100` (its whole table).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.engine import engine_report, tensor_parallel_report
from benchmarks.kernels import kernels_report, linears_report
from benchmarks.lib import wording
from benchmarks.lib.harness import RESULTS, ROOT, gain
from benchmarks.serving import serving_report
from stages.manifest import load_stages

ENGINE_TABLES = engine_report.TABLES | {
    "tensor_parallel": tensor_parallel_report.table,
    "serving": serving_report.table,
    "kernels": kernels_report.table,
    "linears": linears_report.table,
}
MARKED = re.compile(r"(<!-- generated: (?P<name>[\w.-]+) -->\n)(?P<body>.*?)(<!-- end generated -->)", re.DOTALL)


def load(name: str, results: Path) -> dict[str, Any]:
    """A result. Raises ValueError if it was not measured yet."""
    path = results / f"{name}.json"
    if not path.is_file():
        raise ValueError(f"a table asks for {name!r}, and there is no {name}.json: run the benchmark that writes it")
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def footer(results: list[dict[str, Any]]) -> list[str]:
    """Where the figures are from (once, if all are from the same place) and where a stage loses."""
    commits: dict[str, list[str]] = {}
    for result in results:
        commits.setdefault(wording.machine(result), []).append(wording.commit(result))
    lines = [""]
    for place, measured in commits.items():
        names = list(dict.fromkeys(measured))
        lines.append(f"Measured on {place}, commit{'s' if len(names) > 1 else ''} {', '.join(names)}.")
    lost = [line for result in results for line in wording.losses(result)]
    if lost:
        lines += ["", "Where a stage loses against the one before it:", "", *(f"- {line}" for line in lost)]
    return lines


def best_of_hugging_face(figure: dict[str, Any]) -> str:
    """Hugging Face's best figure in a comparison, and which way of calling it that was."""
    values = {name: v["median"] for name, v in figure["values"].items() if name.startswith("HF")}
    if not values:
        return "–"
    name = (max if figure["better"] == "higher" else min)(values, key=lambda name: values[name])
    return f"{wording.with_unit(values[name], figure['unit'])} ({name.removeprefix('HF ')})"


def stages_table(results: Path) -> list[str]:
    """A row for each figure that a stage is about."""
    lines = [row("stage", "what is measured", "before", "with it", "gain", "Hugging Face"), "|---|---|--:|--:|--:|--:|"]
    shown = []
    for stage in load_stages():
        if not (results / f"stage_{stage.number}.json").is_file():
            continue  # a stage that needs a GPU has its figures in a file with the card's name
        result = load(f"stage_{stage.number}", results)
        shown.append(result)
        title = f"{stage.number}. {stage.title}"
        for figure in result["figures"]:
            if figure["key"] not in result["shown"]:
                continue
            before, after = (figure["values"][name]["median"] for name in (result["rival"], result["contender"]))
            rival = result["rival"] if result["rival"].startswith("HF") else ""
            lines.append(
                row(
                    title,
                    figure["label"],
                    wording.with_unit(before, figure["unit"]) + (f" ({rival})" if rival else ""),
                    wording.with_unit(after, figure["unit"]),
                    f"{wording.number(gain(figure, result['contender'], result['rival']), 'times')}×",
                    best_of_hugging_face(figure),
                )
            )
            title = ""
    if not shown:
        raise ValueError("the table of stages needs results, and none was measured yet: run `make stage-1-bench`")
    return lines + footer(shown)


def ladder_table(results: Path) -> list[str]:
    result = load("ladder", results)
    titles = wording.contender_titles()
    names = wording.contenders(result)
    figures = result["figures"]
    throughput = next(f for f in figures if f["key"] == result["headline"])
    lines = [row("", *map(wording.label, figures), "against stage 1"), "|---|" + "--:|" * (len(figures) + 1)]
    for name in names:
        cells = [
            wording.number(f["values"][name]["median"], f["unit"]) if name in f["values"] else "–" for f in figures
        ]
        ratio = wording.number(gain(throughput, name, result["rival"]), "times")
        lines.append(row(titles.get(name, name), *cells, f"{ratio}×"))
    return [*lines, "", f"Workload: {result['workload']}.", *footer([result])]


def result_table(result: dict[str, Any]) -> list[str]:
    """Everything that was measured, with the spread over the rounds."""
    names = wording.contenders(result)
    lines = [row(result["title"], *names), "|---|" + "--:|" * len(names)]
    for figure in result["figures"]:
        cells = []
        for name in names:
            value = figure["values"].get(name)
            if value is None:
                cells.append("–")
                continue
            low, middle, high = (wording.number(value[k], figure["unit"]) for k in ("min", "median", "max"))
            cells.append(middle if low == high else f"{middle} ({low} to {high})")
        lines.append(row(wording.label(figure), *cells))
    remarks = [*wording.same_tokens(result), *result["notes"], wording.clock(result)]
    return [*lines, "", f"Workload: {result['workload']}.", "", *(f"- {r}" for r in remarks), *footer([result])]


def table(name: str, results: Path) -> str:
    if name == "stages":
        lines = stages_table(results)
    elif name == "ladder":
        lines = ladder_table(results)
    elif (engine := name.partition("."))[0] in ENGINE_TABLES:
        lines = ENGINE_TABLES[engine[0]](engine[2], results)
    else:
        lines = result_table(load(name, results))
    return "".join(f"{line}\n" for line in lines)


def regenerate(text: str, results: Path) -> str:
    """The page with every table in it made anew."""
    return MARKED.sub(lambda m: m[1] + table(m["name"], results) + m[4], text)


def pages(root: Path) -> Iterator[Path]:
    readme = root / "README.md"
    if readme.is_file():
        yield readme
    yield from sorted((root / "docs").rglob("*.md"))


def stale_pages(root: Path, results: Path) -> list[Path]:
    """Pages with a table that is not what the results say."""
    texts = {page: page.read_text(encoding="utf-8") for page in pages(root)}
    return [page for page, text in texts.items() if regenerate(text, results) != text]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the measured tables into README and docs.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is not up to date")
    options = parser.parse_args()
    try:
        stale = stale_pages(ROOT, RESULTS)
    except ValueError as error:
        sys.exit(f"report: {error}")
    names = ", ".join(page.relative_to(ROOT).as_posix() for page in stale)
    if options.check and stale:
        sys.exit(f"report: tables differ from benchmarks/results in {names}; run `python -m benchmarks.lib.report`")
    for page in stale:
        page.write_text(regenerate(page.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")
    print(f"written: {names}" if stale else "every table is what the results say")


if __name__ == "__main__":
    main()
