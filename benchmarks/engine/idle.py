"""How long the GPU waits for the host between two steps of steady decode, from a profiler's trace.

    python -m benchmarks.engine.idle --out DIR

256 sequences decode; the trace covers 50 steps. A kernel belongs to the step that launched it. Between the last kernel
of one step and the first of the next the GPU is idle; gaps between the kernels of a step are counted apart (in a CUDA
graph they are the graph's own). The trace is kept beside the JSON. On a CPU, torch's operators stand in for kernels.
"""

import gzip
import json
import time
from argparse import Namespace
from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.engine import ours, run
from benchmarks.lib import harness
from benchmarks.lib.harness import Contender, Measured, Showcase, lower
from benchmarks.lib.process import Engine, random_prompts

MARK = "benchmark step"
UNMARKED = 5
SIZES = {"batch": 256, "prompt_len": 700, "settle": 80, "steps": 50, "highest_id": 10_000}
QUICK = {"batch": 3, "prompt_len": 8, "settle": 3, "steps": 6, "highest_id": 500}
LABELS = {
    "idle_between_percent": ("GPU idle between steps", "%"),
    "idle_inside_percent": ("GPU idle within a step", "%"),
    "kernels_per_step": ("kernels in a step", ""),
    "step_ms": ("a step, without the profiler", "ms"),
    "traced_step_ms": ("a step, with it", "ms"),
}

Event = dict[str, Any]  # of a Chrome trace: times in microseconds


def measure(
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


def showcase(options: Namespace) -> Showcase:
    sizes = QUICK if options.quick else SIZES
    return Showcase(
        name="idle",
        title="Does the GPU wait for the host?",
        workload=f"{sizes['batch']} sequences decode, {sizes['prompt_len']} tokens of prompt, {sizes['steps']} steps",
        contenders=[ours(options), ours(options, "no asynchronous scheduling", async_scheduling=False)],
        figures=[lower(key, label, unit, "idle", key) for key, (label, unit) in LABELS.items()],
        shown=("idle_between_percent", "idle_inside_percent"),
    )


def trace_one(contender: Contender, options: Namespace) -> dict[str, Any]:
    """A process of one contender. Its trace has its name."""
    options.out.mkdir(parents=True, exist_ok=True)
    trace = options.out.resolve() / f"trace_{contender.name.replace(' ', '_')}.json.gz"
    arguments = {**(QUICK if options.quick else SIZES), "trace": str(trace)}
    return harness.run_process(contender, "benchmarks.engine.idle", arguments, options)


def main() -> None:
    run(showcase, "idle", __doc__, measure=trace_one)


if __name__ == "__main__":
    main()
