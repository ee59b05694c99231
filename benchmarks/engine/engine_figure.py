"""Draws the engine beside vLLM and the card's limit: `python -m benchmarks.engine.engine_figure h100`.

Reads throughput.CARD.json and latency.CARD.json, writes docs/figures/engine.CARD.png.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.engine.engine_report import Results, read
from benchmarks.lib import wording
from benchmarks.lib.harness import RESULTS, ROOT
from benchmarks.stages.ladder import HF_COLOUR, STAGE_COLOUR

COLOURS = {"nanovllm": STAGE_COLOUR, "vLLM": HF_COLOUR}


def draw(results: Results, path: Path) -> None:
    """Headline throughput on the left, time a token of small batches on the right; the limits as dashed lines."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot as plt

    throughput, latency = results["throughput"], results["latency"]
    limit = throughput["roofline"]
    with plt.rc_context({"font.size": 16}):
        canvas, (left, right) = plt.subplots(1, 2, figsize=(13, 5.6), layout="constrained", width_ratios=[1, 1.6])
        bars(left, [throughput["figures"][0]], ["256 requests"], limit["tokens_per_second"])
        left.set_ylabel("output tokens/s (more is better)")
        figures = [f for f in latency["figures"] if f["key"].startswith("ms_per_token")]
        names = [f["label"].rpartition(", ")[2] for f in figures]
        bars(right, figures, names, limit["weights_ms"])
        right.set_ylabel("ms a token (less is better)")
        left.set_title("dashed: this workload's limit", fontsize=14)
        right.set_title("dashed: reading the weights once", fontsize=14)
        handles, labels = right.get_legend_handles_labels()
        right.legend(handles, labels, frameon=False, loc="upper left")
        path.parent.mkdir(parents=True, exist_ok=True)
        # No version of matplotlib in the file, so that drawing the same result again gives the same bytes
        canvas.savefig(path, dpi=100, metadata={"Software": None})
        plt.close(canvas)


def bars(axes: Any, figures: list[dict[str, Any]], groups: list[str], limit: float) -> None:
    """A group of bars for each figure, with the spread over the rounds and the median written above."""
    names = [name for name in COLOURS if name in figures[0]["values"]]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        values = [figure["values"][name] for figure in figures]
        places = [group + (i - (len(names) - 1) / 2) * width for group in range(len(groups))]
        medians = [value["median"] for value in values]
        spread = [[v["median"] - v["min"] for v in values], [v["max"] - v["median"] for v in values]]
        axes.bar(places, medians, width, yerr=spread, label=name, color=COLOURS[name], edgecolor="black", capsize=5)
        for place, value in zip(places, values, strict=True):
            text = wording.number(value["median"], figures[0]["unit"])
            axes.annotate(text, (place, value["max"]), (0, 6), textcoords="offset points", ha="center", fontsize=13)
    axes.axhline(limit, color="black", linestyle="--")
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylim(0, 1.15 * max(limit, *(v["max"] for f in figures for v in f["values"].values())))
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the engine beside vLLM.")
    parser.add_argument("card", help="as in the names of the results: h100")
    card = parser.parse_args().card
    results = read([f"throughput.{card}", f"latency.{card}"], RESULTS)
    if len(results) < 2:
        sys.exit(f"throughput.{card}.json and latency.{card}.json are needed in benchmarks/results: run make bench")
    path = ROOT / "docs" / "figures" / f"engine.{card}.png"
    draw(results, path)
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
