"""How fast the engine is, beside vLLM: the headline workload, small batches, and the start.

- `throughput`: output tokens per second of the headline workload, beside what the card could do. A process runs the
  workload several times with fresh token ids.
- `sampling`: the same workload and small batches, by the sampling parameters of the requests: those that model cards
  recommend, and those that cost most.
- `latency`: small batches, where reading the weights and launching kernels decide. Greedy, 128 tokens in, 512 out. The
  time per token is the difference between generating 512 tokens and generating one, over the 511 steps between: so
  neither prefill nor the cost of a call is in it.
- `startup`: from starting Python to the first token, with empty compile caches, and once more with what that left in
  them. Imports, loading, compilation, capture of CUDA graphs: all of it counts. The weights are random, so that nothing
  is read from a disk for them; Python's own files are in the page cache, because each library is imported once
  beforehand. It also says what each part of the start takes (`PARTS`); "the rest" is the time between them.
"""

import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine import ours, vllm
from benchmarks.lib import harness, roofline, tables, workloads
from benchmarks.lib.harness import Contender, Figure, Measured, Showcase, by_batch, higher, lower, metric
from benchmarks.lib.process import GREEDY, Engine, measure_start, random_prompts
from benchmarks.lib.tables import Result
from benchmarks.serving import speed as serving

SMALL: dict[str, Any] = {"batches": [1, 8, 32], "prompt_len": 128, "num_tokens": 512, "highest_id": 10_000}
QUICK_SMALL: dict[str, Any] = {"batches": [1, 2], "prompt_len": 8, "num_tokens": 5, "highest_id": 500}
PLAIN = [{"temperature": workloads.TEMPERATURE}]
RECOMMENDED = [PLAIN[0] | {"top_p": 0.95, "top_k": 20}]
PENALTY = [{"temperature": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5}]
KINDS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "plain": ("temperature 0.6", PLAIN),
    "recommended": ("temperature 0.6, top_p 0.95, top_k 20", RECOMMENDED),  # by Qwen3's card, when it thinks
    "penalty": ("temperature 0.7, top_p 0.8, top_k 20, presence_penalty 1.5", PENALTY),
    "min_p": ("temperature 0.6, min_p 0.05", [PLAIN[0] | {"min_p": 0.05}]),
    "logprobs": ("temperature 0.6, logprobs 5", [PLAIN[0] | {"logprobs": 5}]),
    "mixed": ("a third each of the first three", PLAIN + RECOMMENDED + PENALTY),
}
# Where compilers keep what they made: Triton, Inductor, CUDA's own, vLLM
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")
STARTS = (("cold", "empty"), ("warm", "warm"))  # scenario, and its compile caches
# Parts of a start, in order: what nanovllm's log tells (see `process.Parts`), after imports and before a request
LOGGED = (
    *("configuration", "weights", "rest of the kernels' imports", "measuring memory", "KV cache"),
    *("compilation", "rehearsal", "recording"),
)
PARTS = "imports", *LOGGED, "first token"
ON_GPU = "compilation", "rehearsal"
SHORT = (  # benchmark, key of its figure, what the README calls the figure
    ("throughput", "throughput", "output tokens per second, 256 requests at once"),
    ("sampling", "recommended", "the same with top_p 0.95 and top_k 20, as Qwen3's card recommends"),
    ("latency", "ms_per_token_1", "milliseconds per token, 1 request"),
    ("latency", "ms_per_token_32", "milliseconds per token, 32 requests"),
    ("latency", "first_token_ms_1", "milliseconds to the first token, 1 request"),
)


# --- the headline workload --------------------------------------------------------------------------------------------


def measure_headline(
    engine: Engine, repeats: int, sizes: dict[str, int], kinds: dict[str, Any] | None = None
) -> list[Measured]:
    """In the process of one contender. kinds: by scenario, the sampling parameters that the requests get in turn."""
    chosen = workloads.Sizes(**sizes)
    kinds = kinds or {"headline": PLAIN}
    prompts, _ = workloads.headline(-1, chosen)
    for kind in kinds.values():
        engine.warm_up(prompts, 16, kind)  # all of them: kernels are compiled for a step's size as well
    repetitions = []
    for number in range(repeats):
        scenarios = {}
        for place, (name, kind) in enumerate(kinds.items()):
            prompts, max_tokens = workloads.headline(number * len(kinds) + place, chosen)
            seconds, tokens = engine.timed(prompts, max_tokens, kind), sum(max_tokens)
            scenarios[name] = {"seconds": seconds, "output_tokens": tokens, "tokens_per_second": tokens / seconds}
        repetitions.append(scenarios)
    return repetitions


def describe_headline(limit: dict[str, Any]) -> str:
    sizes, costs = limit["workload"], limit["costs"]
    length = f"{sizes['shortest']} to {sizes['longest']}"
    return (
        f"{sizes['num_requests']} requests at once, {length} tokens in and {length} out "
        f"({costs['prompt_tokens']:,} and {costs['output_tokens']:,} in all), temperature {workloads.TEMPERATURE}"
    )


def share_of(limit: dict[str, Any]) -> Figure:
    """The throughput of the headline workload, in percent of what `roofline` found."""
    tokens_per_second = metric("headline", "tokens_per_second")

    def share(measured: Measured) -> float:
        return 100 * (tokens_per_second(measured) or 0) / limit["tokens_per_second"]

    return Figure("share", "share of the limit", "%", "higher", share)


def throughput(options: Namespace) -> Showcase:
    limit = roofline.roofline(options)
    return Showcase(
        name="throughput",
        title="The headline workload",
        workload=describe_headline(limit),
        contenders=[ours(options), *vllm(options)],
        figures=[
            higher("throughput", "throughput", "tokens/s", "headline", "tokens_per_second"),
            share_of(limit),
        ],
        notes=[roofline.describe(limit)],
        measure=measure_headline,
        arguments={"sizes": limit["workload"]},
        rounds=2,
        repeats=3,
        extra={"roofline": limit},
    )


def measure_sampling(
    engine: Engine, repeats: int, sizes: dict[str, int], kinds: dict[str, Any], small: dict[str, Any]
) -> list[Measured]:
    """In the process of one contender: the headline workload by `kinds`, and batches of single tokens by the same."""
    repetitions = measure_headline(engine, repeats, sizes, kinds)
    for name, kind in kinds.items():
        for scenarios, batches in zip(repetitions, measure_small(engine, repeats, **small, kinds=kind), strict=True):
            scenarios[name] |= {batch: measured["ms_per_token"] for batch, measured in batches.items()}
    return repetitions


def sampling(options: Namespace) -> Showcase:
    limit = roofline.roofline(options)
    small = QUICK_SMALL if options.quick else SMALL | {"batches": [1, 32]}
    figures = [higher(key, name, "tokens/s", name, "tokens_per_second") for key, (name, _) in KINDS.items()]
    figures += [
        lower(f"{key}_{batch}", f"{name}, batch {batch}", "ms", name, f"batch {batch}")
        for key, (name, _) in KINDS.items()
        for batch in small["batches"]
    ]
    return Showcase(
        name="sampling",
        title="The headline workload by sampling parameters",
        workload=describe_headline(limit).rpartition(",")[0],
        contenders=[ours(options), *vllm(options)],
        figures=figures,
        headline="recommended",
        measure=measure_sampling,
        arguments={"sizes": limit["workload"], "kinds": dict(KINDS.values()), "small": small},
        rounds=2,
        repeats=2,
    )


# --- small batches ----------------------------------------------------------------------------------------------------


def measure_small(
    engine: Engine,
    repeats: int,
    batches: list[int],
    prompt_len: int,
    num_tokens: int,
    highest_id: int,
    kinds: Sequence[dict[str, Any]] = GREEDY,
) -> list[Measured]:
    """In the process of one contender. The requests get the `kinds` of sampling parameters in turn."""
    for batch in batches:
        engine.warm_up(random_prompts([prompt_len] * batch, 10**6 + batch, highest_id), kinds=kinds)
    repetitions = []
    for repeat in range(repeats):
        scenarios = {}
        for batch in batches:
            times = []
            for n in (1, num_tokens):
                # Ids of their own for every call, so that a prefix cache finds nothing
                prompts = random_prompts([prompt_len] * batch, 10_000 * repeat + 10 * batch + (n > 1), highest_id)
                times.append(engine.timed(prompts, [n] * batch, kinds))
            step = (times[1] - times[0]) / (num_tokens - 1)
            scenarios[f"batch {batch}"] = {"first_token_ms": 1e3 * times[0], "ms_per_token": 1e3 * step}
        repetitions.append(scenarios)
    return repetitions


def of_small_batches(
    name: str,
    title: str,
    contenders: list[Contender],
    sizes: dict[str, Any],
    token: str = "time per token",
    **more: Any,
) -> Showcase:
    figures = by_batch("ms_per_token", token, sizes["batches"])
    figures += by_batch("first_token_ms", "time to first token", sizes["batches"])
    workload = f"greedy, {sizes['prompt_len']} tokens in, {sizes['num_tokens']} out, all requests of a batch at once"
    more = {"measure": measure_small, "arguments": sizes, "repeats": 3, **more}
    return Showcase(name, title, workload, contenders, figures, **more)


def latency(options: Namespace) -> Showcase:
    sizes = QUICK_SMALL if options.quick else SMALL
    return of_small_batches("latency", "Small batches", [ours(options), *vllm(options)], sizes, rounds=2)


# --- the start --------------------------------------------------------------------------------------------------------


def cold_and_warm(contender: Contender, options: Namespace) -> dict[str, Any]:
    """Two processes in turn, on caches that are empty at first."""
    import_once(contender)
    with tempfile.TemporaryDirectory() as scratch:
        caches = {name: str(Path(scratch) / name.lower()) for name in CACHES}
        cold, warm = (harness.run_process(contender, measure_start, {}, options, caches) for _ in range(2))
    scenarios = {"cold": cold["repetitions"][0]["start"], "warm": warm["repetitions"][0]["start"]}
    return {**warm, "repetitions": [scenarios]}


def import_once(contender: Contender) -> None:
    command = [sys.executable, "-c", f"from {contender.spec['package']} import LLM; import triton"]
    subprocess.run(command, cwd=harness.ROOT, env=harness.python_path(contender), capture_output=True)


def startup(options: Namespace) -> Showcase:
    return Showcase(
        name="startup",
        title="From starting Python to the first token",
        workload="a prompt of 3 tokens; random weights",
        contenders=[ours(options), *vllm(options)],
        figures=[
            *(
                lower(kind, f"start to first token, {caches} compile caches", "s", kind, "seconds")
                for kind, caches in STARTS
            ),
            *(
                lower(f"{part} {kind}", f"{part}, {caches} compile caches", "s", kind, part)
                for part in (*PARTS, "the rest")
                if options.device != "cpu" or part not in ON_GPU
                for kind, caches in STARTS
            ),
        ],
        headline="warm",
        shown=("cold", "warm"),
        run=cold_and_warm,
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def beside_vllm(figure: dict[str, Any], spread: str = "{} ({} to {})") -> list[str]:
    """The cells of nanovllm, vLLM and the gain."""
    names = "nanovllm", "vLLM"
    return [*(tables.cell(figure, name, spread) for name in names), tables.ratio(figure, *names)]


def table(results: dict[str, Result]) -> list[str]:
    """Throughput, share of the limit, small batches, start-up and idle time, beside vLLM."""
    lines = tables.head("", "nanovllm", "vLLM", "gain")
    for result in results.values():
        for figure in result["figures"]:
            if figure["key"] in result["shown"]:
                lines.append(tables.row(tables.label(figure), *beside_vllm(figure)))
    lines += ["", f"Workloads: {'; '.join(r['workload'] for r in results.values())}."]
    lines += [f"The {note}." for r in results.values() for note in r["notes"]]
    if {"throughput", "latency"} <= results.keys():
        weights = results["throughput"]["roofline"]["weights_ms"]
        alone = results["latency"]["figures"][0]["values"]["nanovllm"]["median"]
        lines.append(
            f"Reading the weights once takes {weights:.2f} ms, a token at batch 1 {alone / weights:.1f} times that."
        )
    return [*lines, "", tables.origin(results)]


def sampling_table(results: dict[str, Result]) -> list[str]:
    """Each kind of sampling parameters beside vLLM, and beside the plain temperature."""
    [result] = results.values()
    found = tables.figures(result)
    lines = tables.head("", "nanovllm", "vLLM", "gain", "nanovllm, beside temperature alone")
    for figure in result["figures"]:
        batch = f"_{figure['key'].rpartition('_')[2]}" if figure["unit"] == "ms" else ""
        plain = found[f"plain{batch}"]
        ours, base = (f["values"]["nanovllm"]["median"] for f in (figure, plain))
        beside = "–" if figure is plain else f"{100 * (ours / base - 1):+.1f}%"
        lines.append(tables.row(tables.label(figure), *beside_vllm(figure), beside))
    return [*lines, "", f"Workload: {result['workload']}.", "", tables.origin(results)]


def short_table(results: dict[str, Result]) -> list[str]:
    """Medians of nanovllm and vLLM, for the README. `results` are those of throughput, sampling, latency and the
    server, of which sampling and the server may be missing."""
    lines = tables.head("", "nanovllm", "vLLM", "gain")
    for name, key, title in SHORT:
        if name == "sampling" and name not in results:
            continue
        figure = tables.figures(results[name])[key]
        lines.append(tables.row(title, *beside_vllm(figure, "{}")))
    if "serving_speed" in results and (row := serving.short_row(results["serving_speed"])):
        lines.append(tables.row(*row))
    result = results["throughput"]
    share = tables.figures(result)["share"]["values"]
    where = [result["machine"]["device"], tables.versions(result, "torch"), *tables.rivals([result])]
    return [
        *lines,
        "",
        f"The shape of {Path(result['model']['name']).name} with random weights; {result['workload']}. "
        f"The throughput is {share['nanovllm']['median']:.0f}% of what the card's memory and matrix products allow "
        f"(vLLM's: {share['vLLM']['median']:.0f}%). Measured on {', '.join(where)}.",
    ]
