"""The record of a run of the GPU tests: from pytest's JUnit report to JSON, with the card and the versions.

    python -m pytest -m gpu --junitxml=tests.xml tests
    python -m benchmarks.engine.gpu_tests tests.xml [more.xml ...] [--out DIR]

Writes gpu_tests.CARD.json; `benchmarks/lib/report.py` makes the table of it. A test counts under the precision that its
parameters name. Exits with 1 if a test failed.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.lib import tables
from benchmarks.lib.harness import RESULTS, commit, make_parser, write_result
from benchmarks.lib.process import facts
from benchmarks.lib.tables import Result

PRECISIONS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp32": "fp32", "float32": "fp32"}
COLUMNS = ("bf16", "fp16", "fp32", "not named")
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def precision(test: str) -> str:
    """Of "test_x[sync-bf16-triton]": bf16."""
    parameters = re.split(r"[-\[\]. ]", test.partition("[")[2])
    return next((PRECISIONS[p] for p in parameters if p in PRECISIONS), "not named")


def summarize(reports: list[Path]) -> dict[str, Any]:
    """What the tests of each file came to, by precision; why tests were skipped; which failed.

    Raises ValueError for a file that is no JUnit report, or one without tests.
    """
    files: dict[str, dict[str, Counter[str]]] = {}
    reasons: Counter[str] = Counter()
    failed: list[str] = []
    seconds = 0.0
    for path in reports:
        try:
            cases = list(ElementTree.parse(path).iter("testcase"))
        except ElementTree.ParseError as error:
            raise ValueError(f"{path} is no JUnit report ({error}): write one with pytest --junitxml={path}") from None
        if not cases:
            raise ValueError(f"{path} reports no tests: was anything selected?")
        for case in cases:
            name, file = case.get("name", ""), case.get("classname", "").rpartition(".")[2]
            marks = {child.tag: child for child in case}
            outcome = next((outcome for tag, outcome in OUTCOMES.items() if tag in marks), "passed")
            files.setdefault(file, {}).setdefault(precision(name), Counter())[outcome] += 1
            seconds += float(case.get("time", 0))
            if outcome == "skipped":
                reasons[marks["skipped"].get("message", "")] += 1
            if outcome == "failed":
                failed.append(f"{file}::{name}")
    return {"files": files, "skipped": dict(reasons), "failed": failed, "seconds": round(seconds, 1)}


def table(results: dict[str, Result]) -> list[str]:
    """A row for each file of tests, a column for each precision; nothing without a record."""
    result = results["gpu_tests"]
    lines = tables.head("passed", *COLUMNS)
    total: Counter[str] = Counter()
    for file, by_precision in sorted(result["files"].items()):
        cells = []
        for column in COLUMNS:
            counts = by_precision.get(column, {})
            total.update(counts)
            others = [f"{counts[o]} {o}" for o in ("failed", "skipped") if counts.get(o)]
            cells.append(", ".join([str(counts.get("passed", 0)), *others]) if counts else "–")
        lines.append(tables.row(f"`{file}`", *cells))
    lines += ["", f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped."]
    lines += [f"Skipped {count}: {reason}." for reason, count in result["skipped"].items()]
    versions = tables.versions(result, "python", "torch", "cuda", "triton", "transformers")
    return [*lines, "", f"{result['machine']['device']}, {versions}; commit {tables.commit(result)}."]


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("engine.gpu_tests", __doc__)
    parser.add_argument("reports", type=Path, nargs="+", help="JUnit reports of one run of the suite")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the directory for the record")
    options = parser.parse_args(arguments)
    try:
        summary = summarize(options.reports)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    about = {"machine": facts("cuda"), "commit": commit("nanovllm", "stages", "tests")}
    path = write_result({"name": "gpu_tests", **about, **summary}, options.out)
    print(path.name, *(f"failed: {test}" for test in summary["failed"]), sep="\n")
    return int(bool(summary["failed"]))


if __name__ == "__main__":
    sys.exit(main())
