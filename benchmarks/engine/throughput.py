"""The headline workload: output tokens a second, beside vLLM and beside what the card could do.

    python -m benchmarks.engine.throughput --out DIR [--vllm-path PATH] [--rounds 2] [--repeats 3]

A process runs the workload several times with fresh token ids; processes take turns.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.engine import ours, run, vllm
from benchmarks.lib import roofline, tables, workloads
from benchmarks.lib.harness import Figure, Measured, Showcase, metric
from benchmarks.lib.process import Engine
from benchmarks.lib.tables import Result

SHORT = (  # benchmark, key of its figure, what the README calls the figure
    ("throughput", "throughput", "output tokens per second, 256 requests at once"),
    ("latency", "ms_per_token_1", "milliseconds per token, 1 request"),
    ("latency", "ms_per_token_8", "milliseconds per token, 8 requests"),
    ("latency", "ms_per_token_32", "milliseconds per token, 32 requests"),
    ("latency", "first_token_ms_1", "milliseconds to the first token, 1 request"),
)


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


def showcase(options: Namespace) -> Showcase:
    limit = roofline.roofline(options)
    tokens_per_second = metric("headline", "tokens_per_second")

    def share(measured: Measured) -> float:
        return 100 * (tokens_per_second(measured) or 0) / limit["tokens_per_second"]

    return Showcase(
        name="throughput",
        title="The headline workload",
        workload=describe(limit),
        contenders=[ours(options), *vllm(options)],
        figures=[
            Figure("throughput", "throughput", "tokens/s", "higher", tokens_per_second),
            Figure("share", "share of the limit", "%", "higher", share),
        ],
        notes=[roofline.describe(limit)],
        arguments={"sizes": limit["workload"]},
        extra={"roofline": limit},
    )


def main() -> None:
    run(showcase, "throughput", __doc__, rounds=2, repeats=3)


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


def short_table(results: dict[str, Result]) -> list[str]:
    """Medians of nanovllm and vLLM, for the README. `results` are those of throughput and latency."""
    lines = tables.head("", "nanovllm", "vLLM", "gain")
    for name, key, title in SHORT:
        figure = tables.figures(results[name])[key]
        cells = (tables.cell(figure, who, "{}") for who in ("nanovllm", "vLLM"))
        lines.append(tables.row(title, *cells, tables.ratio(figure, "nanovllm", "vLLM")))
    throughput = results["throughput"]
    share = tables.figures(throughput)["share"]["values"]
    where = [throughput["machine"]["device"], tables.versions(throughput, "torch"), *tables.rivals([throughput])]
    return [
        *lines,
        "",
        f"The shape of {Path(throughput['model']['name']).name} with random weights; {throughput['workload']}. "
        f"The throughput is {share['nanovllm']['median']:.0f}% of what the card's memory and matrix products allow "
        f"(vLLM's: {share['vLLM']['median']:.0f}%). Measured on {', '.join(where)}.",
    ]


if __name__ == "__main__":
    main()
