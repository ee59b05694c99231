"""The engine's benchmarks in virtual time, beside what was recorded on the card.

    python -m benchmarks.engine.simulated [--card h200] [--results benchmarks/results] [--out DIR]

The benchmarks' own functions run the real engine, whose executor computes nothing and takes as long as the card's costs
say. So workload, scheduler and counting are the same, and only the time of a step is a model.
"""

import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from benchmarks.engine import LARGE_SHAPE, SHAPE, arrivals, quantised, speed, tensor_parallel, uses
from benchmarks.lib import harness, tables, workloads
from benchmarks.lib.harness import Measured
from benchmarks.lib.process import Engine
from benchmarks.lib.tables import Result
from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.simulate.costs import IntakeTime, StepCosts, load_costs
from nanovllm.simulate.replica import SimulatedExecutor, VirtualClock

VOCAB_SIZE = 151_936
MAX_MODEL_LEN = 4096  # of all benchmarks
GPU_BLOCK = 256


class VirtualEngine(Engine):
    """The `Engine` of a benchmark's process, in virtual time."""

    def __init__(self, costs: StepCosts, kv_tokens: int, intake: IntakeTime, **config: Any) -> None:
        chosen = {"max_model_len": MAX_MODEL_LEN, "kvcache_block_size": GPU_BLOCK, "async_scheduling": True} | config
        resolved = EngineConfig(num_kv_blocks=kv_tokens // GPU_BLOCK, **chosen)
        self.clock = VirtualClock()
        executor = SimulatedExecutor(costs, self.clock, host_token=0.0, acceptance=0.0, draw=random.Random(0))
        core = LLMEngine(executor, resolved, vocab_size=VOCAB_SIZE, clock=self.clock)
        executor.scheduler = core.scheduler
        self.make_params = SamplingParams
        self.llm = SimpleNamespace(engine=core, generate=partial(generate, core, self.clock, intake))


def generate(
    core: LLMEngine,
    clock: VirtualClock,
    intake: IntakeTime,
    prompts: list[dict[str, Any]],
    params: list[SamplingParams],
    use_tqdm: bool,
) -> list[RequestOutput]:
    """As `LLM.generate`. What this does beside adding requests and computing steps counts before the first step."""
    clock.now += intake.call + intake.answer * len(prompts)
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        own = own.changed(output_kind=RequestOutputKind.FINAL_ONLY)
        core.add_request(f"virtual {i}", prompt["prompt_token_ids"], own)
        clock.now += intake.seconds(len(prompt["prompt_token_ids"]))
    found: list[RequestOutput] = []
    while core.has_unfinished():
        found += core.step()
    return sorted(found, key=lambda output: int(output.request_id.split()[1]))


# --- what is compared -------------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """A contender of a recorded benchmark, and the run that stands for it."""

    result: str  # the name of the JSON
    contender: str
    metrics: tuple[tuple[str, str], ...]  # scenario and metric in it
    run: Callable[[Engine], list[Measured]]
    config: Mapping[str, Any] = MappingProxyType({})
    model: Path = SHAPE
    ranks: int = 1


def by_batch(batches: list[int]) -> tuple[tuple[str, str], ...]:
    return tuple((f"batch {batch}", metric) for batch in batches for metric in ("ms_per_token", "first_token_ms"))


headline = partial(speed.measure_headline, repeats=1, sizes=asdict(workloads.HEADLINE))
small_batches = partial(speed.measure_small, repeats=1, **speed.SMALL)
shared_prefix = partial(arrivals.measure_shared, repeats=1, **arrivals.SHARED)
streams = partial(arrivals.measure_streams, repeats=1, **arrivals.STREAMS)
of_ranks = partial(speed.measure_small, repeats=1, **tensor_parallel.FULL)

# What log-probabilities cost is not modelled
plain_uses = {name: use for name, use in uses.USES.items() if not use.keys() & {"logprobs", "prompt_logprobs"}}
other_uses = partial(uses.measure, repeats=1, uses=plain_uses, long=uses.LONG)
of_shape = partial(quantised.measure, repeats=1, sizes=asdict(workloads.HEADLINE), small=uses.SMALL)

SMALL, RANKS = by_batch(speed.SMALL["batches"]), by_batch(tensor_parallel.FULL["batches"])
SHARED = tuple(
    (s, m) for s in (arrivals.AT_ONCE, arrivals.AFTER_ONE) for m in ("first_tokens_ms", "requests_per_second")
)
USES = *((name, "requests_per_second") for name in plain_uses), *by_batch(list(uses.BATCHES))
OF_SHAPE = (
    ("headline", "tokens_per_second"),
    *((f"batch {batch}", "ms_per_token") for batch in uses.SMALL["batches"]),
)
WAITS = tuple(("mixed", metric) for metric in ("gap_p50_ms", "gap_p99_ms", "prompt_wait_ms"))
RUNS = (
    Compared("throughput", "nanovllm", (("headline", "tokens_per_second"),), headline),
    Compared("latency", "nanovllm", SMALL, small_batches),
    Compared("prefix", "nanovllm", SHARED, shared_prefix),
    Compared("prefix", "without prefix cache", SHARED, shared_prefix, {"enable_prefix_caching": False}),
    Compared("mixed", "chunks of up to 512", WAITS, streams, {"max_num_batched_tokens": 512}),
    Compared("mixed", "chunks of up to 2,048", WAITS, streams, {"max_num_batched_tokens": 2048}),
    Compared("mixed", "default budget", WAITS, streams),
    Compared("uses", "nanovllm", USES, other_uses, {"max_model_len": uses.LONGEST}),
    *(
        Compared(f"shape.{name}", "nanovllm", OF_SHAPE, of_shape, {}, workloads.SHAPES / name)
        for name in ("Llama-3.2-1B", "Qwen2.5-7B")  # as many as were recorded
    ),
    *(
        Compared("tensor_parallel", tensor_parallel.name_of("nanovllm", n), RANKS, of_ranks, {}, LARGE_SHAPE, n)
        for n in (1, 2, 4)  # as many as were recorded
    ),
)
LABELS = {
    "tokens_per_second": "output tokens/s",
    "ms_per_token": "a token (ms)",
    "first_token_ms": "first token (ms)",
    "first_tokens_ms": "until all have a token (ms)",
    "requests_per_second": "requests/s",
    "gap_p50_ms": "gap, median (ms)",
    "gap_p99_ms": "gap, p99 (ms)",
    "prompt_wait_ms": "a long prompt's first token (ms)",
}


def compare(card: str, results: Path, runs: Sequence[Compared] = RUNS) -> list[dict[str, Any]]:
    """A row for each metric that was recorded on the card: what the simulation says, and what was measured."""
    rows = []
    for result, contender, metrics, run, config, model, ranks in runs:
        costs = load_costs(card, model, ranks)
        found = tables.find((result,), costs.card, results)
        if not found:
            continue
        scenarios = [r["scenarios"] for r in found[result]["rounds"] if r["contender"] == contender]
        [simulated] = run(VirtualEngine(costs, costs.kv_tokens, costs.intake, **config))
        for scenario, metric in metrics:
            recorded = [s[scenario][metric] for s in scenarios]
            row: dict[str, Any] = {"benchmark": result, "contender": contender, "scenario": scenario, "metric": metric}
            row |= {"model": costs.model, "derived": not costs.measured, "commit": tables.commit(found[result])}
            spread = {"recorded": statistics.median(recorded), "min": min(recorded), "max": max(recorded)}
            rows.append(row | {"simulated": simulated[scenario][metric], **spread})
    return rows


def off_by(row: dict[str, Any]) -> float:
    """How far the simulation is from what was recorded, in percent."""
    percent: float = 100 * (row["simulated"] / row["recorded"] - 1)
    return percent


def table(results: dict[str, Result]) -> list[str]:
    """A row for each metric."""
    result = results["simulated"]
    lines = tables.head("", "", "simulated", "recorded", "off", left=2)
    for row in result["rows"]:
        who = "" if row["contender"] == "nanovllm" else f", {row['contender'].removeprefix('nanovllm, ')}"
        is_long = row["benchmark"] == "uses" and row["metric"] != "requests_per_second"
        long = f"{uses.LONG['prompt_len']:,} tokens in, " if is_long else ""
        what = f"{row['model']}{who}: {long}{row['scenario']}" + (" (derived)" if row["derived"] else "")
        low, middle, high = (tables.number(row[name], "ms") for name in ("min", "recorded", "max"))
        cells = tables.number(row["simulated"], "ms"), f"{middle} ({low} to {high})", f"{off_by(row):+.1f}%"
        lines.append(tables.row(what, LABELS[row["metric"]], *cells))
    told = (
        f"Costs: {result['source']}. A model that was not measured has them from one that was, by bytes and operations."
    )
    recorded = dict.fromkeys(f"{row['benchmark']} at {row['commit']}" for row in result["rows"])
    told += f" Recorded were {', '.join(recorded)}."
    return [*lines, "", told]


def main(arguments: list[str] | None = None) -> None:
    parser = harness.make_parser("engine.simulated", __doc__)
    parser.add_argument("--card", default="h200", help="a name, or the file of a card (default %(default)s)")
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="where the records are")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="where the result goes")
    options = parser.parse_args(arguments)
    costs = load_costs(options.card, SHAPE)
    rows = compare(options.card, options.results)
    if not rows:
        sys.exit(f"nothing was recorded on {costs.card} in {options.results}")
    result = {"name": "simulated", "source": costs.source, "rows": rows}
    print("\n".join(table({"simulated": result})))
    harness.write_json(result, options.out / f"simulated.{costs.card}.json")


if __name__ == "__main__":
    main()
