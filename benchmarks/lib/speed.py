"""The speed that the README shows: a short table beside vLLM on a GPU, and a sentence about the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.lib.tables import Result, gain, number

ROWS = (  # benchmark, key of its figure, what the README calls the figure
    ("throughput", "throughput", "output tokens per second, 256 requests at once"),
    ("latency", "ms_per_token_1", "milliseconds per token, 1 request"),
    ("latency", "ms_per_token_8", "milliseconds per token, 8 requests"),
    ("latency", "ms_per_token_32", "milliseconds per token, 32 requests"),
    ("latency", "first_token_ms_1", "milliseconds to the first token, 1 request"),
)


def figures(result: Result) -> dict[str, Any]:
    """The figures of a result by key."""
    return {figure["key"]: figure for figure in result["figures"]}


def table(results: dict[str, Result]) -> list[str]:
    """Medians of nanovllm and vLLM, measured in turns on one card. `results` are those of throughput and latency."""
    lines = ["|  | nanovllm | vLLM | gain |", "|---|--:|--:|--:|"]
    for name, key, title in ROWS:
        figure = figures(results[name])[key]
        ours, theirs = (number(figure["values"][who]["median"], figure["unit"]) for who in ("nanovllm", "vLLM"))
        times = number(gain(figure, "nanovllm", "vLLM"), "times")
        lines.append(f"| {title} | {ours} | {theirs} | {times}× |")
    throughput = results["throughput"]
    share = figures(throughput)["share"]["values"]
    versions = {engine["engine"] for engine in throughput["engines"].values()} - {"nanovllm"}
    where = [throughput["machine"]["device"], f"torch {throughput['machine']['torch']}", *sorted(versions)]
    return [
        *lines,
        "",
        f"The shape of {Path(throughput['model']['name']).name} with random weights; {throughput['workload']}. "
        f"The throughput is {share['nanovllm']['median']:.0f}% of what the card's memory and matrix products allow "
        f"(vLLM's: {share['vLLM']['median']:.0f}%). Measured on {', '.join(where)}.",
    ]


def cpu_sentence(results: dict[str, Result]) -> list[str]:
    """The embedded model on a CPU, beside Hugging Face. `results` is that of engine_cpu."""
    result = results["engine_cpu"]
    measured, facts = figures(result), result["machine"]

    def times(key: str, rival: str) -> str:
        return f"{number(gain(measured[key], 'nanovllm', rival), 'times')} times"

    return [
        f"On a CPU ({facts['processor']}, {facts['threads']} thread) the embedded model generates one request "
        f"{times('ms_1', 'HF one by one')} as fast as Hugging Face's `generate`, 16 requests of one length "
        f"{times('rate_16', 'HF one by one')} as fast as `generate` does one by one, and 16 of mixed lengths "
        f"{times('rate_mixed', 'HF padded batch')} as fast as `generate` does in a padded batch.",
    ]
