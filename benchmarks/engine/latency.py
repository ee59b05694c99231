"""Small batches, where reading the weights and launching kernels decide: time to first token, time per token.

    python -m benchmarks.engine.latency --out DIR [--vllm-path PATH] [--rounds 2] [--repeats 3]

Greedy, 128 tokens in, 512 out. The time per token is the difference between generating 512 tokens and generating one,
over the 511 steps between: so neither prefill nor the cost of a call is in it.
"""

from argparse import Namespace
from typing import Any

from benchmarks.engine import ours, run, vllm
from benchmarks.lib.harness import Measured, Showcase, by_batch
from benchmarks.lib.process import Engine, random_prompts

SIZES: dict[str, Any] = {"batches": [1, 8, 32], "prompt_len": 128, "num_tokens": 512, "highest_id": 10_000}
QUICK: dict[str, Any] = {"batches": [1, 2], "prompt_len": 8, "num_tokens": 5, "highest_id": 500}


def measure(
    engine: Engine, repeats: int, batches: list[int], prompt_len: int, num_tokens: int, highest_id: int
) -> list[Measured]:
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
    return repetitions


def describe(sizes: dict[str, Any]) -> str:
    return f"greedy, {sizes['prompt_len']} tokens in, {sizes['num_tokens']} out, all requests of a batch at once"


def showcase(options: Namespace) -> Showcase:
    sizes = QUICK if options.quick else SIZES
    figures = by_batch("ms_per_token", "time per token", sizes["batches"])
    figures += by_batch("first_token_ms", "time to first token", sizes["batches"])
    contenders = [ours(options), *vllm(options)]
    return Showcase("latency", "Small batches", describe(sizes), contenders, figures, arguments=sizes)


def main() -> None:
    run(showcase, "latency", __doc__, rounds=2, repeats=3)


if __name__ == "__main__":
    main()
