"""Measure a stage's showcase against the stage before it and Hugging Face: `make stage-N-bench`.

    python -m benchmarks.stages.stage_bench 3 [--model DIRECTORY] [--device cuda] [--threads 1] [--rounds 3] [--quick]

Prints a table and writes benchmarks/results/stage_N.json (with the card in its name if there is one). A showcase that
needs a GPU runs on a CPU as well, but only as `--quick`: that shows that it works, and measures nothing.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib import harness, tables
from benchmarks.lib.harness import Comparison, Contender, Showcase
from benchmarks.lib.process import choose_clock
from benchmarks.lib.tables import Result, row
from benchmarks.lib.workloads import random_checkpoint
from benchmarks.stages import runners
from benchmarks.stages.showcases import NEED_A_GPU, SHOWCASES, within_reach
from stages.manifest import load_stages
from tools import until_ctrl_c


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of everything that measures stages."""
    parser.add_argument("--model", type=Path, default=harness.EMBEDDED_MODEL, help="checkpoint directory")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of every contender (default 1)")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes of every contender (default 3)")
    parser.add_argument("--quick", action="store_true", help="a tiny workload: for tests, its figures mean nothing")
    parser.add_argument("--results", type=Path, dest="out", help="directory for the JSON (default: benchmarks/results)")


def vocab_size(model: Path) -> int:
    config = model / "config.json"
    if not config.is_file():
        sys.exit(f"--model {model}: there is no checkpoint in it (no config.json)")
    size: int = json.loads(config.read_text())["vocab_size"]
    return size


def measure(showcase: Showcase, options: argparse.Namespace) -> dict[str, Any]:
    """Run a showcase, with a line for each process; print its table, write its JSON and return it."""
    if options.rounds < 1 or options.threads < 1:
        sys.exit(f"--rounds {options.rounds} --threads {options.threads}: both must be at least 1")
    several = any(scenario.several_processes for scenario in showcase.scenarios)
    # What a quick run measures means nothing, so it must not end up where the README's tables come from
    default = harness.ROOT / "build" / "bench" if options.quick else harness.RESULTS
    chosen = argparse.Namespace(**vars(options))
    chosen.model, chosen.out = options.model.resolve(), options.out or default
    chosen.clock = "wall" if several else choose_clock(options.device, options.threads)

    def run(contender: Contender) -> dict[str, Any]:
        arguments = runners.arguments_of(contender, showcase, chosen.model, chosen.device, chosen.clock)
        return harness.run_process(contender, runners.measure, arguments, chosen)

    comparison = Comparison(showcase, chosen)
    result = comparison.run(run)
    if options.quick:
        print("a quick run: these figures mean nothing")
    if comparison.failures:
        sys.exit(f"not measured: {', '.join(comparison.failures)}")
    return result


def footer(results: list[dict[str, Any]]) -> list[str]:
    """Where the figures are from (once, if all are from the same place) and where a stage loses."""
    commits: dict[str, list[Result]] = {}
    for result in results:
        commits.setdefault(tables.machine(result), []).append(result)
    lines = [""]
    for place, names in commits.items():
        lines.append(f"Measured on {place}, {tables.commits(names)}.")
    lost = [line for result in results for line in tables.losses(result)]
    if lost:
        lines += ["", "Where a stage loses against the one before it:", "", *(f"- {line}" for line in lost)]
    return lines


def best_of_hugging_face(figure: dict[str, Any]) -> str:
    """Hugging Face's best figure in a comparison, and which way of calling it that was."""
    values = [(v["median"], name.removeprefix("HF ")) for name, v in figure["values"].items() if name.startswith("HF")]
    if not values:
        return "–"
    median, way = (max if figure["better"] == "higher" else min)(values)
    return f"{tables.with_unit(median, figure['unit'])} ({way})"


def stages_table(results: dict[str, Result]) -> list[str]:
    """A row for each figure that a stage is about."""
    lines = tables.head("stage", "what is measured", "before", "with it", "gain", "Hugging Face", left=2)
    for stage in load_stages():
        result = results.get(f"stage_{stage.number}")  # one that needs a GPU has a file with the card's name
        if result is None:
            continue
        title, contender, rival = f"{stage.number}. {stage.title}", result["contender"], result["rival"]
        for figure in result["figures"]:
            if figure["key"] not in result["shown"]:
                continue
            before, after = (
                tables.with_unit(figure["values"][n]["median"], figure["unit"]) for n in (rival, contender)
            )
            before += f" ({rival})" if rival.startswith("HF") else ""
            gain = tables.ratio(figure, contender, rival)
            lines.append(row(title, figure["label"], before, after, gain, best_of_hugging_face(figure)))
            title = ""
    return lines + footer(list(results.values()))


def whole_table(result: dict[str, Any]) -> list[str]:
    """Everything that was measured, with the spread over the rounds."""
    remarks = [*tables.same_tokens(result), *result["notes"], tables.clock(result)]
    return [*tables.whole(result), *(f"- {remark}" for remark in remarks), *footer([result])]


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
    parser = harness.make_parser("stages.stage_bench", __doc__)
    parser.add_argument("stage", type=int, choices=sorted(SHOWCASES))
    add_options(parser)
    options = parser.parse_args()
    fit_to_device(options)
    showcase = SHOWCASES[options.stage](vocab_size(options.model), options.quick)
    result = measure(within_reach(showcase, options.device), options)
    if harness.headline_gain(result) <= 1 and not options.quick:
        sys.exit(f"stage {options.stage} did not win its showcase")


if __name__ == "__main__":
    sys.exit(until_ctrl_c(main))
