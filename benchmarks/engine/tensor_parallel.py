"""A step of an 8B model on 1, 2 and 4 GPUs, beside vLLM, and where its time goes.

    python -m benchmarks.engine.tensor_parallel --ranks 2 --out DIR [--vllm-path PATH] [--rounds 1]

Random weights of the shape of Qwen3-8B, greedy, 128 tokens in, 257 out, at batch 1 and 32. A step is the difference
between generating 257 tokens and generating one, over the 256 steps between (see `benchmarks/engine/latency.py`).

Where it goes is reckoned, not traced: reading the weights and keys of a rank at the bandwidth that a plain read kernel
reaches, and as many all-reduces as the model has, at what one takes by itself. What is left is all the rest.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.engine_harness import Comparison, add_options, check_options, ours, run_process, vllm
from benchmarks.kernels import all_reduce
from benchmarks.lib.harness import EMBEDDED_MODEL, ROOT, Contender, Figure, Showcase, metric
from benchmarks.lib.roofline import num_parameters
from nanovllm.models.config import ModelConfig, read_config
from nanovllm.models.sharding import shard_config

SHAPE = ROOT / "benchmarks" / "shapes" / "Qwen3-8B"
TARGET = 0.85  # of vLLM's time for a step
MAX_NUM_SEQS = 64
FULL: dict[str, Any] = {"batches": [1, 32], "prompt_len": 128, "num_tokens": 257}
QUICK: dict[str, Any] = {"batches": [1, 2], "prompt_len": 8, "num_tokens": 5}


def name_of(package: str, ranks: int) -> str:
    return f"{package}, {ranks} rank{'s' if ranks > 1 else ''}"


def numbers_of_ranks(options: argparse.Namespace) -> list[int]:
    return [n for n in (1, 2, 4, 8) if options.least <= n <= options.ranks]


def contenders(options: argparse.Namespace) -> list[Contender]:
    """For each number of ranks first ours, then vLLM if it can be imported."""
    found = []
    for n in numbers_of_ranks(options):
        config: dict[str, Any] = {"tensor_parallel_size": n, "max_num_seqs": MAX_NUM_SEQS}
        found += [ours(options, name_of("nanovllm", n), **config), *vllm(options, name_of("vLLM", n), **config)]
    return found


def showcase(options: argparse.Namespace, batches: list[int], prompt_len: int, num_tokens: int) -> Showcase:
    everybody = contenders(options)
    figures = [
        Figure(f"{key}_{b}", f"{label}, batch {b}", "ms", "lower", metric(f"batch {b}", key))
        for key, label in (("ms_per_token", "a step"), ("first_token_ms", "time to first token"))
        for b in batches
    ]
    numbers = numbers_of_ranks(options)
    largest = numbers[-1]
    beside_vllm = name_of("vLLM", largest) in {c.name for c in everybody}
    return Showcase(
        name="tensor_parallel",
        title="A step on several GPUs",
        workload=f"greedy, {prompt_len} tokens in, {num_tokens} out, all requests of a batch at once",
        contenders=everybody,
        scenarios=[],
        figures=figures,
        headline=f"ms_per_token_{batches[0]}",
        shown=tuple(figure.key for figure in figures),
        contender=name_of("nanovllm", largest),
        rival=name_of("vLLM", largest) if beside_vllm else name_of("nanovllm", numbers[0]),
    )


def num_all_reduces(model: ModelConfig) -> int:
    """Of a step: behind the embedding, and behind attention and MLP of each layer."""
    return 2 * model.num_hidden_layers + 1


def share_of_step(
    model: ModelConfig, ranks: int, batch: int, keys: float, latencies: dict[str, Any], itemsize: int
) -> dict[str, float]:
    """Milliseconds of a decode step of one rank: {"weights": ..., "keys": ..., "all-reduces": ...}, each at its best.

    keys: how many a sequence has, on average over the steps. latencies: of `all_reduce.table`.
    """
    share = shard_config(model, ranks)
    parameters = num_parameters(share)
    read = parameters["all"] - (0 if model.tie_word_embeddings else parameters["head"])
    key_bytes = 2 * share.num_hidden_layers * share.num_key_value_heads * share.head_dim * itemsize
    rate = latencies["bytes_per_second"]
    parts = {"weights": 1e3 * read * itemsize / rate, "keys": 1e3 * batch * keys * key_bytes / rate}
    if ranks > 1:
        message = batch * model.hidden_size * itemsize
        fitting = next((row for row in latencies["rows"] if row["bytes"] >= message), latencies["rows"][-1])
        by_one_shot = message <= latencies["one_shot_bytes"] and "one-shot" in fitting
        parts["all-reduces"] = num_all_reduces(model) * fitting["one-shot" if by_one_shot else "NCCL"] / 1e3
    return parts


def where_it_goes(
    result: dict[str, Any], tables: list[dict[str, Any]], model: ModelConfig, sizes: dict[str, Any]
) -> Any:
    """For each number of ranks and each batch: what the parts take, and the rest. Empty on a CPU."""
    by_ranks = {table["ranks"]: table for table in tables if table["bytes_per_second"]}
    if not by_ranks:
        return []
    found = []
    keys = sizes["prompt_len"] + sizes["num_tokens"] / 2
    for batch in sizes["batches"]:
        steps = next(f for f in result["figures"] if f["key"] == f"ms_per_token_{batch}")["values"]
        for ranks in [1, *by_ranks]:
            if (name := name_of("nanovllm", ranks)) in steps:
                table = by_ranks.get(ranks, next(iter(by_ranks.values())))
                parts = share_of_step(model, ranks, batch, keys, table, itemsize=2)
                step = steps[name]["median"]
                found.append(
                    {"ranks": ranks, "batch": batch, "step": step, **parts, "rest": step - sum(parts.values())}
                )
    return found


@dataclass(kw_only=True)
class TensorParallel(Comparison):
    """Adds where the time goes to whatever is written down."""

    sizes: dict[str, Any]

    def result(self) -> dict[str, Any]:
        made = super().result()
        model = read_config(Path(self.options.model))
        return made | {"where": where_it_goes(made, self.extra["all_reduce"], model, self.sizes)}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.tensor_parallel", description=(__doc__ or "").split("\n")[0]
    )
    add_options(parser, rounds=1)
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4, 8), help="the most (default %(default)s)")
    parser.add_argument("--least", type=int, default=1, choices=(1, 2, 4, 8), help="the fewest (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="measurements in a process (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.least > options.ranks:
        parser.error(f"--least {options.least} is more than --ranks {options.ranks}")
    options.model = options.model or (EMBEDDED_MODEL if options.quick else SHAPE)
    return check_options(options)


def main() -> None:
    options = parse()
    sizes = QUICK if options.quick else FULL
    tables = [all_reduce.table(n, options.device, options.quick) for n in numbers_of_ranks(options) if n > 1]
    for table in tables:
        print(*(f"{table['ranks']} ranks: {row}" for row in table["rows"]), sep="\n", flush=True)
        print(*(f"{kind}: {why}" for kind, why in table["failures"].items()), sep="\n", flush=True)
    arguments = {"repeats": options.repeats, **sizes, "highest_id": 500 if options.quick else 10_000}
    comparison = TensorParallel(showcase(options, **sizes), options, {"all_reduce": tables}, sizes=sizes)
    comparison.run(lambda contender: run_process(contender, "benchmarks.engine.latency", arguments, options))
    sys.exit(1 if comparison.failures else 0)


if __name__ == "__main__":
    main()
