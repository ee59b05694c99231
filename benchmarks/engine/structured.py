"""What a JSON schema costs: 64 sequences at once, each held to a schema, and the same lengths without one.

The model has random weights, which say anything that the schema allows: strings and arrays are bounded, and there is no
whitespace. How long an output becomes is up to the draws. So the run with the schema comes first, and the run without
it generates as many tokens for each request. `--model` needs a tokenizer beside the config.json.
"""

import json
import sys
from argparse import Namespace
from typing import Any

from benchmarks.engine import ours, vllm
from benchmarks.lib.harness import Figure, Measured, Showcase, higher
from benchmarks.lib.process import Engine, random_prompts

TEXT, WORD = {"type": "string", "maxLength": 120}, {"type": "string", "maxLength": 24}
FIELDS: dict[str, Any] = {
    "title": TEXT,
    "kind": {"enum": ["story", "poem", "letter"]},
    "pages": {"type": "integer", "minimum": 1, "maximum": 999},
    "author": {"type": "object", "properties": {"name": WORD, "city": WORD}, "required": ["name", "city"]},
    "chapters": {"type": "array", "items": TEXT, "minItems": 3, "maxItems": 8},
    "tags": {"type": "array", "items": WORD, "maxItems": 6},
}
FIELDS["author"]["additionalProperties"] = False
SCHEMA = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
SIZES = {"requests": 256, "batch": 64, "prompt_len": 128, "max_tokens": 1024, "highest_id": 10_000}
QUICK_SIZES = {"requests": 2, "batch": 2, "prompt_len": 8, "max_tokens": 20, "highest_id": 500}
WITH, WITHOUT = "with the schema", "without"


def is_valid(text: str) -> bool:
    """Whether an output has the schema's fields, in its bounds."""
    found = json.loads(text)
    texts = [found["title"], *found["chapters"]]
    words = [found["author"]["name"], found["author"]["city"], *found["tags"]]
    bounds = 1 <= found["pages"] <= 999 and 3 <= len(found["chapters"]) <= 8 and len(found["tags"]) <= 6
    fits = all(len(t) <= 120 for t in texts) and all(len(w) <= 24 for w in words)
    return [*found] == [*FIELDS] and found["kind"] in FIELDS["kind"]["enum"] and bounds and fits


def measure(engine: Engine, repeats: int, sizes: dict[str, int]) -> list[Measured]:
    """In the process of one contender. Raises RuntimeError for an output that ended and is not what was asked for."""
    module = sys.modules[engine.make_params.__module__]
    schema = module.StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    held = {"temperature": 0.6, "max_tokens": sizes["max_tokens"], "structured_outputs": schema}

    def prompts(seed: int) -> list[list[int]]:
        return random_prompts([sizes["prompt_len"]] * sizes["requests"], seed, sizes["highest_id"])

    def run(seed: int) -> tuple[float, list[int], int]:
        params = [engine.make_params(**held, seed=seed * 1000 + i) for i in range(sizes["requests"])]
        given = [{"prompt_token_ids": prompt} for prompt in prompts(2 * seed)]
        start = engine.clock()
        outputs = [output.outputs[0] for output in engine.llm.generate(given, params, use_tqdm=False)]
        seconds = engine.clock() - start
        ended = [output for output in outputs if output.finish_reason == "stop"]
        if wrong := [output.text for output in ended if not is_valid(output.text)]:
            raise RuntimeError(f"{len(wrong)} outputs are not what the schema says, such as {wrong[0]!r}")
        return seconds, [len(output.token_ids) for output in outputs], len(ended)

    lengths = run(repeats)[1]
    engine.timed(prompts(2 * repeats + 1), lengths, [{"temperature": 0.6}])
    repetitions = []
    for repeat in range(repeats):
        seconds, lengths, ended = run(repeat)
        plain = engine.timed(prompts(2 * repeat + 1), lengths, [{"temperature": 0.6}])
        found = {"output_tokens": sum(lengths), "ended": ended}
        rates = {WITH: sum(lengths) / seconds, WITHOUT: sum(lengths) / plain}
        repetitions.append({name: {**found, "tokens_per_second": rate} for name, rate in rates.items()})
    return repetitions


def cost(measured: Measured) -> float:
    return 100 * (1 - measured[WITH]["tokens_per_second"] / measured[WITHOUT]["tokens_per_second"])


def showcase(options: Namespace) -> Showcase:
    sizes = QUICK_SIZES if options.quick else SIZES
    config: dict[str, Any] = {"skip_tokenizer_init": False, "max_num_seqs": sizes["batch"]}
    return Showcase(
        name="structured" if options.quick else f"structured.{options.model.name}",
        title=f"A JSON schema for every output, {options.model.name}",
        workload=f"{sizes['requests']} requests, {sizes['batch']} at once, {sizes['prompt_len']} tokens in, up to "
        f"{sizes['max_tokens']} out, temperature 0.6",
        contenders=[ours(options, **config), *vllm(options, **config)],
        figures=[
            higher("schema", WITH, "tokens/s", WITH, "tokens_per_second"),
            higher("plain", WITHOUT, "tokens/s", WITHOUT, "tokens_per_second"),
            Figure("cost", "the schema costs", "%", "lower", cost),
        ],
        measure=measure,
        arguments={"sizes": sizes},
        rounds=2,
        repeats=2,
    )
