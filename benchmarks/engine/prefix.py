"""A long system prompt that all requests share, as a chat service has it: with the prefix cache and without.

    python -m benchmarks.engine.prefix --out DIR [--vllm-path PATH] [--rounds 1] [--repeats 3]

64 requests open with the same 2,048 tokens and go on with 64 of their own. "All at once": the cache is empty when they
arrive. "After one": a request with the same system prompt came before, which is how a service finds it.
"""

from argparse import Namespace

from benchmarks.engine import ours, run, vllm
from benchmarks.lib.harness import Measured, Showcase, higher, lower
from benchmarks.lib.process import Engine, random_prompts

SIZES = {"num_requests": 64, "shared": 2048, "own": 64, "num_tokens": 64, "highest_id": 10_000}
QUICK = {"num_requests": 4, "shared": 48, "own": 4, "num_tokens": 3, "highest_id": 500}
AT_ONCE, AFTER_ONE = "all at once", "after one"


def measure(
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


def showcase(options: Namespace) -> Showcase:
    sizes = QUICK if options.quick else SIZES
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
        arguments=sizes,
    )


def main() -> None:
    run(showcase, "prefix", __doc__, repeats=3)


if __name__ == "__main__":
    main()
