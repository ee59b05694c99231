"""Measure a stage's showcase against the stage before it and Hugging Face: `make stage-N-bench`.

    python -m benchmarks.stages.stage_bench 3 [--model DIRECTORY] [--device cuda] [--rounds 3] [--quick]

Prints a table and writes benchmarks/results/stage_N.json (with the card in its name if there is one). A showcase that
needs a GPU runs on a CPU as well, but only as `--quick`: that shows that it works, and measures nothing.

In the place of the number, `ladder` is one workload through every stage and Hugging Face, drawn as a picture for docs
(`make ladder`). `engine` and `smollm2` are the engine on a CPU beside Hugging Face, in float32, with the embedded model
and with SmolLM2-135M-Instruct (`make bench-cpu`). With `--check` nothing is recorded: a gain may fall by `TOLERANCE`
from the recorded one, but never to 1 (`make bench-check`).
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.lib import harness, tables
from benchmarks.lib.harness import Comparison, Showcase
from benchmarks.lib.process import choose_clock
from benchmarks.lib.tables import Result, row
from benchmarks.lib.workloads import random_checkpoint
from benchmarks.stages import runners
from benchmarks.stages.showcases import (
    ENGINE,
    HF_BATCH,
    HF_ONE,
    NEED_A_GPU,
    OTHERS,
    SHOWCASES,
    SMOLLM2,
    TARGETS,
    ranks_of,
    within_reach,
)
from stages.manifest import load_stage, load_stages
from tools import until_ctrl_c
from tools.exercises import mine

KNOWN = {**{str(number): build for number, build in SHOWCASES.items()}, **OTHERS}
FIGURE = harness.ROOT / "docs" / "figures" / "ladder.png"
# Okabe and Ito's palette: told apart with any colour vision, and in grey
STAGE_COLOUR, HF_COLOUR = "#0072B2", "#B9B9B9"
TOLERANCE = 0.3  # share by which a gain may fall


def vocab_size(model: Path) -> int:
    config = model / "config.json"
    if not config.is_file():
        sys.exit(f"--model {model}: there is no checkpoint in it (no config.json)")
    size: int = json.loads(config.read_text())["vocab_size"]
    return size


def measure(showcase: Showcase, options: argparse.Namespace) -> dict[str, Any]:
    """Run a showcase, with a line for each process; print its table, write its JSON and return it."""
    if options.rounds < 1:
        sys.exit(f"--rounds {options.rounds}: it must be at least 1")
    several = any(ranks_of(contender) > 1 for contender in showcase.contenders)  # then the CPU time of one says nothing
    # Neither a quick run, which measures nothing, nor a learner's may end up where the README's tables come from
    elsewhere = options.quick or options.impl == "exercises"
    default = harness.ROOT / "build" / "bench" if elsewhere else harness.RESULTS
    chosen = argparse.Namespace(**vars(options))
    chosen.model, chosen.out = options.model.resolve(), options.out or default
    chosen.threads = 1  # of every contender
    chosen.clock = "wall" if several else choose_clock(options.device, chosen.threads)
    arguments = {"model": str(chosen.model), "device": chosen.device, "clock": chosen.clock}
    arguments |= {"scenarios": [asdict(scenario) for scenario in showcase.scenarios]}
    comparison = Comparison(replace(showcase, measure=runners.measure, arguments=arguments), chosen)
    result = comparison.run()
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


def ladder_table(results: dict[str, Result]) -> list[str]:
    """A row for each contender."""
    result = results["ladder"]
    titles, figures = tables.contender_titles(), result["figures"]
    throughput = tables.figures(result)[result["headline"]]
    lines = tables.head("", *map(tables.label, figures), "against stage 1")
    for name in tables.contenders(result):
        cells = [tables.cell(figure, name, "{}") for figure in figures]
        lines.append(tables.row(titles.get(name, name), *cells, tables.ratio(throughput, name, result["rival"])))
    return [*lines, "", f"Workload: {result['workload']}.", *footer([result])]


def engine_cpu_table(results: dict[str, Result]) -> list[str]:
    """Both models beside Hugging Face."""
    names = [ENGINE, HF_ONE, HF_BATCH]
    lines = tables.head("model", "what is measured", *names, "gain", "at least", left=2)
    for result in results.values():
        model = Path(result["model"]["name"]).name
        for figure in result["figures"]:
            rival, target = TARGETS[figure["key"]]
            cells = [tables.cell(figure, name) for name in names]
            gained = f"{tables.ratio(figure, ENGINE, rival)} {rival}"
            lines.append(tables.row(model, tables.label(figure), *cells, gained, f"{target:g}×"))
            model = ""
    lines += ["", *(f"- {r['model']['name']}: {r['workload']}; {tables.clock(r)}" for r in results.values())]
    return [*lines, "", tables.origin(results)]


def engine_cpu_sentence(results: dict[str, Result]) -> list[str]:
    """The embedded model beside Hugging Face, for the README. `results` is that of engine_cpu."""
    result = results["engine_cpu"]
    measured, facts = tables.figures(result), result["machine"]

    def times(key: str) -> str:
        return tables.with_unit(tables.gain(measured[key], ENGINE, TARGETS[key][0]), "times")

    return [
        f"On a CPU ({facts['processor']}, {facts['threads']} thread) the embedded model generates one request "
        f"{times('ms_1')} as fast as Hugging Face's `generate`, 16 requests of one length "
        f"{times('rate_16')} as fast as `generate` does one by one, and 16 of mixed lengths "
        f"{times('rate_mixed')} as fast as `generate` does in a padded batch.",
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """Throughput of every contender as bars, with the spread over the rounds; legible at half the page's width."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = tables.figures(result)["throughput"]
    titles, values = tables.contender_titles(), figure["values"]
    labels = [titles.get(name, name) for name in values]
    medians = [value["median"] for value in values.values()]
    below = [value["median"] - value["min"] for value in values.values()]
    above = [value["max"] - value["median"] for value in values.values()]
    colours = [STAGE_COLOUR if name in titles else HF_COLOUR for name in values]

    with rc_context({"font.size": 16}):
        canvas = Figure(figsize=(10, 5.6), layout="constrained")
        axes = canvas.subplots()
        axes.barh(labels, medians, xerr=[below, above], color=colours, edgecolor="black", ecolor="black", capsize=5)
        for row, (median, upper) in enumerate(zip(medians, above, strict=True)):
            text, where = tables.number(median, "tokens/s"), (median + upper, row)
            axes.annotate(text, where, (8, 0), textcoords="offset points", va="center")
        axes.invert_yaxis()
        axes.set_xlim(0, 1.18 * max(m + a for m, a in zip(medians, above, strict=True)))
        axes.set_xlabel(f"output {figure['unit']} (median of {tables.num_rounds(result)} rounds)")
        axes.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        # No version of matplotlib in the file, so that drawing the same result again gives the same bytes
        canvas.savefig(path, dpi=100, metadata={"Software": None})


# --- the command ------------------------------------------------------------------------------------------------------


def run(name: str, options: argparse.Namespace) -> tuple[Result, list[str]] | None:
    """Measure one showcase, with the model that it is recorded with: the result and its `misses`. None without model.

    A showcase that needs a GPU is only tried out without one.
    """
    chosen, shape = argparse.Namespace(**vars(options)), NEED_A_GPU.get(name)
    if options.impl == "exercises":
        mine.require_right(load_stage(int(name)))
    if name == "smollm2":
        chosen.model = SMOLLM2
        if not SMOLLM2.is_dir():
            print("SmolLM2-135M-Instruct is left out: `make models` puts it into the cache")
            return None
    elif shape is not None and not options.device.startswith("cuda"):
        print(
            f"The showcase of stage {name} needs a GPU (ARGS='--device cuda'). A CPU has nothing to show;"
            " what follows is a quick run of the same code, to see that it works."
        )
        chosen.quick = True
    elif shape is not None and options.model == harness.EMBEDDED_MODEL:
        chosen.model = random_checkpoint(shape)
    showcase = KNOWN[name](vocab_size(chosen.model), chosen.quick)
    if options.impl == "exercises":
        showcase = with_the_learners(showcase, name)
    result = measure(within_reach(showcase, chosen.device), chosen)
    if name == "ladder" and not chosen.quick:
        draw(result, FIGURE)
    return result, [] if chosen.quick else misses(result)


def with_the_learners(showcase: Showcase, name: str) -> Showcase:
    """The showcase of a stage with the learner's file in the place of ours; all others stay as they are."""
    contenders = []
    for contender in showcase.contenders:
        spec = contender.arguments["spec"]
        if str(spec.get("number")) == name:
            contender = replace(contender, arguments=contender.arguments | {"spec": spec | {"impl": "exercises"}})
        contenders.append(contender)
    return replace(showcase, contenders=contenders)


def misses(result: Result) -> list[str]:
    """The figures in which the contender is not as good as it has to be, in words."""
    targets = TARGETS if result["contender"] == ENGINE else {result["headline"]: (result["rival"], 1.0)}
    found = []
    for key, (rival, least) in targets.items():
        figure = tables.figures(result)[key]
        if (gain := tables.gain(figure, result["contender"], rival)) <= least:
            found.append(f"{result['name']}, {figure['label']}: {gain:.2f} of {least} times {rival}")
    return found


def holds(fresh: float, recorded: float) -> bool:
    return fresh > 1 and fresh >= recorded * (1 - TOLERANCE)


def check(names: list[str], options: argparse.Namespace) -> None:
    """Measure anew, and compare each gain with the recorded one, which stays as it is. Exits if one has fallen.

    Gains are compared and not times, because they hardly depend on the machine.
    """
    title = f"Gain over the stage before, or Hugging Face (tolerance {TOLERANCE:.0%})"
    lines, failed = tables.head(title, "recorded", "now", ""), []
    with tempfile.TemporaryDirectory() as scratch:
        elsewhere = argparse.Namespace(**vars(options) | {"out": Path(scratch)})
        for name in names:
            if (found := run(name, elsewhere)) is None:
                continue
            result, _ = found
            recorded = harness.headline_gain(tables.load(result["name"], options.out or harness.RESULTS))
            fresh, label = harness.headline_gain(result), f"stage {name}" if name.isdigit() else name
            good = holds(fresh, recorded)
            gains = (tables.with_unit(gain, "times") for gain in (recorded, fresh))
            lines.append(row(label, *gains, "holds" if good else "FAILS"))
            failed.extend([] if good else [label])
    Console().print(Markdown("\n".join(lines)))
    if failed:
        sys.exit(f"{', '.join(failed)}: the recorded gain is not borne out")


def main() -> None:
    parser = harness.make_parser("stages.stage_bench", __doc__)
    parser.add_argument("names", nargs="+", choices=KNOWN, metavar="NAME", help=f"which: {', '.join(KNOWN)}")
    parser.add_argument("--check", action="store_true", help="compare the gains with the recorded ones")
    parser.add_argument("--model", type=Path, default=harness.EMBEDDED_MODEL, help="checkpoint directory")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes of every contender (default 3)")
    parser.add_argument("--quick", action="store_true", help="a tiny workload: for tests, its figures mean nothing")
    parser.add_argument(
        "--impl", choices=("stages", "exercises"), default="stages", help="exercises: your own file of the stage"
    )
    parser.add_argument("--out", type=Path, help="directory for the JSON (default: benchmarks/results)")
    options = parser.parse_args()
    if options.impl == "exercises" and (others := set(options.names) & OTHERS.keys()):
        parser.error(f"--impl exercises needs the number of a stage, and {min(others)!r} is none")
    if options.check:
        return check(options.names, options)
    found = [run(name, options) for name in options.names]
    if missed := [text for _, missed in filter(None, found) for text in missed]:
        sys.exit(f"not as good as it has to be: {'; '.join(missed)}")


if __name__ == "__main__":
    sys.exit(until_ctrl_c(main))
