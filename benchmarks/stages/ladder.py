"""One identical workload through Hugging Face and every stage: `make ladder`.

    python -m benchmarks.stages.ladder [--model DIRECTORY] [--threads 1] [--rounds 3] [--quick] [--figure PNG]

Prints a table, writes benchmarks/results/ladder.json and draws docs/figures/ladder.png from it.
"""

import sys
from pathlib import Path
from typing import Any

from benchmarks.lib import harness, tables
from benchmarks.lib.harness import Showcase, higher, lower, make_parser
from benchmarks.lib.tables import Result
from benchmarks.lib.workloads import Scenario, make_requests, mixed_lengths, share_prefix
from benchmarks.stages.runners import hf_contender, stage_contender
from benchmarks.stages.showcases import HF_BATCH, HF_ONE, range_of
from benchmarks.stages.stage_bench import add_options, footer, measure, vocab_size
from tools import until_ctrl_c

FIGURE = harness.ROOT / "docs" / "figures" / "ladder.png"
# Okabe and Ito's palette: told apart with any colour vision, and in grey
STAGE_COLOUR, HF_COLOUR = "#0072B2", "#B9B9B9"


def showcase(vocab_size: int, quick: bool = False) -> Showcase:
    count, prompt, output, shared, slots = (
        (4, (4, 12), (2, 4), 16, 128) if quick else (18, (16, 64), (8, 24), 192, 1536)
    )
    own = make_requests(mixed_lengths(count, prompt, output, seed=7, long_every=6, long=3), vocab_size, seed=7)
    with_prefix = share_prefix(own, shared, vocab_size, seed=7)
    requests = [with_prefix[i] if i % 3 else own[i] for i in range(count)]  # two in three share their beginning
    contenders = [hf_contender(HF_ONE), hf_contender(HF_BATCH, batch=True)]
    contenders.append(hf_contender("HF padded, any memory", batch=True, limited=False))
    contenders += [stage_contender(n) for n in (1, 2, 3, 4, 5)]
    return Showcase(
        name="ladder",
        title="One workload through every stage",
        workload=f"{count} requests of {range_of(prompt, output)}, every sixth three times as long; two in three open "
        f"with the same {shared} tokens; KV memory for {slots} tokens, at most 8 sequences in a step"
        " (Hugging Face once with all the memory it wants)",
        contenders=contenders,
        scenarios=[Scenario("ladder", [requests], kv_slots=slots, max_num_seqs=8)],
        figures=[
            higher("throughput", "throughput", "tokens/s", "ladder", "tokens_per_second"),
            lower("ttft", "time to first token", "ms", "ladder", "ttft_ms"),
            higher("at_once", "sequences at once", "", "ladder", "most_at_once"),
        ],
        shown=("throughput",),
        contender="stage 5",
        rival="stage 1",
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Throughput of every contender as bars, with the spread over the rounds; legible at half the page's width."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot as plt

    figure = tables.figures(result)["throughput"]
    titles, values = tables.contender_titles(), figure["values"]
    labels = [titles.get(name, name) for name in values]
    medians = [value["median"] for value in values.values()]
    below = [value["median"] - value["min"] for value in values.values()]
    above = [value["max"] - value["median"] for value in values.values()]
    colours = [STAGE_COLOUR if name in titles else HF_COLOUR for name in values]

    with plt.rc_context({"font.size": 16}):
        canvas, axes = plt.subplots(figsize=(10, 5.6), layout="constrained")
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
        plt.close(canvas)


def table(results: dict[str, Result]) -> list[str]:
    """A row for each contender."""
    result = results["ladder"]
    titles, figures = tables.contender_titles(), result["figures"]
    throughput = tables.figures(result)[result["headline"]]
    lines = tables.head("", *map(tables.label, figures), "against stage 1")
    for name in tables.contenders(result):
        cells = [tables.cell(figure, name, "{}") for figure in figures]
        lines.append(tables.row(titles.get(name, name), *cells, tables.ratio(throughput, name, result["rival"])))
    return [*lines, "", f"Workload: {result['workload']}.", *footer([result])]


def main() -> None:
    parser = make_parser("stages.ladder", __doc__)
    add_options(parser)
    parser.add_argument("--figure", type=Path, default=FIGURE, help="where the picture goes")
    options = parser.parse_args()
    result = measure(showcase(vocab_size(options.model), options.quick), options)
    draw(result, options.figure)


if __name__ == "__main__":
    sys.exit(until_ctrl_c(main))
