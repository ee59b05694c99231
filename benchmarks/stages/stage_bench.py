"""Measure a stage's showcase against the stage before it and Hugging Face: `make stage-N-bench`.

    python -m benchmarks.stages.stage_bench 3 [--model DIRECTORY] [--device cuda] [--threads 1] [--rounds 3] [--quick]

Prints a table and writes benchmarks/results/stage_N.json (with the card in its name if there is one). A showcase that
needs a GPU runs on a CPU as well, but only as `--quick`: that shows that it works, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.lib import harness, wording
from benchmarks.lib.harness import Showcase
from benchmarks.lib.random_checkpoint import random_checkpoint
from benchmarks.stages.showcase_ranks import within_reach
from benchmarks.stages.showcases import NEED_A_GPU, SHOWCASES
from tools.ctrl_c import until_ctrl_c


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of everything that measures."""
    parser.add_argument("--model", type=Path, default=harness.EMBEDDED_MODEL, help="checkpoint directory")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of every contender (default 1)")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes of every contender (default 3)")
    parser.add_argument("--quick", action="store_true", help="a tiny workload: for tests, its figures mean nothing")
    parser.add_argument("--results", type=Path, help="directory for the JSON (default: benchmarks/results)")


def vocab_size(model: Path) -> int:
    config = model / "config.json"
    if not config.is_file():
        sys.exit(f"--model {model}: there is no checkpoint in it (no config.json)")
    size: int = json.loads(config.read_text())["vocab_size"]
    return size


def measure(showcase: Showcase, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run a showcase, with a line for each process; print its table, write its JSON and return it."""
    if options.rounds < 1 or options.threads < 1:
        sys.exit(f"--rounds {options.rounds} --threads {options.threads}: both must be at least 1")
    model = options.model.resolve()
    total = options.rounds * len(showcase.contenders)
    records = []
    for record in harness.run_rounds(
        showcase, model, device=options.device, threads=options.threads, rounds=options.rounds
    ):
        records.append(record)
        seconds = sum(measured["seconds"] for measured in record["scenarios"].values())
        console.print(f"{len(records)}/{total} round {record['round'] + 1} {record['contender']}: {seconds:.1f} s")
    result = harness.assemble(showcase, records, model)
    # What a quick run measures means nothing, so it must not end up where the README's tables come from
    default = harness.ROOT / "build" / "bench" if options.quick else harness.RESULTS
    path = harness.write_result(result, options.results or default)
    console.print(render(result))
    for line in remarks(result):
        console.print(f"- {line}")
    if options.quick:
        console.print("a quick run: these figures mean nothing")
    console.print(f"written to {path.relative_to(harness.ROOT) if path.is_relative_to(harness.ROOT) else path}")
    return result


def render(result: dict[str, Any]) -> Table:
    """Every figure of every contender: the median, and the spread below it where there is one.

    A row for each figure, or for each contender where there are more of these.
    """
    names, figures = wording.contenders(result), result["figures"]
    cells = {(name, figure["key"]): cell(figure, name) for name in names for figure in figures}
    table = Table(title=result["title"], caption=result["workload"], show_lines=True)
    table.add_column("")
    if len(names) > len(figures):
        for figure in figures:
            table.add_column(wording.label(figure), justify="right")
        for name in names:
            style = "bold" if name == result["contender"] else None
            table.add_row(name, *(cells[name, figure["key"]] for figure in figures), style=style)
    else:
        for name in names:
            table.add_column(name, justify="right", style="bold" if name == result["contender"] else None)
        for figure in figures:
            table.add_row(wording.label(figure), *(cells[name, figure["key"]] for name in names))
    return table


def cell(figure: dict[str, Any], contender: str) -> str:
    value = figure["values"].get(contender)
    if value is None:
        return "–"
    low, middle, high = (wording.number(value[k], figure["unit"]) for k in ("min", "median", "max"))
    return middle if low == high else f"{middle}\n[dim]{low} to {high}[/dim]"


def remarks(result: dict[str, Any]) -> list[str]:
    """Below the table: the gain, where the stage loses, whose tokens differ, what was measured where and how."""
    headline = next(figure for figure in result["figures"] if figure["key"] == result["headline"])
    gain = harness.headline_gain(result)
    better = f"{wording.number(gain, 'times')} times" if gain > 1 else "not"
    return [
        f"{headline['label']}: {result['contender']} is {better} better than {result['rival']}",
        *wording.losses(result),
        *wording.same_tokens(result),
        *result["notes"],
        wording.clock(result),
        f"{wording.machine(result)}, commit {wording.commit(result)}",
    ]


def fit_to_device(options: argparse.Namespace) -> None:
    """A showcase that needs a GPU gets the model that it is recorded with there, and is only tried out without one."""
    if options.stage not in NEED_A_GPU:
        return
    if not options.device.startswith("cuda"):
        print(
            f"The showcase of stage {options.stage} needs a GPU (ARGS='--device cuda'). A CPU has nothing to show;"
            " what follows is a quick run of the same code, to see that it works."
        )
        options.quick = True
    elif options.model == harness.EMBEDDED_MODEL:
        options.model = random_checkpoint(NEED_A_GPU[options.stage])


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a stage's showcase.")
    parser.add_argument("stage", type=int, choices=sorted(SHOWCASES))
    add_options(parser)
    options = parser.parse_args()
    fit_to_device(options)
    showcase = SHOWCASES[options.stage](vocab_size(options.model), options.quick)
    showcase = within_reach(showcase, options.device)
    result = measure(showcase, options, Console())
    if harness.headline_gain(result) <= 1 and not options.quick:
        sys.exit(f"stage {options.stage} did not win its showcase")


if __name__ == "__main__":
    sys.exit(until_ctrl_c(main))
