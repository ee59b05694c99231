"""A recording in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open.

python -m tools.pictures.chrome_trace run.jsonl     writes run.trace.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.trace_view.engine_state import EngineState, Event
from nanovllm.trace_view.recording import Recording

ENGINE, REQUESTS = 1, 2  # "processes" of the picture


def chrome_trace(events: Sequence[Event]) -> dict[str, Any]:
    """The events in Chrome's format: a row for the engine's steps, one per sequence, counters for queues and blocks.

    Times are in microseconds. A step lasts from its plan to its last token. With asynchronous scheduling a step is
    planned while the step before it runs, and is drawn from the end of that step.
    """
    zero = events[0]["t"] if events else 0.0
    span = step_times(events)
    out = [named("process_name", ENGINE, 0, "engine"), named("thread_name", ENGINE, 0, "steps")]
    out.append(named("process_name", REQUESTS, 0, "requests"))
    state = EngineState()
    waits_since: dict[int, float] = {}
    busy_until: dict[int, float] = {}
    tokens: dict[int, int] = {}

    def box(name: str, pid: int, row: int, start: float, end: float, **args: Any) -> None:
        ts, dur = round((start - zero) * 1e6, 1), round((end - start) * 1e6, 1)
        out.append({"ph": "X", "name": name, "pid": pid, "tid": row, "ts": ts, "dur": max(0.0, dur), "args": args})

    for event in events:
        kind, t = event["type"], event["t"]
        row = state.hear(event)
        if kind == "added":
            request, choice = state.names[row]
            out.append(named("thread_name", REQUESTS, row, f"request {request}" + f" choice {choice}" * (choice > 0)))
        if kind in ("added", "preempted"):
            waits_since[row] = t
            if kind == "preempted":
                out.append({"ph": "i", "s": "t", "name": kind, "pid": REQUESTS, "tid": row, "ts": (t - zero) * 1e6})
        elif kind in ("admitted", "finished") and row in waits_since:
            since = max(waits_since.pop(row), busy_until.get(row, zero))
            box("waiting", REQUESTS, row, since, max(since, t))
        elif kind == "scheduled":
            start, end = span[event["step"]]
            tokens[event["step"]] = tokens.get(event["step"], 0) + event["tokens"]
            name = f"{state.phases[row]} {event['tokens']}".removesuffix(" 1")
            box(name, REQUESTS, row, start, end, step=event["step"], tokens=event["tokens"], cached=event["cached"])
            busy_until[row] = end
        if kind in ("added", "admitted", "preempted", "finished", "blocks"):
            running = state.status.count("running")
            values = {"running": running, "waiting": len(waits_since), "blocks in use": len(state.owners)}
            for name, value in values.items():
                out.append({"ph": "C", "name": name, "pid": ENGINE, "ts": (t - zero) * 1e6, "args": {name: value}})
    for step, count in tokens.items():
        box(f"step {step}", ENGINE, 0, *span[step], tokens=count)
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def step_times(events: Sequence[Event]) -> dict[int, tuple[float, float]]:
    """When each step began and ended, in seconds, so that no two overlap."""
    began: dict[int, float] = {}
    ended: dict[int, float] = {}
    for event in events:
        if event["type"] == "scheduled":
            began.setdefault(event["step"], event["t"])
        elif event["type"] == "token":
            ended[event["step"]] = event["t"]
    times: dict[int, tuple[float, float]] = {}
    before = float("-inf")
    steps = sorted(began)
    planned_next = [*(began[step] for step in steps[1:]), events[-1]["t"] if events else 0.0]
    for step, following in zip(steps, planned_next, strict=False):
        start = max(began[step], before)
        # A chunk of a prompt gives no token: the step is over when the next step is planned
        before = max(start, ended.get(step, following))
        times[step] = start, before
    return times


def named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m tools.pictures.chrome_trace", description="A recording, for Perfetto.")
    parser.add_argument("recording", type=Path, help="a file that Recording.save wrote")
    path: Path = parser.parse_args(arguments).recording
    out = path.with_suffix(".trace.json")
    try:
        out.write_text(json.dumps(chrome_trace(Recording.load(path).events)), encoding="utf-8")
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
    print(out)


if __name__ == "__main__":
    main()
