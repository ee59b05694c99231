"""The tables of `benchmarks/engine/tensor_parallel.py`: steps beside vLLM, where they go, and the all-reduces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.engine.engine_report import cell, origin, read, row
from benchmarks.engine.tensor_parallel import TARGET, name_of
from benchmarks.lib import wording

PARTS = ("weights", "keys", "all-reduces", "rest")


def steps_table(result: dict[str, Any]) -> list[str]:
    """A row for each batch and number of ranks: ours, vLLM's, ours in parts of vLLM's, and against one rank."""
    lines = [
        row("ranks", "batch", "nanovllm (ms)", "vLLM (ms)", f"of vLLM's (goal: at most {TARGET})", "against 1 rank"),
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for figure in result["figures"]:
        if not figure["key"].startswith("ms_per_token_"):
            continue
        values = figure["values"]
        alone = values.get(name_of("nanovllm", 1))
        for ranks in (1, 2, 4, 8):
            ours, theirs = (values.get(name_of(package, ranks)) for package in ("nanovllm", "vLLM"))
            if ours is None:
                continue
            lines.append(
                row(
                    str(ranks),
                    figure["key"].rpartition("_")[2],
                    cell(figure, name_of("nanovllm", ranks)),
                    cell(figure, name_of("vLLM", ranks)),
                    "–" if theirs is None else f"{ours['median'] / theirs['median']:.2f}",
                    "–" if alone is None else f"{alone['median'] / ours['median']:.2f}×",
                )
            )
    return lines


def parts_table(result: dict[str, Any]) -> list[str]:
    """Where a step goes; nothing on a CPU."""
    if not result["where"]:
        return []
    lines = [row("ranks", "batch", "a step (ms)", *PARTS), "|--:|--:|--:|" + "--:|" * len(PARTS)]
    for where in result["where"]:
        parts = (f"{where[part]:.2f}" if part in where else "–" for part in PARTS)
        lines.append(row(str(where["ranks"]), str(where["batch"]), f"{where['step']:.2f}", *parts))
    return ["", *lines]


def all_reduce_table(result: dict[str, Any]) -> list[str]:
    """Microseconds by the size of the message, for each number of ranks and each way."""
    tables = [table for table in result["all_reduce"] if table["rows"]]
    if not tables:
        return []
    columns = [(table, way) for table in tables for way in table["rows"][0] if way != "bytes"]
    names = [f"{way}, {table['ranks']} ranks (us)" for table, way in columns]
    lines = ["", row("all-reduce of (KiB)", *names), "|--:|" + "--:|" * len(columns)]
    for i, entry in enumerate(tables[0]["rows"]):
        cells = (
            wording.number(found[way], "us") if way in (found := table["rows"][i]) else "–" for table, way in columns
        )
        lines.append(row(f"{entry['bytes'] / 1024:g}", *cells))
    return lines


def table(card: str, directory: Path, name: str = "tensor_parallel", only_sums: bool = False) -> list[str]:
    results = read([f"{name}.{card}" if card else name], directory)
    if not results:
        return []
    [result] = results.values()
    if only_sums:
        return [*all_reduce_table(result)[1:], "", origin(results)]
    tables = steps_table(result) + parts_table(result) + all_reduce_table(result)
    return [*tables, "", f"Workload: {result['workload']}.", "", origin(results)]
