"""The costs of a card that nobody has measured step by step, from what the engine's benchmarks have recorded there.

    python -m benchmarks.engine.recorded_costs [--card h200] [--results benchmarks/results] [--out DIR]

A record is the sum of many steps: of a whole run, of its steps of one kind, or of 127 decodes. Which steps these were
is known, for the scheduler plans the same ones again. `python -m benchmarks.engine step_costs` measures single steps,
and its card should take the place of this one.
"""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.engine import SHAPE, arrivals, simulated, steps
from benchmarks.engine.step_costs import RECORDINGS, all_reduces, describe, least_factors
from benchmarks.lib import harness, tables, workloads
from benchmarks.lib.process import random_prompts
from benchmarks.lib.tables import Result
from nanovllm.simulate.costs import Card, IntakeTime, ServerTime
from nanovllm.simulate.fit import Observation, fit_device, fit_host, fit_intake
from nanovllm.simulate.needs import Needs, read_architecture
from nanovllm.simulate.step_shape import StepShape
from nanovllm.simulate.step_time import StepTime

AS_IT_IS, NOT_OVERLAPPED, NOT_RECORDED = "as it is", "no asynchronous scheduling", "steps with prompts not recorded"
MEMORY = {"h200": 0.9 * 139.8 * 2**30}  # bytes that the engine's defaults take of the card
RECORDED_SEQUENCES = 64  # places of the recordings with prompts when the records were made
BESIDES = 3e9  # bytes of it that are neither weights nor keys: activations, graphs, CUDA's own; about


class Noted:
    """`StepCosts` that keep the shapes they are asked for."""

    def __init__(self) -> None:
        self.shapes: list[StepShape] = []

    def device_seconds(self, shape: StepShape) -> float:
        self.shapes.append(shape)
        return 1e-3

    def host_seconds(self, shape: StepShape) -> float:
        return 0.0


def shapes_of(prompts: list[list[int]], max_tokens: list[int], **config: Any) -> list[StepShape]:
    """The steps of a run."""
    costs = Noted()
    simulated.VirtualEngine(costs, 2**20, IntakeTime(), **config).generate(prompts, max_tokens)
    return costs.shapes


def noted(run: simulated.Compared) -> list[StepShape]:
    """The steps of a benchmark."""
    costs = Noted()
    run.run(simulated.VirtualEngine(costs, 2**20, IntakeTime(), **run.config))
    return costs.shapes


def median(result: Result, contender: str, scenario: str, metric: str) -> float:
    found = [r["scenarios"] for r in result["rounds"] if r["contender"] == contender]
    return statistics.median(s[scenario][metric] for s in found if scenario in s)


def steps_alone(records: dict[str, Result]) -> Iterator[Observation]:
    """Records of steps that follow on others, and of single prompts, whose intake takes no time to speak of."""
    for kind, shapes in headline_steps().items():
        if kind != steps.PROMPTS:
            yield Observation(f"phases: {kind}", shapes, median(records["phases"], "nanovllm", kind, "seconds"))
    ablations, latency = records["ablations"], records["latency"]
    for batch in (1, 8, 32, 256):
        shapes = [s for s in shapes_of(random_prompts([128] * batch, 0, 10_000), [128] * batch) if not s.prompts]
        ms = median(ablations, AS_IT_IS, f"batch {batch}", "ms_per_token")
        yield Observation(f"ablations: batch {batch}", shapes, 1e-3 * ms * len(shapes))
    for result, contender, scenario, length in (
        (ablations, AS_IT_IS, "1 prompts", 1024),
        (latency, "nanovllm", "batch 1", 128),
    ):
        shapes = shapes_of(random_prompts([length], 0, 10_000), [1])
        ms = median(result, contender, scenario, "first_token_ms")
        yield Observation(f"{result['name']}: first token of {length}", shapes, 1e-3 * ms)
    for run in simulated.RUNS:
        if run.result == "mixed":
            largest = max(noted(run), key=lambda shape: (shape.prompt_tokens, shape.prompt_pairs))
            seconds = 1e-3 * median(records["mixed"], run.contender, "mixed", "gap_p99_ms")
            yield Observation(f"mixed: {run.contender}", [largest], seconds)


def headline_steps() -> dict[str, list[StepShape]]:
    by_kind: dict[str, list[StepShape]] = {kind: [] for kind in steps.KINDS}
    for shape in shapes_of(*workloads.headline(0)):
        by_kind[steps.PROMPTS if shape.prompts else steps.kind_of(shape.decodes)].append(shape)
    return by_kind


def intakes(records: dict[str, Result], time: StepTime) -> Iterator[tuple[int, int, float, float]]:
    """Of records that begin when many prompts are added: the number of these and of their tokens, the seconds that the
    steps do not explain, and all seconds."""
    ablations, latency = records["ablations"], records["latency"]
    firsts = [(ablations, AS_IT_IS, "16 prompts", 16, 1024)]
    firsts += [(latency, "nanovllm", f"batch {n}", n, 128) for n in (8, 32)]
    for result, contender, scenario, number, length in firsts:
        shapes = shapes_of(random_prompts([length] * number, 0, 10_000), [1] * number)
        seconds = 1e-3 * median(result, contender, scenario, "first_token_ms")
        yield number, number * length, seconds - sum(map(time.device_seconds, shapes)), seconds
    yield from shared(records["prefix"], time)
    prompts, _ = workloads.headline(0)
    seconds = median(records["phases"], "nanovllm", steps.PROMPTS, "seconds")
    explained = sum(map(time.device_seconds, headline_steps()[steps.PROMPTS]))
    yield len(prompts), sum(map(len, prompts)), seconds - explained, seconds


def shared(prefix: Result, time: StepTime) -> Iterator[tuple[int, int, float, float]]:
    """Prompts whose beginning is in the prefix cache: nearly all that takes time is their intake."""
    number, length, own = (arrivals.SHARED[name] for name in ("num_requests", "shared", "own"))
    system, other = random_prompts([length, own], 0, 10_000)
    costs = Noted()
    engine = simulated.VirtualEngine(costs, 2**20, IntakeTime())
    engine.generate([system + other], [1])
    costs.shapes.clear()
    engine.generate([system + rest for rest in random_prompts([own] * number, 1, 10_000)], [1] * number)
    seconds = 1e-3 * median(prefix, "nanovllm", arrivals.AFTER_ONE, "first_tokens_ms")
    yield number, number * (length + own), seconds - sum(map(time.device_seconds, costs.shapes)), seconds


def host_steps(ablations: Result) -> Iterator[tuple[StepShape, float, float]]:
    """What a step takes longer where the host's work is not hidden."""
    for batch in (1, 8, 32, 256):
        alone, hidden = (
            1e-3 * median(ablations, contender, f"batch {batch}", "ms_per_token")
            for contender in (NOT_OVERLAPPED, AS_IT_IS)
        )
        yield StepShape(decodes=batch, decode_keys=192 * batch, samples=batch), alone - hidden, alone


def make_card(card: str, results: Path) -> Card:
    """Raises ValueError if a record is missing."""
    records = {
        name: tables.load(f"{name}.{card}", results) for name in ("phases", "ablations", "latency", "mixed", "prefix")
    }
    architecture, itemsize = read_architecture(SHAPE)
    seen = list(steps_alone(records))
    needs, rates = Needs(architecture, itemsize), records["phases"]["roofline"]["limits"]
    recordings = replace(RECORDINGS.for_model(architecture), max_sequences=RECORDED_SEQUENCES)
    time, missed = fit_device(seen, recordings, least_factors(needs, rates))
    launch = 1e-3 * median(records["ablations"], NOT_RECORDED, "1 prompts", "first_token_ms")
    names = ", ".join(f"{name}.{card}.json" for name in records)
    return Card(
        card=card,
        shape=SHAPE.name,
        tensor_parallel_size=1,
        architecture=architecture,
        itemsize=itemsize,
        source=f"records of whole runs: {names}",
        rates=rates,
        kv_tokens=int(MEMORY[card] - BESIDES - needs.weight_bytes) // needs.key_bytes,
        time=replace(time, host=fit_host(list(host_steps(records["ablations"]))), launch=launch),
        intake=IntakeTime(*fit_intake(list(intakes(records, time)))),
        server=ServerTime(),
        all_reduce=all_reduces(card),
        residuals=missed.as_json(),
        machine=records["ablations"]["machine"],
        commit=records["ablations"]["commit"],
        points=[
            {
                "name": o.name,
                "steps": len(o.shapes),
                "seconds": o.seconds,
                "fitted": sum(map(time.device_seconds, o.shapes)),
            }
            for o in seen
        ],
    )


def main(arguments: list[str] | None = None) -> None:
    parser = harness.make_parser("engine.recorded_costs", __doc__)
    parser.add_argument("--card", default="h200", choices=MEMORY)
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="where the records are")
    parser.add_argument("--out", type=Path, default=harness.ROOT / "nanovllm" / "simulate" / "cards")
    options = parser.parse_args(arguments)
    card = make_card(options.card, options.results)
    print(describe(card), f"written: {card.write(options.out)}", sep="\n")


if __name__ == "__main__":
    main()
