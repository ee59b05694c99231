"""One identical workload through Hugging Face and every stage: `make ladder`.

    python -m benchmarks.stages.ladder [--model DIRECTORY] [--threads 1] [--rounds 3] [--quick] [--figure PNG]

Prints a table, writes benchmarks/results/ladder.json and draws docs/figures/ladder.png from it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib import harness, tables
from benchmarks.stages.showcases import ladder
from benchmarks.stages.stage_bench import add_options, measure, vocab_size
from tools.ctrl_c import until_ctrl_c

FIGURE = harness.ROOT / "docs" / "figures" / "ladder.png"
# Okabe and Ito's palette: told apart with any colour vision, and in grey
STAGE_COLOUR, HF_COLOUR = "#0072B2", "#B9B9B9"


def draw(result: dict[str, Any], path: Path) -> None:
    """Throughput of every contender as bars, with the spread over the rounds; legible at half the page's width."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot as plt

    figure = next(f for f in result["figures"] if f["key"] == "throughput")
    titles = tables.contender_titles()
    values = figure["values"]
    labels = [titles.get(name, name) for name in values]
    medians = [value["median"] for value in values.values()]
    below = [value["median"] - value["min"] for value in values.values()]
    above = [value["max"] - value["median"] for value in values.values()]
    colours = [STAGE_COLOUR if name in titles else HF_COLOUR for name in values]

    with plt.rc_context({"font.size": 16}):
        canvas, axes = plt.subplots(figsize=(10, 5.6), layout="constrained")
        axes.barh(labels, medians, xerr=[below, above], color=colours, edgecolor="black", ecolor="black", capsize=5)
        for row, (median, upper) in enumerate(zip(medians, above, strict=True)):
            axes.annotate(
                tables.number(median, "tokens/s"),
                (median + upper, row),
                (8, 0),
                textcoords="offset points",
                va="center",
            )
        axes.invert_yaxis()
        axes.set_xlim(0, 1.18 * max(m + a for m, a in zip(medians, above, strict=True)))
        axes.set_xlabel(f"output {figure['unit']} (median of {tables.num_rounds(result)} rounds)")
        axes.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        # No version of matplotlib in the file, so that drawing the same result again gives the same bytes
        canvas.savefig(path, dpi=100, metadata={"Software": None})
        plt.close(canvas)


def main() -> None:
    parser = argparse.ArgumentParser(description="One workload through every stage and Hugging Face.")
    add_options(parser)
    parser.add_argument("--figure", type=Path, default=FIGURE, help="where the picture goes")
    options = parser.parse_args()
    result = measure(ladder(vocab_size(options.model), options.quick), options)
    draw(result, options.figure)


if __name__ == "__main__":
    sys.exit(until_ctrl_c(main))
