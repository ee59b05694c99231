"""The headline workload: output tokens a second, beside vLLM and beside what the card could do.

    python -m benchmarks.engine.throughput --out DIR [--vllm-path PATH] [--rounds 2] [--repeats 3]

A process runs the workload several times with fresh token ids; processes take turns.
"""

import argparse
import sys
from typing import Any

from benchmarks.engine import headline
from benchmarks.engine.engine_harness import Comparison, add_options, check_options, ours, run_process, vllm
from benchmarks.engine.engine_worker import Engine, Repetition
from benchmarks.lib import roofline
from benchmarks.lib.harness import Figure, Measured, Showcase, metric


def measure(engine: Engine, repeats: int, sizes: dict[str, int]) -> list[Repetition]:
    """In the process of one contender."""
    chosen = headline.Sizes(**sizes)
    prompts, _ = headline.draw(-1, chosen)
    engine.warm_up(prompts, num_tokens=16)  # all of them: kernels are compiled for a step's size as well
    repetitions = []
    for number in range(repeats):
        prompts, max_tokens = headline.draw(number, chosen)
        seconds = engine.timed(prompts, max_tokens, headline.TEMPERATURE)
        tokens = sum(max_tokens)
        measured = {"seconds": seconds, "output_tokens": tokens, "tokens_per_second": tokens / seconds}
        repetitions.append({"headline": measured})
        print(f"round {number}: {tokens / seconds:.0f} tokens/s", flush=True)
    return repetitions


def share_of(limit: float) -> Any:
    def share(measured: Measured) -> float:
        return 100 * float(measured["headline"]["tokens_per_second"]) / limit

    return share


def showcase(contenders: list[Any], limit: dict[str, Any]) -> Showcase:
    return Showcase(
        name="throughput",
        title="The headline workload",
        workload=describe(limit),
        contenders=contenders,
        scenarios=[],
        figures=[
            Figure("throughput", "throughput", "tokens/s", "higher", metric("headline", "tokens_per_second")),
            Figure("share", "share of the limit", "%", "higher", share_of(limit["tokens_per_second"])),
        ],
        headline="throughput",
        shown=("throughput", "share"),
        contender=contenders[0].name,
        rival=contenders[-1].name,
        notes=[roofline.describe(limit)],
    )


def describe(limit: dict[str, Any]) -> str:
    sizes, costs = limit["workload"], limit["costs"]
    length = f"{sizes['shortest']} to {sizes['longest']}"
    return (
        f"{sizes['num_requests']} requests at once, {length} tokens in and {length} out "
        f"({costs['prompt_tokens']:,} and {costs['output_tokens']:,} in all), temperature {headline.TEMPERATURE}"
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.throughput", description=(__doc__ or "").split("\n")[0]
    )
    add_options(parser)
    parser.add_argument("--repeats", type=int, default=3, help="times that a process runs the workload (default 3)")
    return check_options(parser.parse_args(arguments))


def compare(options: argparse.Namespace) -> Comparison:
    """Measure, print and write down; options as `parse` gives them."""
    limit = roofline.in_a_process(options)
    print(roofline.describe(limit), flush=True)
    contenders = [ours(options), *vllm(options)]
    arguments = {"repeats": options.repeats, "sizes": limit["workload"]}
    comparison = Comparison(showcase(contenders, limit), options, {"roofline": limit})
    comparison.run(lambda contender: run_process(contender, "benchmarks.engine.throughput", arguments, options))
    return comparison


if __name__ == "__main__":
    sys.exit(1 if compare(parse()).failures else 0)
