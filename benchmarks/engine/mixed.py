"""How long the readers of running streams wait for their next token while long prompts arrive.

    python -m benchmarks.engine.mixed --out DIR [--rounds 1] [--repeats 2]

32 streams decode, and every so many tokens of theirs a prompt of 3,000 tokens joins. A small token budget cuts it into
chunks that ride along with the decodes: no step lasts long, and the prompt's own first token comes later. It all goes
through `LLMEngine.step`, which reports every token when it is there.
"""

import statistics
import time
from argparse import Namespace

from benchmarks.engine import ours, run
from benchmarks.lib.harness import Measured, Showcase, lower
from benchmarks.lib.process import Engine, random_prompts

SIZES = {"streams": 32, "stream_prompt": 128, "tokens": 400, "arrivals": 8, "every": 40, "long_prompt": 3000}
SIZES |= {"highest_id": 10_000}
QUICK = {"streams": 3, "stream_prompt": 8, "tokens": 12, "arrivals": 2, "every": 4, "long_prompt": 100}
QUICK |= {"highest_id": 500}
LABELS = {
    "gap_p50_ms": "between two tokens of a stream, median",
    "gap_p99_ms": "99th percentile",
    "gap_max_ms": "longest",
    "prompt_wait_ms": "a long prompt's first token",
}


def measure(engine: Engine, repeats: int, **sizes: int) -> list[Measured]:
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
    progress, begin = 0, time.perf_counter()
    while core.has_unfinished():
        if waiting and progress >= every * (arrivals - len(waiting) + 1):
            core.add_request(f"{seed} prompt {len(waiting)}", waiting.pop(), one_token)
        outputs = core.step()
        now = time.perf_counter()
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
        "seconds": time.perf_counter() - begin,
    }


def showcase(options: Namespace) -> Showcase:
    sizes, budgets = (QUICK, (16, 32)) if options.quick else (SIZES, (512, 2048))
    contenders = [ours(options, f"chunks of up to {n:,}", max_num_batched_tokens=n) for n in budgets]
    contenders.append(ours(options, "default budget"))
    contenders.append(ours(options, "whole prompts", enable_chunked_prefill=False))
    return Showcase(
        name="mixed",
        title="Streams while long prompts arrive",
        workload=f"{sizes['streams']} streams of {sizes['tokens']} tokens; a prompt of {sizes['long_prompt']:,} tokens "
        f"after every {sizes['every']} tokens of theirs, {sizes['arrivals']} in all",
        contenders=contenders,
        figures=[lower(key, label, "ms", "mixed", key) for key, label in LABELS.items()],
        headline="gap_p99_ms",
        arguments=sizes,
    )


def main() -> None:
    run(showcase, "mixed", __doc__, repeats=2)


if __name__ == "__main__":
    main()
