"""A step of an 8B model on 1, 2 and 4 GPUs, beside vLLM, and where its time goes.

    python -m benchmarks.engine.tensor_parallel --ranks 2 --out DIR [--vllm-path PATH] [--rounds 1]

Random weights of the shape of Qwen3-8B, greedy, 128 tokens in, 257 out, at batch 1 and 32. A step is the difference
between generating 257 tokens and generating one, over the 256 steps between (see `benchmarks/engine/latency.py`).

Where it goes is reckoned, not traced: reading the weights and keys of a rank at the bandwidth that a plain read kernel
reaches, and as many all-reduces as the model has, at what one takes by itself. What is left is all the rest.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.engine import LARGE_SHAPE, check_options, latency, make_parser, ours, vllm
from benchmarks.kernels import all_reduce
from benchmarks.lib import harness, tables
from benchmarks.lib.harness import Comparison, Contender, Showcase, by_batch
from benchmarks.lib.roofline import Needs
from benchmarks.lib.tables import Result, cell, row
from nanovllm.models.config import ModelConfig, read_config
from nanovllm.models.sharding import shard_config

TARGET = 0.85  # of vLLM's time for a step
MAX_NUM_SEQS = 64
PARTS = ("weights", "keys", "all-reduces", "rest")
FULL: dict[str, Any] = {"batches": [1, 32], "prompt_len": 128, "num_tokens": 257, "highest_id": 10_000}
QUICK: dict[str, Any] = {"batches": [1, 2], "prompt_len": 8, "num_tokens": 5, "highest_id": 500}


def name_of(package: str, ranks: int) -> str:
    return f"{package}, {ranks} rank{'s' if ranks > 1 else ''}"


def numbers_of_ranks(options: argparse.Namespace) -> list[int]:
    return [n for n in (1, 2, 4, 8) if options.least <= n <= options.ranks]


def contenders(options: argparse.Namespace) -> list[Contender]:
    """For each number of ranks first ours, then vLLM if it can be imported."""
    found = []
    for n in numbers_of_ranks(options):
        config: dict[str, Any] = {"tensor_parallel_size": n, "max_num_seqs": MAX_NUM_SEQS}
        found.append(ours(options, name_of("nanovllm", n), **config))
        found += vllm(options, name_of("vLLM", n), **config)
    return found


def showcase(options: argparse.Namespace, sizes: dict[str, Any]) -> Showcase:
    everybody, numbers = contenders(options), numbers_of_ranks(options)
    ours, theirs = name_of("nanovllm", numbers[-1]), name_of("vLLM", numbers[-1])
    figures = by_batch("ms_per_token", "a step", sizes["batches"])
    figures += by_batch("first_token_ms", "time to first token", sizes["batches"])
    return Showcase(
        name="tensor_parallel",
        title="A step on several GPUs",
        workload=latency.describe(sizes),
        contenders=everybody,
        figures=figures,
        contender=ours,
        rival=theirs if theirs in {c.name for c in everybody} else name_of("nanovllm", numbers[0]),
    )


def num_all_reduces(model: ModelConfig) -> int:
    """Of a step: behind the embedding, and behind attention and MLP of each layer."""
    return 2 * model.num_hidden_layers + 1


def share_of_step(
    model: ModelConfig, ranks: int, batch: int, keys: float, latencies: dict[str, Any], itemsize: int
) -> dict[str, float]:
    """Milliseconds of a decode step of one rank: {"weights": ..., "keys": ..., "all-reduces": ...}, each at its best.

    keys: how many a sequence has, on average over the steps. latencies: of `all_reduce.latencies`.
    """
    needs, rate = Needs(shard_config(model, ranks), itemsize), latencies["bytes_per_second"]
    parts = {"weights": 1e3 * needs.weight_bytes / rate, "keys": 1e3 * batch * keys * needs.key_bytes / rate}
    if ranks > 1:
        message = batch * model.hidden_size * itemsize
        fitting = next((row for row in latencies["rows"] if row["bytes"] >= message), latencies["rows"][-1])
        by_one_shot = message <= latencies["one_shot_bytes"] and "one-shot" in fitting
        parts["all-reduces"] = num_all_reduces(model) * fitting["one-shot" if by_one_shot else "NCCL"] / 1e3
    return parts


def where_it_goes(
    result: dict[str, Any], latencies: list[dict[str, Any]], model: ModelConfig, sizes: dict[str, Any]
) -> Any:
    """For each number of ranks and each batch: what the parts take, and the rest. Empty on a CPU."""
    by_ranks = {found["ranks"]: found for found in latencies if found["bytes_per_second"]}
    if not by_ranks:
        return []
    found = []
    keys = sizes["prompt_len"] + sizes["num_tokens"] / 2
    for batch in sizes["batches"]:
        steps = next(f for f in result["figures"] if f["key"] == f"ms_per_token_{batch}")["values"]
        for ranks in [1, *by_ranks]:
            if (name := name_of("nanovllm", ranks)) in steps:
                fitting = by_ranks.get(ranks, next(iter(by_ranks.values())))
                parts = share_of_step(model, ranks, batch, keys, fitting, itemsize=2)
                step = steps[name]["median"]
                where = {"ranks": ranks, "batch": batch, "step": step, **parts, "rest": step - sum(parts.values())}
                found.append(where)
    return found


class TensorParallel(Comparison):
    """Adds where the time goes to whatever is written down. sizes: of the workload."""

    sizes: dict[str, Any]

    def result(self) -> dict[str, Any]:
        made = super().result()
        model = read_config(Path(self.options.model))
        return made | {"where": where_it_goes(made, self.extra["all_reduce"], model, self.sizes)}


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("tensor_parallel", __doc__, repeats=3)
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4, 8), help="the most (default %(default)s)")
    parser.add_argument("--least", type=int, default=1, choices=(1, 2, 4, 8), help="the fewest (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.least > options.ranks:
        parser.error(f"--least {options.least} is more than --ranks {options.ranks}")
    options.model = options.model or (None if options.quick else LARGE_SHAPE)
    return check_options(options)


def main() -> None:
    options = parse_options()
    sizes = QUICK if options.quick else FULL
    several = [n for n in numbers_of_ranks(options) if n > 1]
    latencies = [all_reduce.latencies(n, options.device, options.quick) for n in several]
    for found in latencies:
        print(*(f"{found['ranks']} ranks: {row}" for row in found["rows"]), sep="\n", flush=True)
        print(*(f"{kind}: {why}" for kind, why in found["failures"].items()), sep="\n", flush=True)
    arguments = {"repeats": options.repeats, **sizes}
    comparison = TensorParallel(showcase(options, sizes), options, {"all_reduce": latencies})
    comparison.sizes = sizes
    comparison.run(lambda c: harness.run_process(c, "benchmarks.engine.latency", arguments, options))
    sys.exit(bool(comparison.failures))


# --- tables -----------------------------------------------------------------------------------------------------------


def steps_table(result: dict[str, Any]) -> list[str]:
    """A row for each batch and number of ranks: ours, vLLM's, ours in parts of vLLM's, and against one rank."""
    share = f"of vLLM's (goal: at most {TARGET})"
    lines = tables.head("ranks", "batch", "nanovllm (ms)", "vLLM (ms)", share, "against 1 rank", left=0)
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
    lines = tables.head("ranks", "batch", "a step (ms)", *PARTS, left=0)
    for where in result["where"]:
        parts = (f"{where[part]:.2f}" if part in where else "–" for part in PARTS)
        lines.append(row(str(where["ranks"]), str(where["batch"]), f"{where['step']:.2f}", *parts))
    return ["", *lines]


def all_reduce_table(result: dict[str, Any]) -> list[str]:
    """Microseconds by the size of the message, for each number of ranks and each way."""
    measured = [found for found in result["all_reduce"] if found["rows"]]
    if not measured:
        return []
    columns = [(found, way) for found in measured for way in found["rows"][0] if way != "bytes"]
    names = [f"{way}, {found['ranks']} ranks (us)" for found, way in columns]
    lines = ["", *tables.head("all-reduce of (KiB)", *names, left=0)]
    for i, entry in enumerate(measured[0]["rows"]):
        times = [found["rows"][i].get(way) for found, way in columns]
        cells = ("–" if time is None else tables.number(time, "us") for time in times)
        lines.append(row(f"{entry['bytes'] / 1024:g}", *cells))
    return lines


def table(results: dict[str, Result]) -> list[str]:
    """Steps beside vLLM, where they go, and the all-reduces."""
    result = results["tensor_parallel"]
    lines = steps_table(result) + parts_table(result) + all_reduce_table(result)
    return [*lines, "", f"Workload: {result['workload']}.", "", tables.origin(results)]


if __name__ == "__main__":
    main()
