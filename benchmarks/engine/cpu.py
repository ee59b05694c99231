"""The engine on a CPU beside Hugging Face, in float32: `python -m benchmarks.engine.cpu`.

Measures the embedded model and, where `make models` has put it into the cache, SmolLM2-135M-Instruct. Writes
benchmarks/results/engine_cpu.json and engine_cpu_smollm2.json.
"""

import os
import sys
from pathlib import Path

from benchmarks.lib import tables
from benchmarks.lib.harness import Contender, Showcase, higher, lower, make_parser
from benchmarks.lib.tables import Result
from benchmarks.lib.workloads import Scenario, make_requests, mixed_lengths
from benchmarks.stages.runners import hf_contender
from benchmarks.stages.stage_bench import add_options, measure, vocab_size

ENGINE, ONE_BY_ONE, PADDED = "nanovllm", "HF one by one", "HF padded batch"
SMOLLM2 = Path(os.environ.get("NANOVLLM_CACHE", Path.home() / ".cache" / "nanovllm")) / "SmolLM2-135M-Instruct"
TOKENS = {"engine_cpu": 32, "engine_cpu_smollm2": 16}  # for each request, the longest of the mixed ones aside
# How many times better than whom the engine has to be
TARGETS = {"ms_1": (ONE_BY_ONE, 1.0), "rate_16": (ONE_BY_ONE, 4.0), "rate_mixed": (PADDED, 1.0)}


def showcase(vocab_size: int, quick: bool = False, name: str = "engine_cpu") -> Showcase:
    prompt, batch, tokens = (8, 3, 4) if quick else (32, 16, TOKENS[name])
    low, high = prompt // 4, 2 * prompt
    lengths = mixed_lengths(batch, (low, high), (tokens // 4, 2 * tokens), seed=3)
    return Showcase(
        name=name,
        title="The engine on a CPU",
        workload=f"one request, {batch} alike ({prompt} tokens in, {tokens} out), and {batch} of mixed lengths "
        f"({low} to {high} in, {tokens // 4} to {2 * tokens} out); greedy, float32",
        contenders=[
            Contender(ENGINE, {"kind": "engine"}),
            hf_contender(ONE_BY_ONE),
            hf_contender(PADDED, batch=True, limited=False, only=("alike", "mixed")),
        ],
        scenarios=[
            Scenario("one", [make_requests([(prompt, 2 * tokens)], vocab_size, seed=1)]),
            Scenario("alike", [make_requests([(prompt, tokens)] * batch, vocab_size, seed=2)], max_num_seqs=batch),
            Scenario("mixed", [make_requests(lengths, vocab_size, seed=4)], max_num_seqs=batch),
        ],
        figures=[
            lower("ms_1", "time per token, batch 1", "ms", "one", "ms_per_token"),
            higher("rate_16", f"{batch} alike", "tokens/s", "alike", "tokens_per_second"),
            higher("rate_mixed", f"{batch} of mixed lengths", "tokens/s", "mixed", "tokens_per_second"),
        ],
        headline="rate_16",
        rival=ONE_BY_ONE,
    )


def misses(result: Result) -> list[str]:
    """The figures in which the engine is not as good as it has to be, in words."""
    found = []
    for figure in result["figures"]:
        rival, target = TARGETS[figure["key"]]
        if (gain := tables.gain(figure, ENGINE, rival)) < target:
            found.append(f"{figure['label']} ({result['name']}): {gain:.2f} of {target} times {rival}")
    return found


def main() -> None:
    parser = make_parser("engine.cpu", __doc__)
    add_options(parser)
    options = parser.parse_args()
    missed = []
    for name, model in (("engine_cpu", options.model), ("engine_cpu_smollm2", SMOLLM2)):
        if model.is_dir():
            options.model = model
            missed += misses(measure(showcase(vocab_size(model), options.quick, name), options))
    if missed and not options.quick:
        sys.exit("targets missed: " + "; ".join(missed))


def table(results: dict[str, Result]) -> list[str]:
    """Both models beside Hugging Face."""
    names = [ENGINE, ONE_BY_ONE, PADDED]
    lines = tables.head("model", "what is measured", *names, "gain", "at least", left=2)
    for result in results.values():
        model = Path(result["model"]["name"]).name
        for figure in result["figures"]:
            rival, target = TARGETS[figure["key"]]
            cells = [tables.cell(figure, name) for name in names]
            gained = f"{tables.ratio(figure, ENGINE, rival)} {rival}"
            lines.append(tables.row(model, tables.label(figure), *cells, gained, f"{target:g}×"))
            model = ""
    lines += ["", *(f"- {r['model']['name']}: {r['workload']}; {tables.clock(r)}" for r in results.values())]
    return [*lines, "", tables.origin(results)]


def sentence(results: dict[str, Result]) -> list[str]:
    """The embedded model beside Hugging Face, for the README. `results` is that of engine_cpu."""
    result = results["engine_cpu"]
    measured, facts = tables.figures(result), result["machine"]

    def times(key: str, rival: str) -> str:
        return tables.with_unit(tables.gain(measured[key], "nanovllm", rival), "times")

    return [
        f"On a CPU ({facts['processor']}, {facts['threads']} thread) the embedded model generates one request "
        f"{times('ms_1', 'HF one by one')} as fast as Hugging Face's `generate`, 16 requests of one length "
        f"{times('rate_16', 'HF one by one')} as fast as `generate` does one by one, and 16 of mixed lengths "
        f"{times('rate_mixed', 'HF padded batch')} as fast as `generate` does in a padded batch.",
    ]


if __name__ == "__main__":
    main()
