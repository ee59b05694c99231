"""Small batches, where reading the weights and launching kernels decide: time to first token, time a token.

    python -m benchmarks.engine.latency --out DIR [--vllm-path PATH] [--rounds 2] [--repeats 3]

Greedy, 128 tokens in, 512 out. The time a token is the difference between generating 512 tokens and generating one,
over the 511 steps between: so neither prefill nor the cost of a call is in it.
"""

import argparse
import sys
from typing import Any

from benchmarks.engine.engine_harness import Comparison, add_options, check_options, ours, run_process, vllm
from benchmarks.engine.engine_worker import Engine, Repetition, random_prompts
from benchmarks.lib.harness import Contender, Figure, Showcase, metric

BATCHES = (1, 8, 32)


def measure(
    engine: Engine, repeats: int, batches: list[int], prompt_len: int, num_tokens: int, highest_id: int
) -> list[Repetition]:
    """In the process of one contender."""
    for batch in batches:
        engine.warm_up(random_prompts([prompt_len] * batch, 10**6 + batch, highest_id))
    repetitions = []
    for repeat in range(repeats):
        scenarios = {}
        for batch in batches:
            times = []
            for n in (1, num_tokens):
                # Ids of their own for every call, so that a prefix cache finds nothing
                prompts = random_prompts([prompt_len] * batch, 10_000 * repeat + 10 * batch + (n > 1), highest_id)
                times.append(engine.timed(prompts, [n] * batch))
            step = (times[1] - times[0]) / (num_tokens - 1)
            scenarios[f"batch {batch}"] = {"first_token_ms": 1e3 * times[0], "ms_per_token": 1e3 * step}
        repetitions.append(scenarios)
        print(scenarios, flush=True)
    return repetitions


def showcase(contenders: list[Contender], batches: list[int], prompt_len: int, num_tokens: int) -> Showcase:
    figures = []
    for name, label in (("ms_per_token", "time a token"), ("first_token_ms", "time to first token")):
        figures += [
            Figure(f"{name}_{b}", f"{label}, batch {b}", "ms", "lower", metric(f"batch {b}", name)) for b in batches
        ]
    return Showcase(
        name="latency",
        title="Small batches",
        workload=f"greedy, {prompt_len} tokens in, {num_tokens} out, all requests of a batch at once",
        contenders=contenders,
        scenarios=[],
        figures=figures,
        headline=f"ms_per_token_{batches[0]}",
        shown=tuple(figure.key for figure in figures),
        contender=contenders[0].name,
        rival=contenders[-1].name,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.latency", description=(__doc__ or "").split("\n")[0]
    )
    add_options(parser)
    parser.add_argument("--repeats", type=int, default=3, help="measurements in a process (default 3)")
    options = check_options(parser.parse_args())
    sizes: dict[str, Any] = {"batches": list(BATCHES), "prompt_len": 128, "num_tokens": 512}
    if options.quick:
        sizes = {"batches": [1, 2], "prompt_len": 8, "num_tokens": 5}
    arguments = {"repeats": options.repeats, **sizes, "highest_id": 500 if options.quick else 10_000}
    comparison = Comparison(showcase([ours(options), *vllm(options)], **sizes), options)
    comparison.run(lambda contender: run_process(contender, "benchmarks.engine.latency", arguments, options))
    sys.exit(1 if comparison.failures else 0)


if __name__ == "__main__":
    main()
