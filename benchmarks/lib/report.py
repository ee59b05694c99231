"""The tables of README and docs, made from the measured JSON: nobody types a figure.

    python -m benchmarks.lib.report            # write every table anew
    python -m benchmarks.lib.report --check    # fail if one differs from what the JSON says

A table stands between `<!-- generated: NAME -->` and `<!-- end generated -->`, in README.md or anywhere in docs. NAME
is one of `TABLES`, with a card behind it (`engine.h200`) if it was measured on one, or else a showcase of the stages,
such as `stage_3` or `stage_6.h200`, for its whole table.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.engine import ablations, gpu_tests, simulated, speculation, speed, steps, tensor_parallel
from benchmarks.kernels import attention, linears
from benchmarks.lib import tables
from benchmarks.lib.harness import RESULTS, ROOT, make_parser
from benchmarks.serving import load as serving
from benchmarks.serving import simulated as serving_simulated
from benchmarks.serving import speed as serving_speed
from benchmarks.stages import stage_bench
from benchmarks.stages.showcases import SHOWCASES

# The results that a table is made from, and the function that makes it from those that exist, by name
TABLES: dict[str, tuple[tuple[str, ...], Callable[[dict[str, tables.Result]], list[str]]]] = {
    "stages": (tuple(f"stage_{n}" for n in SHOWCASES), stage_bench.stages_table),
    "ladder": (("ladder",), stage_bench.ladder_table),
    "engine": (("throughput", "latency", "startup", "idle"), speed.table),
    "ablations": (("ablations",), ablations.table),
    "prefix": (("prefix",), tables.of_engine),
    "mixed": (("mixed",), tables.of_engine),
    "phases": (("phases",), steps.table),
    "engine_cpu": (("engine_cpu", "engine_cpu_smollm2"), stage_bench.engine_cpu_table),
    "quantised": (("quantised",), tables.of_engine),
    "kv_cache": (("kv_cache",), tables.of_engine),
    "experts": (("experts",), tables.of_engine),
    "speculation": (("speculation", "speculation_ngram"), speculation.table),
    "gpu_tests": (("gpu_tests",), gpu_tests.table),
    "tensor_parallel": (("tensor_parallel",), tensor_parallel.table),
    "serving": (("serving",), serving.table),
    "serving_speed": (("serving_speed",), serving_speed.table),
    "simulated": (("simulated",), simulated.table),
    "serving_simulated": (("serving_simulated",), serving_simulated.table),
    "speed": (("throughput", "sampling", "latency", "serving_speed"), speed.short_table),
    "sampling": (("sampling",), speed.sampling_table),
    "structured": (("structured",), tables.of_engine),  # with the model's name before the card's
    "uses": (("uses",), tables.of_engine),
    "shape": (("shape",), tables.of_engine),  # with the model's name, too
    "speed_cpu": (("engine_cpu",), stage_bench.engine_cpu_sentence),
    "kernels": (("kernels",), attention.table),
    "linears": (("linears",), linears.table),
}
NEEDED = ("stages", "ladder")  # without their results there is an error, for all others no table
MARKED = re.compile(r"(<!-- generated: (?P<name>[\w.-]+) -->\n)(?P<body>.*?)(<!-- end generated -->)", re.DOTALL)


def table(name: str, results: Path) -> str:
    """The table `name`, empty if nothing was measured. Raises ValueError if the stages were to be and were not."""
    kind, _, card = name.partition(".")
    if kind not in TABLES:
        lines = stage_bench.whole_table(tables.load(name, results))
    else:
        names, make = TABLES[kind]
        found = tables.find(names, card, results)
        if not found and kind in NEEDED:
            raise ValueError(f"the table {name!r} needs a result, and none was measured yet: run `make stage-1-bench`")
        lines = make(found) if found else []
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
    parser = make_parser("lib.report", __doc__)
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
