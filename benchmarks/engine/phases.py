"""Where the time of the headline workload goes, by the kind of step, beside what the card would need at least.

    python -m benchmarks.engine.phases --out DIR [--rounds 1] [--repeats 3]

A step takes from the end of the one before it, when its tokens are on the host, until its own end; with asynchronous
scheduling the host's work lies within that. The least that a step needs is reckoned as in `benchmarks/lib/roofline.py`:
decodes read their keys, steps of decodes alone the weights too, and prompts do their multiplications.
"""

import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine import ours, run
from benchmarks.lib import roofline, tables, workloads
from benchmarks.lib.harness import Measured, Showcase, lower
from benchmarks.lib.process import Engine
from benchmarks.lib.roofline import Limits
from benchmarks.lib.tables import Result
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
        self.needs, self.limits = roofline.Needs(model, itemsize), limits
        self.begun: set[int] = set()  # sequences that have their first token

    def __call__(self, scheduled: Sequence[Scheduled]) -> tuple[str, float]:
        """The kind of a step, and its least seconds."""
        num_bytes = operations = 0
        prompts = False
        for s in scheduled:
            if s.key in self.begun and s.num_tokens == 1:  # more are computed anew, after a preemption
                num_bytes += (s.start + 1) * self.needs.key_bytes
                continue
            prompts = True
            pairs = s.num_tokens * s.start + s.num_tokens * (s.num_tokens + 1) // 2
            operations += s.num_tokens * self.needs.token_operations + pairs * self.needs.pair_operations
            if s.sample:
                operations += self.needs.sample_operations
                self.begun.add(s.key)
        if not prompts:
            num_bytes += self.needs.weight_bytes
        least = num_bytes / self.limits.bytes_per_second + operations / self.limits.operations_per_second
        return PROMPTS if prompts else kind_of(len(scheduled)), least


def measure(
    engine: Engine, repeats: int, sizes: dict[str, int], limits: dict[str, float], model: str, itemsize: int
) -> list[Measured]:
    """In the process of the engine. Each kind of step: {"steps", "seconds", "least_seconds"}."""
    chosen, config = workloads.Sizes(**sizes), read_config(Path(model))
    scheduler = engine.llm.engine.scheduler
    commit = scheduler.commit

    found: Measured = {}
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

    prompts, _ = workloads.headline(-1, chosen)
    engine.warm_up(prompts, num_tokens=16)
    scheduler.commit = timed_commit
    repetitions = []
    for number in range(repeats):
        prompts, max_tokens = workloads.headline(number, chosen)
        found = {kind: {"steps": 0, "seconds": 0.0, "least_seconds": 0.0} for kind in KINDS}
        reckon = Reckoner(config, Limits(**limits), itemsize)
        begin = time.perf_counter()
        engine.generate(prompts, max_tokens, workloads.TEMPERATURE)
        repetitions.append(found)
    return repetitions


def showcase(options: Namespace) -> Showcase:
    labels = {"steps": ("steps", ""), "seconds": ("time", "s"), "least_seconds": ("at least", "s")}
    limit = roofline.roofline(options)
    return Showcase(
        name="phases",
        title="Where the time of the headline workload goes",
        workload="the headline workload, by the kind of step",
        contenders=[ours(options)],
        figures=[
            lower(f"{key}, {kind}", f"{label}, {kind}", unit, kind, key)
            for kind in KINDS
            for key, (label, unit) in labels.items()
        ],
        headline=f"seconds, {PROMPTS}",
        shown=tuple(f"{key}, {kind}" for kind in KINDS for key in ("seconds", "least_seconds")),
        arguments={
            "sizes": limit["workload"],
            "limits": limit["limits"],
            "model": str(options.model),
            "itemsize": 4 if options.quick else 2,
        },
        extra={"roofline": limit},
    )


def main() -> None:
    run(showcase, "phases", __doc__, repeats=3)


def table(results: dict[str, Result]) -> list[str]:
    """Of each kind of step the shortest round."""
    figures = tables.figures(results["phases"])
    lines = tables.head("steps", "number", "time (s)", "at least (s)", "above that (s)")
    totals = [0.0, 0.0]
    for kind in KINDS:
        steps, seconds, least = (figures[f"{key}, {kind}"] for key in ("steps", "seconds", "least_seconds"))
        spent, needed = (figure["values"]["nanovllm"]["min"] for figure in (seconds, least))
        if spent:
            cells = tables.cell(steps, "nanovllm"), f"{spent:.2f}", f"{needed:.2f}", f"{spent - needed:.2f}"
            lines.append(tables.row(kind, *cells))
            totals = [totals[0] + spent, totals[1] + needed]
    lines.append(tables.row("all", "", *(f"{n:.2f}" for n in (*totals, totals[0] - totals[1]))))
    where = tables.origin(results).replace("Medians, with the spread over all rounds", "The shortest of all rounds")
    return [*lines, "", where]


if __name__ == "__main__":
    main()
