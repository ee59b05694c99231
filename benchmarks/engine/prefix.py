"""A long system prompt that all requests share, as a chat service has it: with the prefix cache and without.

    python -m benchmarks.engine.prefix --out DIR [--vllm-path PATH] [--rounds 1] [--repeats 3]

64 requests open with the same 2,048 tokens and go on with 64 of their own. "All at once": the cache is empty when they
arrive. "After one": a request with the same system prompt came before, which is how a service finds it.
"""

import argparse
import sys
from typing import Any

from benchmarks.engine.engine_harness import Comparison, add_options, check_options, ours, run_process, vllm
from benchmarks.engine.engine_worker import Engine, Repetition, random_prompts
from benchmarks.lib.harness import Contender, Figure, Showcase, metric

SIZES = {"num_requests": 64, "shared": 2048, "own": 64, "num_tokens": 64}
QUICK = {"num_requests": 4, "shared": 48, "own": 4, "num_tokens": 3}


def measure(
    engine: Engine, repeats: int, num_requests: int, shared: int, own: int, num_tokens: int, highest_id: int
) -> list[Repetition]:
    """In the process of one contender. Times are of the whole batch: until the last first token, and until the end."""

    def requests(seed: int) -> list[list[int]]:
        [system] = random_prompts([shared], seed, highest_id)
        return [system + rest for rest in random_prompts([own] * num_requests, seed + 1, highest_id)]

    engine.warm_up(requests(10**6))
    repetitions = []
    for repeat in range(repeats):
        scenarios = {}
        for scenario, seed in (("all at once", 4), ("after one", 8)):
            times = []
            for n in (1, num_tokens):
                prompts = requests(1000 * repeat + 100 * seed + 10 * (n > 1))
                if scenario == "after one":
                    engine.generate(random_ending(prompts[0], own, highest_id), [1])
                times.append(engine.timed(prompts, [n] * num_requests))
            scenarios[scenario] = {"first_tokens_ms": 1e3 * times[0], "requests_per_second": num_requests / times[1]}
        repetitions.append(scenarios)
        print(scenarios, flush=True)
    return repetitions


def random_ending(prompt: list[int], own: int, highest_id: int) -> list[list[int]]:
    """Another request with the same beginning."""
    return [prompt[:-own] + random_prompts([own], 0, highest_id)[0]]


def showcase(contenders: list[Contender], sizes: dict[str, int]) -> Showcase:
    figures = []
    for scenario in ("all at once", "after one"):
        key = scenario.replace(" ", "_")
        first, rate = metric(scenario, "first_tokens_ms"), metric(scenario, "requests_per_second")
        figures += [
            Figure(f"first_{key}", f"until all have a token, {scenario}", "ms", "lower", first),
            Figure(f"rate_{key}", f"throughput, {scenario}", "requests/s", "higher", rate),
        ]
    return Showcase(
        name="prefix",
        title="A shared system prompt",
        workload=f"{sizes['num_requests']} requests: {sizes['shared']:,} tokens in common, {sizes['own']} of their own,"
        f" {sizes['num_tokens']} to generate, greedy",
        contenders=contenders,
        scenarios=[],
        figures=figures,
        headline="first_after_one",
        shown=tuple(figure.key for figure in figures),
        contender=contenders[0].name,
        rival=contenders[1].name,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.prefix", description=(__doc__ or "").split("\n")[0]
    )
    add_options(parser, rounds=1)
    parser.add_argument("--repeats", type=int, default=3, help="measurements in a process (default 3)")
    options = check_options(parser.parse_args())
    sizes: dict[str, Any] = QUICK if options.quick else SIZES
    contenders = [
        ours(options),
        ours(options, "without prefix cache", enable_prefix_caching=False),
        *vllm(options),
    ]
    arguments = {"repeats": options.repeats, **sizes, "highest_id": 500 if options.quick else 10_000}
    comparison = Comparison(showcase(contenders, sizes), options)
    comparison.run(lambda contender: run_process(contender, "benchmarks.engine.prefix", arguments, options))
    sys.exit(1 if comparison.failures else 0)


if __name__ == "__main__":
    main()
