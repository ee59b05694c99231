"""The tables of README and docs, made from the measured JSON: nobody types a figure.

    python -m benchmarks.lib.report            # write every table anew
    python -m benchmarks.lib.report --check    # fail if one differs from what the JSON says

A table stands between `<!-- generated: NAME -->` and `<!-- end generated -->`, in README.md or anywhere in docs. NAME
is one of `TABLES`, with a card behind it (`engine.h200`) if it was measured on one, or else a showcase of the stages,
such as `stage_3` or `stage_6.h200`, for its whole table.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.engine import ablations, cpu, gpu_tests, phases, speculation, tensor_parallel, throughput
from benchmarks.kernels import attention, linears
from benchmarks.lib import tables
from benchmarks.lib.harness import RESULTS, ROOT
from benchmarks.serving import load as serving
from benchmarks.stages import stage_bench

# Of the card, or "" for a CPU, and the directory of the results: the lines of the table, none without a result
TABLES: dict[str, Callable[[str, Path], list[str]]] = {
    "engine": throughput.table,
    "ablations": ablations.table,
    "prefix": partial(tables.of_engine, "prefix"),
    "mixed": partial(tables.of_engine, "mixed"),
    "phases": phases.table,
    "engine_cpu": cpu.table,
    "speculation": speculation.table,
    "gpu_tests": gpu_tests.table,
    "tensor_parallel": tensor_parallel.table,
    "serving": serving.table,
    "kernels": attention.table,
    "linears": linears.table,
    "stages": stage_bench.stages_table,
    "ladder": stage_bench.ladder_table,
}
MARKED = re.compile(r"(<!-- generated: (?P<name>[\w.-]+) -->\n)(?P<body>.*?)(<!-- end generated -->)", re.DOTALL)


def table(name: str, results: Path) -> str:
    """The table `name`. Raises ValueError if the stages that it is about were not measured yet."""
    kind, _, card = name.partition(".")
    make = TABLES.get(kind)
    lines = make(card, results) if make else stage_bench.whole_table(tables.load(name, results))
    return "".join(f"{line}\n" for line in lines)


def regenerate(text: str, results: Path) -> str:
    """The page with every table in it made anew."""
    return MARKED.sub(lambda m: m[1] + table(m["name"], results) + m[4], text)


def stale_pages(root: Path, results: Path) -> list[Path]:
    """Pages with a table that is not what the results say."""
    pages = [*root.glob("README.md"), *sorted((root / "docs").rglob("*.md"))]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
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
