"""Requests as a service gets them: with a system prompt in common, and long prompts among running streams.

- `prefix`: 64 requests open with the same 2,048 tokens and go on with 64 of their own, with the prefix cache and
  without. "All at once": the cache is empty when they arrive. "After one": a request with the same system prompt came
  before, which is how a service finds it.
- `mixed`: how long the readers of 32 running streams wait for their next token while every so many tokens of theirs a
  prompt of 3,000 tokens joins. A small token budget cuts it into chunks that ride along with the decodes: no step lasts
  long, and the prompt's own first token comes later. It all goes through `LLMEngine.step`, which reports every token
  when it is there.
"""

import statistics
from argparse import Namespace
from typing import Any

from benchmarks.engine import ours, vllm
from benchmarks.lib.harness import Measured, Showcase, higher, lower
from benchmarks.lib.process import Engine, random_prompts

SHARED: dict[str, Any] = {"num_requests": 64, "shared": 2048, "own": 64, "num_tokens": 64, "highest_id": 10_000}
QUICK_SHARED = {"num_requests": 4, "shared": 48, "own": 4, "num_tokens": 3, "highest_id": 500}
AT_ONCE, AFTER_ONE = "all at once", "after one"

STREAMS: dict[str, Any] = {"streams": 32, "stream_prompt": 128, "tokens": 400, "arrivals": 8, "every": 40}
STREAMS |= {"long_prompt": 3000, "highest_id": 10_000}
QUICK_STREAMS = {"streams": 3, "stream_prompt": 8, "tokens": 12, "arrivals": 2, "every": 4, "long_prompt": 100}
QUICK_STREAMS |= {"highest_id": 500}
WAITS = {
    "gap_p50_ms": "between two tokens of a stream, median",
    "gap_p99_ms": "99th percentile",
    "gap_max_ms": "longest",
    "prompt_wait_ms": "a long prompt's first token",
}


def measure_shared(
    engine: Engine, repeats: int, num_requests: int, shared: int, own: int, num_tokens: int, highest_id: int
) -> list[Measured]:
    """In the process of one contender. Times are of the whole batch: until the last first token, and until the end."""

    def requests(seed: int) -> list[list[int]]:
        [system] = random_prompts([shared], seed, highest_id)
        return [system + rest for rest in random_prompts([own] * num_requests, seed + 1, highest_id)]

    engine.warm_up(requests(10**6))
    repetitions = []
    for repeat in range(repeats):
        scenarios = {}
        for scenario, seed in ((AT_ONCE, 4), (AFTER_ONE, 8)):
            times = []
            for n in (1, num_tokens):
                prompts = requests(1000 * repeat + 100 * seed + 10 * (n > 1))
                if scenario == AFTER_ONE:
                    [other] = random_prompts([own], 0, highest_id)
                    engine.generate([prompts[0][:-own] + other], [1])
                times.append(engine.timed(prompts, [n] * num_requests))
            scenarios[scenario] = {"first_tokens_ms": 1e3 * times[0], "requests_per_second": num_requests / times[1]}
        repetitions.append(scenarios)
    return repetitions


def prefix(options: Namespace) -> Showcase:
    sizes = QUICK_SHARED if options.quick else SHARED
    without = ours(options, "without prefix cache", enable_prefix_caching=False)
    figures = []
    for scenario in (AT_ONCE, AFTER_ONE):
        key = scenario.replace(" ", "_")
        figures.append(lower(f"first_{key}", f"until all have a token, {scenario}", "ms", scenario, "first_tokens_ms"))
        figures.append(higher(f"rate_{key}", f"throughput, {scenario}", "requests/s", scenario, "requests_per_second"))
    return Showcase(
        name="prefix",
        title="A shared system prompt",
        workload=f"{sizes['num_requests']} requests: {sizes['shared']:,} tokens in common, {sizes['own']} of their own,"
        f" {sizes['num_tokens']} to generate, greedy",
        contenders=[ours(options), without, *vllm(options)],
        figures=figures,
        headline="first_after_one",
        rival=without.name,
        measure=measure_shared,
        arguments=sizes,
        repeats=3,
    )


def measure_streams(engine: Engine, repeats: int, **sizes: int) -> list[Measured]:
    """In the process of one contender."""
    highest_id = sizes["highest_id"]
    engine.warm_up(random_prompts([sizes["stream_prompt"]] * sizes["streams"], 10**6, highest_id))
    engine.warm_up(random_prompts([sizes["long_prompt"]], 10**6 + 1, highest_id))
    return [{"mixed": one_run(engine, 1000 * repeat, sizes)} for repeat in range(repeats)]


def one_run(engine: Engine, seed: int, sizes: dict[str, int]) -> dict[str, float]:
    """Gaps between the tokens of the streams, from the first long prompt on; waits of the long prompts."""
    core, highest_id = engine.llm.engine, sizes["highest_id"]
    arrivals, every = sizes["arrivals"], sizes["every"]
    params = engine.make_params(temperature=0.0, ignore_eos=True, max_tokens=sizes["tokens"])
    for i, prompt in enumerate(random_prompts([sizes["stream_prompt"]] * sizes["streams"], seed, highest_id)):
        core.add_request(f"{seed} stream {i}", prompt, params)
    waiting = random_prompts([sizes["long_prompt"]] * arrivals, seed + 1, highest_id)
    one_token = engine.make_params(temperature=0.0, ignore_eos=True, max_tokens=1)
    last: dict[str, float] = {}
    gaps, waits = [], []
    progress, begin = 0, engine.clock()
    while core.has_unfinished():
        if waiting and progress >= every * (arrivals - len(waiting) + 1):
            core.add_request(f"{seed} prompt {len(waiting)}", waiting.pop(), one_token)
        outputs = core.step()
        now = engine.clock()
        for output in outputs:
            if "stream" not in output.request_id:
                waits.append(output.metrics.time_to_first_token)
                continue
            if progress >= every:
                gaps.append(now - last[output.request_id])
            last[output.request_id] = now
            progress = max(progress, len(output.outputs[0].token_ids))
    if len(waits) != arrivals:
        raise RuntimeError(f"{arrivals} long prompts were to arrive, and {len(waits)} were served")
    percentiles = statistics.quantiles(gaps, n=100)
    return {
        "gap_p50_ms": 1e3 * percentiles[49],
        "gap_p99_ms": 1e3 * percentiles[98],
        "gap_max_ms": 1e3 * max(gaps),
        "prompt_wait_ms": 1e3 * statistics.mean(waits),
        "seconds": engine.clock() - begin,
    }


def mixed(options: Namespace) -> Showcase:
    sizes, budgets = (QUICK_STREAMS, (16, 32)) if options.quick else (STREAMS, (512, 2048))
    contenders = [ours(options, f"chunks of up to {n:,}", max_num_batched_tokens=n) for n in budgets]
    contenders.append(ours(options, "default budget"))
    contenders.append(ours(options, "whole prompts", enable_chunked_prefill=False))
    return Showcase(
        name="mixed",
        title="Streams while long prompts arrive",
        workload=f"{sizes['streams']} streams of {sizes['tokens']} tokens; a prompt of {sizes['long_prompt']:,} tokens "
        f"after every {sizes['every']} tokens of theirs, {sizes['arrivals']} in all",
        contenders=contenders,
        figures=[lower(key, label, "ms", "mixed", key) for key, label in WAITS.items()],
        headline="gap_p99_ms",
        measure=measure_streams,
        arguments=sizes,
        repeats=2,
    )
