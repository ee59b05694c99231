"""The engine beside vLLM, in other uses than the headline workload and with other models.

- `uses`: many short chats; long documents with short answers; several choices for each prompt; prompts that are scored,
  as evaluations do; log-probabilities for each token; contexts of 32,000 tokens, for one sequence and for eight.
- `shape`: small batches and the headline workload, with the model of `--model`.

The weights are random. Steps take as long as with real ones.
"""

from argparse import Namespace
from dataclasses import replace
from typing import Any

from benchmarks.engine import ours, quantised, speed, vllm
from benchmarks.lib import roofline
from benchmarks.lib.harness import Measured, Showcase, higher, lower
from benchmarks.lib.process import GREEDY, SAMPLED, Engine, random_prompts

Use = dict[str, Any]
USES: dict[str, Use] = {
    "1,000 chats of 60 tokens in, 60 out": {"requests": 1000, "prompt": 60, "tokens": 60},
    "64 documents of 8,000 tokens, 64 out": {"requests": 64, "prompt": 8000, "tokens": 64},
    "8 choices for each of 32 prompts of 512, 256 out": {"requests": 32, "prompt": 512, "tokens": 256, "n": 8},
    "256 prompts of 512 scored": {"requests": 256, "prompt": 512, "tokens": 1, "prompt_logprobs": 1},
    "128 chats of 256 in, 256 out, logprobs 20": {"requests": 128, "prompt": 256, "tokens": 256, "logprobs": 20},
}
QUICK_USES: dict[str, Use] = {name: use | {"requests": 2, "prompt": 8, "tokens": 2} for name, use in USES.items()}
LONG: dict[str, int] = {"prompt_len": 32_000, "num_tokens": 128, "highest_id": 10_000}
QUICK_LONG = {"prompt_len": 40, "num_tokens": 3, "highest_id": 500}
BATCHES = 1, 8  # of long contexts
LONGEST = 32_768  # with its output
SMALL: dict[str, Any] = speed.SMALL | {"batches": [1, 8, 32, 64]}


def measure(engine: Engine, repeats: int, uses: dict[str, Use], long: dict[str, Any]) -> list[Measured]:
    """In the process of one contender."""
    found: list[Measured] = []
    for repeat in range(-1, repeats):  # the first is to warm up
        scenarios: Measured = {}
        for place, (name, use) in enumerate(uses.items()):
            lengths = [use["prompt"]] * use["requests"]
            prompts = random_prompts(lengths, 100 * (repeat + 1) + place, long["highest_id"])
            kind = SAMPLED[0] | {key: use[key] for key in ("n", "prompt_logprobs", "logprobs") if key in use}
            start = engine.clock()
            for output in engine.generate(prompts, [use["tokens"]] * use["requests"], [kind]):
                read(output)
            seconds = engine.clock() - start
            scenarios[name] = {"requests_per_second": use["requests"] / seconds, "seconds": seconds}
        found.append(scenarios)
    small = speed.measure_small(engine, repeats, list(BATCHES), **long, kinds=GREEDY)
    return [scenarios | batch for scenarios, batch in zip(found[1:], small, strict=True)]


def read(output: Any) -> None:
    """Read the log-probabilities of an output: nanovllm makes objects of them only when they are read."""
    for choice in output.outputs:
        assert choice.logprobs is None or len(choice.logprobs) == len(choice.token_ids)
    assert output.prompt_logprobs is None or len(output.prompt_logprobs) == len(output.prompt_token_ids)


def showcase(options: Namespace) -> Showcase:
    uses, long = (QUICK_USES, QUICK_LONG) if options.quick else (USES, LONG)
    longest = 256 if options.quick else LONGEST
    figures = [higher(f"use_{i}", name, "requests/s", name, "requests_per_second") for i, name in enumerate(uses)]
    for batch in BATCHES:
        length, scenario = f"{long['prompt_len']:,} tokens in, batch {batch}", f"batch {batch}"
        figures.append(lower(f"token_{batch}", f"a token, {length}", "ms", scenario, "ms_per_token"))
        figures.append(lower(f"first_{batch}", f"until all have a token, {length}", "ms", scenario, "first_token_ms"))
    return Showcase(
        name="uses",
        title="Other uses",
        workload="each use by itself, all requests at once, temperature 0.6; long contexts greedy",
        contenders=[ours(options, max_model_len=longest), *vllm(options, max_model_len=longest)],
        figures=figures,
        measure=measure,
        arguments={"uses": uses, "long": long},
        rounds=2,
        repeats=1,
    )


def shape(options: Namespace) -> Showcase:
    limit = roofline.roofline(options)
    contenders = [ours(options), *vllm(options)]
    name, first, last = options.model.name, contenders[0].name, contenders[-1].name
    more = {} if options.quick else {"batches": SMALL["batches"]}
    shown = quantised.compared(
        options, "shape" if options.quick else f"shape.{name}", name, contenders, first, last, **more
    )
    return replace(shown, figures=[*shown.figures, speed.share_of(limit)], shown=(), extra={"roofline": limit})
