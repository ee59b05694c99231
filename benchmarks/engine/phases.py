"""Where the time of the headline workload goes, by the kind of step, beside what the card would need at least.

    python -m benchmarks.engine.phases --out DIR [--rounds 1] [--repeats 3]

A step takes from the end of the one before it, when its tokens are on the host, until its own end; with asynchronous
scheduling the host's work lies within that. The least that a step needs is reckoned as in `benchmarks/lib/roofline.py`:
decodes read their keys, steps of decodes alone the weights too, and prompts do their multiplications.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engine import headline
from benchmarks.engine.engine_harness import Comparison, add_options, check_options, ours, run_process
from benchmarks.engine.engine_worker import Engine, Repetition
from benchmarks.lib import roofline
from benchmarks.lib.harness import Contender, Figure, Showcase, metric
from benchmarks.lib.roofline import Limits, num_parameters
from nanovllm.engine.plan import Scheduled
from nanovllm.models.config import ModelConfig, read_config

PROMPTS = "with prompts"
BATCHES = (32, 64, 128, 192, 256)  # the largest batch of each kind of step of decodes alone


def kind_of(batch: int) -> str:
    """The kind of a step of so many decodes: "decode, 33 to 64"."""
    last = next((last for last in BATCHES if batch <= last), BATCHES[-1])
    first = 1 + max((b for b in BATCHES if b < last), default=0)
    return f"decode, {first} to {last}"


KINDS = (PROMPTS, *(kind_of(batch) for batch in reversed(BATCHES)))


class Reckoner:
    """The least seconds of each step of a run, whose steps come in order."""

    def __init__(self, model: ModelConfig, limits: Limits, itemsize: int) -> None:
        parameters = num_parameters(model)
        self.limits = limits
        self.weight_bytes = itemsize * (parameters["all"] - (0 if model.tie_word_embeddings else parameters["head"]))
        self.key_bytes = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * itemsize
        self.pair_operations = 4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim
        self.token_operations, self.sample_operations = 2 * parameters["matrices"], 2 * parameters["head"]
        self.begun: set[int] = set()  # sequences that have their first token

    def __call__(self, scheduled: Sequence[Scheduled]) -> tuple[str, float]:
        """The kind of a step, and its least seconds."""
        num_bytes = operations = 0
        prompts = False
        for s in scheduled:
            if s.key in self.begun and s.num_tokens == 1:  # more are computed anew, after a preemption
                num_bytes += (s.start + 1) * self.key_bytes
                continue
            prompts = True
            pairs = s.num_tokens * s.start + s.num_tokens * (s.num_tokens + 1) // 2
            operations += s.num_tokens * self.token_operations + pairs * self.pair_operations
            if s.sample:
                operations += self.sample_operations
                self.begun.add(s.key)
        if not prompts:
            num_bytes += self.weight_bytes
        least = num_bytes / self.limits.bytes_per_second + operations / self.limits.operations_per_second
        return PROMPTS if prompts else kind_of(len(scheduled)), least


def measure(
    engine: Engine, repeats: int, sizes: dict[str, int], limits: dict[str, float], model: str, itemsize: int
) -> list[Repetition]:
    """In the process of the engine. Each kind of step: {"steps", "seconds", "least_seconds"}."""
    chosen, config = headline.Sizes(**sizes), read_config(Path(model))
    scheduler = engine.llm.engine.scheduler
    commit = scheduler.commit

    found: Repetition = {}
    reckon = Reckoner(config, Limits(**limits), itemsize)
    begin = 0.0

    def timed_commit(plan: Any, result: Any) -> Any:
        # The plan is not kept: Python's garbage collector would go through all plans again and again.
        nonlocal begin
        end = time.perf_counter()
        kind, least = reckon(plan.scheduled)
        row = found[kind]
        row["steps"] += 1
        row["seconds"] += end - begin
        row["least_seconds"] += least
        begin = end
        return commit(plan, result)

    prompts, _ = headline.draw(-1, chosen)
    engine.warm_up(prompts, num_tokens=16)
    scheduler.commit = timed_commit
    repetitions = []
    for number in range(repeats):
        prompts, max_tokens = headline.draw(number, chosen)
        found = {kind: {"steps": 0, "seconds": 0.0, "least_seconds": 0.0} for kind in KINDS}
        reckon = Reckoner(config, Limits(**limits), itemsize)
        begin = time.perf_counter()
        engine.generate(prompts, max_tokens, headline.TEMPERATURE)
        repetitions.append(found)
        print(found, flush=True)
    return repetitions


def showcase(contenders: list[Contender]) -> Showcase:
    labels = {"steps": ("steps", ""), "seconds": ("time", "s"), "least_seconds": ("at least", "s")}
    figures = [
        Figure(f"{key}, {kind}", f"{label}, {kind}", unit, "lower", metric(kind, key))
        for kind in KINDS
        for key, (label, unit) in labels.items()
    ]
    return Showcase(
        name="phases",
        title="Where the time of the headline workload goes",
        workload="the headline workload, by the kind of step",
        contenders=contenders,
        scenarios=[],
        figures=figures,
        headline=f"seconds, {PROMPTS}",
        shown=tuple(f"{key}, {kind}" for kind in KINDS for key in ("seconds", "least_seconds")),
        contender=contenders[0].name,
        rival=contenders[0].name,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.phases", description=(__doc__ or "").split("\n")[0]
    )
    add_options(parser, rounds=1)
    parser.add_argument("--repeats", type=int, default=3, help="times that a process runs the workload (default 3)")
    options = check_options(parser.parse_args())
    limit = roofline.in_a_process(options)
    comparison = Comparison(showcase([ours(options)]), options, {"roofline": limit})
    arguments = {
        "repeats": options.repeats,
        "sizes": limit["workload"],
        "limits": asdict(Limits(**limit["limits"])),
        "model": str(options.model),
        "itemsize": 4 if options.quick else 2,
    }
    comparison.run(lambda contender: run_process(contender, "benchmarks.engine.phases", arguments, options))
    sys.exit(1 if comparison.failures else 0)


if __name__ == "__main__":
    main()
