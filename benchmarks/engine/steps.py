"""Where the time of a step goes: waiting for the host, and by the kind of step.

- `idle`: how long the GPU waits for the host between two steps of steady decode, from a profiler's trace. 256 sequences
  decode; the trace covers 50 steps. A kernel belongs to the step that launched it. Between the last kernel of one step
  and the first of the next the GPU is idle; gaps between the kernels of a step are counted apart (in a CUDA graph they
  are the graph's own). The trace is kept beside the JSON. On a CPU, torch's operators stand in for kernels.
- `phases`: where the time of the headline workload goes, by the kind of step, beside what the card would need at least.
  A step takes from the end of the one before it, when its tokens are on the host, until its own end; with asynchronous
  scheduling the host's work lies within that. The least that a step needs is reckoned as in
  `benchmarks/lib/roofline.py`: decodes read their keys, steps of decodes alone the weights too, and prompts do their
  multiplications.
"""

import gzip
import json
import time
from argparse import Namespace
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.engine import ours
from benchmarks.lib import roofline, tables, workloads
from benchmarks.lib.harness import Measured, Showcase, lower
from benchmarks.lib.process import SAMPLED, Engine, random_prompts
from benchmarks.lib.roofline import Limits
from benchmarks.lib.tables import Result
from nanovllm.engine.plan import StepPlan
from nanovllm.simulate.needs import Needs, read_architecture
from nanovllm.simulate.step_shape import shape_of

MARK = "benchmark step"
UNMARKED = 5
DECODES = {"batch": 256, "prompt_len": 700, "settle": 80, "steps": 50, "highest_id": 10_000}
QUICK_DECODES = {"batch": 3, "prompt_len": 8, "settle": 3, "steps": 6, "highest_id": 500}
LABELS = {
    "idle_between_percent": ("GPU idle between steps", "%"),
    "idle_inside_percent": ("GPU idle within a step", "%"),
    "kernels_per_step": ("kernels in a step", ""),
    "step_ms": ("a step, without the profiler", "ms"),
    "traced_step_ms": ("a step, with it", "ms"),
}

PROMPTS = "with prompts"
BATCHES = (32, 64, 128, 192, 256)  # the largest batch of each kind of step of decodes alone

Event = dict[str, Any]  # of a Chrome trace: times in microseconds


# --- idle time --------------------------------------------------------------------------------------------------------


def measure_idle(
    engine: Engine, batch: int, prompt_len: int, settle: int, steps: int, highest_id: int, trace: str
) -> list[Measured]:
    """In the process of one contender. `settle`: steps before the trace begins, enough to compute all prompts."""
    from nanovllm.sampling_params import RequestOutputKind

    engine.warm_up(random_prompts([prompt_len] * min(batch, 16), 10**6, highest_id))
    core = engine.llm.engine
    kind = RequestOutputKind.FINAL_ONLY  # as `LLM.generate` has it
    most = settle + UNMARKED + 3 * steps
    params = engine.make_params(temperature=0.6, ignore_eos=True, max_tokens=most, output_kind=kind)
    for i, prompt in enumerate(random_prompts([prompt_len] * batch, 1, highest_id)):
        core.add_request(str(i), prompt, params)
    for _ in range(settle):
        core.step()
    start = time.perf_counter()
    for _ in range(steps):
        core.step()
    step_ms = 1e3 * (time.perf_counter() - start) / steps
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(UNMARKED):  # the profiler's own beginnings
            core.step()
        for _ in range(steps):
            with record_function(MARK):
                core.step()
    profiler.export_chrome_trace(trace)
    core.abort_all()
    with gzip.open(trace) as file:
        events: list[Event] = json.load(file)["traceEvents"]
    return [{"idle": {"step_ms": step_ms, **shares(events)}}]


def shares(events: Iterable[Event]) -> dict[str, float]:
    """Where the time between the first kernel and the last went, in percent."""
    work = work_of_steps(list(events))
    kernels = sum(map(len, work))
    steps = [merged(intervals) for intervals in work if intervals]
    if len(steps) < 2:
        raise ValueError(f"a trace of {len(steps)} steps with kernels in it tells nothing; at least 2 are needed")
    total = steps[-1][-1][1] - steps[0][0][0]
    busy = sum(end - start for step in steps for start, end in step)
    inside = sum(later[0] - earlier[1] for step in steps for earlier, later in pairwise(step))
    between = sum(max(0.0, later[0][0] - earlier[-1][1]) for earlier, later in pairwise(steps))
    return {
        "idle_between_percent": 100 * between / total,
        "idle_inside_percent": 100 * inside / total,
        "busy_percent": 100 * busy / total,
        "traced_step_ms": total / len(steps) / 1e3,
        "kernels_per_step": kernels / len(steps),
    }


def work_of_steps(events: list[Event]) -> list[list[tuple[float, float]]]:
    """Start and end of the kernels that each step launched, steps in order.

    A kernel has the correlation number of the call that launched it (of the graph's launch, if it is part of one), and
    that call's time lies within the mark of its step.
    """
    marks = sorted(e["ts"] for e in events if e.get("cat") == "user_annotation" and e["name"] == MARK)
    kernels = [e for e in events if e.get("cat") == "kernel"]
    if kernels:
        launches = {
            e["args"]["correlation"]: e["ts"]
            for e in events
            if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
        }
        work = [(launches.get(e["args"].get("correlation"), -1.0), e) for e in kernels]
    else:
        work = [(e["ts"], e) for e in events if e.get("cat") == "cpu_op"]
    steps: list[list[tuple[float, float]]] = [[] for _ in marks]
    for launched, e in work:
        step = bisect_right(marks, launched) - 1
        if step >= 0:
            steps[step].append((e["ts"], e["ts"] + e["dur"]))
    return steps


def merged(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time as disjoint intervals in order."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            earlier = result.pop()
            start, end = earlier[0], max(earlier[1], end)
        result.append((start, end))
    return result


def idle(options: Namespace) -> Showcase:
    sizes = QUICK_DECODES if options.quick else DECODES
    contenders = [ours(options), ours(options, "no asynchronous scheduling", async_scheduling=False)]
    traces = {c.name: options.out.resolve() / f"trace_{c.name.replace(' ', '_')}.json.gz" for c in contenders}
    return Showcase(
        name="idle",
        title="Does the GPU wait for the host?",
        workload=f"{sizes['batch']} sequences decode, {sizes['prompt_len']} tokens of prompt, {sizes['steps']} steps",
        contenders=[replace(c, arguments={"trace": str(traces[c.name])}) for c in contenders],
        figures=[lower(key, label, unit, "idle", key) for key, (label, unit) in LABELS.items()],
        shown=("idle_between_percent", "idle_inside_percent"),
        measure=measure_idle,
        arguments=sizes,
    )


# --- by the kind of step ----------------------------------------------------------------------------------------------


def kind_of(batch: int) -> str:
    """The kind of a step of so many decodes: "decode, 33 to 64"."""
    last = next((last for last in BATCHES if batch <= last), BATCHES[-1])
    first = 1 + max((b for b in BATCHES if b < last), default=0)
    return f"decode, {first} to {last}"


KINDS = (PROMPTS, *(kind_of(batch) for batch in reversed(BATCHES)))


def least_of(plan: StepPlan, needs: Needs, limits: Limits) -> tuple[str, float]:
    """The kind of a step, and the seconds that it takes at least. A last chunk of one token counts as a decode."""
    step = shape_of(plan)
    num_bytes = step.decode_keys * needs.key_bytes
    if not step.prompts:
        num_bytes += needs.read_bytes(step.decodes)
    operations = step.prompt_tokens * needs.token_operations + step.prompt_pairs * needs.pair_operations
    operations += (step.samples - step.decodes) * needs.sample_operations
    least = num_bytes / limits.bytes_per_second + operations / limits.operations_per_second
    return PROMPTS if step.prompts else kind_of(step.decodes), least


def measure_phases(
    engine: Engine, repeats: int, sizes: dict[str, int], limits: dict[str, float], model: str, itemsize: int
) -> list[Measured]:
    """In the process of the engine. Each kind of step: {"steps", "seconds", "least_seconds"}."""
    chosen, needs = workloads.Sizes(**sizes), Needs(read_architecture(Path(model))[0], itemsize)
    scheduler = engine.llm.engine.scheduler
    commit = scheduler.commit

    found: Measured = {}
    begin = 0.0

    def timed_commit(plan: Any, result: Any) -> Any:
        # The plan is not kept: Python's garbage collector would go through all plans again and again.
        nonlocal begin
        end = time.perf_counter()
        kind, least = least_of(plan, needs, Limits(**limits))
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
        begin = time.perf_counter()
        engine.generate(prompts, max_tokens, SAMPLED)
        repetitions.append(found)
    return repetitions


def phases(options: Namespace) -> Showcase:
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
        measure=measure_phases,
        repeats=3,
        arguments={
            "sizes": limit["workload"],
            "limits": limit["limits"],
            "model": str(options.model),
            "itemsize": 4 if options.quick else 2,
        },
        extra={"roofline": limit},
    )


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
