"""The headline workload: output tokens a second, beside vLLM and beside what the card could do.

    python -m benchmarks.engine.throughput --out DIR [--vllm-path PATH] [--rounds 2] [--repeats 3]

A process runs the workload several times with fresh token ids; processes take turns.
"""

import argparse
import sys
from typing import Any

from benchmarks.engine import ours, parse, vllm
from benchmarks.lib import harness, roofline, tables, workloads
from benchmarks.lib.harness import Comparison, Contender, Figure, Measured, Showcase, metric
from benchmarks.lib.process import Engine
from benchmarks.lib.tables import Result


def measure(engine: Engine, repeats: int, sizes: dict[str, int]) -> list[Measured]:
    """In the process of one contender."""
    chosen = workloads.Sizes(**sizes)
    prompts, _ = workloads.headline(-1, chosen)
    engine.warm_up(prompts, num_tokens=16)  # all of them: kernels are compiled for a step's size as well
    repetitions = []
    for number in range(repeats):
        prompts, max_tokens = workloads.headline(number, chosen)
        seconds = engine.timed(prompts, max_tokens, workloads.TEMPERATURE)
        tokens = sum(max_tokens)
        measured = {"seconds": seconds, "output_tokens": tokens, "tokens_per_second": tokens / seconds}
        repetitions.append({"headline": measured})
    return repetitions


def describe(limit: dict[str, Any]) -> str:
    sizes, costs = limit["workload"], limit["costs"]
    length = f"{sizes['shortest']} to {sizes['longest']}"
    return (
        f"{sizes['num_requests']} requests at once, {length} tokens in and {length} out "
        f"({costs['prompt_tokens']:,} and {costs['output_tokens']:,} in all), temperature {workloads.TEMPERATURE}"
    )


def showcase(contenders: list[Contender], limit: dict[str, Any]) -> Showcase:
    tokens_per_second = metric("headline", "tokens_per_second")

    def share(measured: Measured) -> float:
        return 100 * (tokens_per_second(measured) or 0) / limit["tokens_per_second"]

    return Showcase(
        name="throughput",
        title="The headline workload",
        workload=describe(limit),
        contenders=contenders,
        figures=[
            Figure("throughput", "throughput", "tokens/s", "higher", tokens_per_second),
            Figure("share", "share of the limit", "%", "higher", share),
        ],
        notes=[roofline.describe(limit)],
    )


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    return parse("throughput", __doc__, rounds=2, repeats=3, arguments=arguments)


def compare(options: argparse.Namespace) -> Comparison:
    """Measure, print and write down; options as `parse_options` gives them."""
    limit = roofline.roofline(options)
    shown = showcase([ours(options), *vllm(options)], limit)
    arguments = {"repeats": options.repeats, "sizes": limit["workload"]}
    return harness.compare(shown, "benchmarks.engine.throughput", arguments, options, {"roofline": limit})


def table(results: dict[str, Result]) -> list[str]:
    """Throughput, share of the limit, small batches, start-up and idle time, beside vLLM."""
    lines = tables.head("", "nanovllm", "vLLM", "gain")
    for result in results.values():
        for figure in result["figures"]:
            if figure["key"] in result["shown"]:
                cells = [tables.cell(figure, name) for name in ("nanovllm", "vLLM")]
                lines.append(tables.row(tables.label(figure), *cells, tables.ratio(figure, "nanovllm", "vLLM")))
    lines += ["", f"Workloads: {'; '.join(r['workload'] for r in results.values())}."]
    lines += [f"The {note}." for r in results.values() for note in r["notes"]]
    if {"throughput", "latency"} <= results.keys():
        weights = results["throughput"]["roofline"]["weights_ms"]
        alone = results["latency"]["figures"][0]["values"]["nanovllm"]["median"]
        lines.append(
            f"Reading the weights once takes {weights:.2f} ms, a token at batch 1 {alone / weights:.1f} times that."
        )
    return [*lines, "", tables.origin(results)]


if __name__ == "__main__":
    sys.exit(bool(compare(parse_options()).failures))
