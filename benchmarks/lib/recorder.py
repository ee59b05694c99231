"""From what a contender did to figures: token times, memory held and memory used, preemptions.

The stages tell it by their events; Hugging Face's `generate` by a stopping criterion that only looks at the clock.

Which clock: on one CPU thread that computes all the time, the process's own CPU time is what a stopwatch would show on
an idle machine, and it hardly changes when the machine is busy with something else. Everywhere else, the wall clock.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

from benchmarks.lib.workloads import Request
from nanovllm.trace_view.engine_state import EngineState

ClockName = Literal["cpu", "wall"]
CLOCKS: dict[ClockName, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}


def choose_clock(device: str, threads: int) -> ClockName:
    return "cpu" if device == "cpu" and threads == 1 else "wall"


class CallRecorder:
    """One call of `generate`: give it the events, or tokens and rectangles. Times are in seconds of `clock`."""

    def __init__(self, requests: list[Request], block_size: int, clock: ClockName) -> None:
        self.clock = CLOCKS[clock]
        self.requests = requests
        self.block_size = block_size
        self.token_times: list[list[float]] = [[] for _ in requests]
        self.preemptions = 0
        self.state = EngineState()
        self.held_at_end: dict[int, int] = {}  # blocks of a stage's sequences that are over and will free them next
        self.most_at_once = 0  # sequences with KV memory of their own
        self.peak_slots = 0  # tokens' worth of memory in use, shared blocks counted once
        self.reserved_slots = 0  # summed over the sequences, each at its end

    def on_event(self, event: dict[str, Any]) -> None:
        kind, request = event["type"], event["request"]
        if kind == "token":
            self.token_times[request] += [self.clock()] * len(event["ids"])
        elif kind != "scheduled":  # neither of these two moves blocks, and they come in every step
            self.preemptions += kind == "preempted"
            if kind == "finished":
                self.held_at_end[request] = len(self.state.tables.get(request, ()))
            self.state.hear(event)
            if kind == "blocks":
                self.reserved_slots += self.held_at_end.pop(request, 0) * self.block_size
                self.most_at_once = max(self.most_at_once, len(self.state.tables))
                self.peak_slots = max(self.peak_slots, len(self.state.owners) * self.block_size)

    def on_rectangle(self, rows: int, length: int) -> None:
        """A contiguous cache of `rows` sequences of `length` tokens each, which all hold it to the end."""
        self.most_at_once = max(self.most_at_once, rows)
        self.peak_slots = max(self.peak_slots, rows * length)
        self.reserved_slots += rows * length

    @property
    def filled_slots(self) -> int:
        """Slots that hold a key and value at the end: the last token is never fed back, so it has none."""
        return sum(request.length - 1 for request in self.requests)


def metrics(
    calls: list[tuple[CallRecorder, float, float]], outputs: list[list[list[int]]], wall_seconds: float
) -> dict[str, Any]:
    """The figures of a scenario. `calls`: recorder, start and end of each call; `outputs`: tokens a request a call.

    Raises ValueError if a request did not get exactly the tokens that it was to get.
    """
    for (recorder, _, _), call in zip(calls, outputs, strict=True):
        wanted = [request.max_tokens for request in recorder.requests]
        if [len(tokens) for tokens in call] != wanted or [len(times) for times in recorder.token_times] != wanted:
            raise ValueError(f"wrong number of tokens: wanted {wanted}, got {[len(tokens) for tokens in call]}")
    first_tokens = [times[0] - start for recorder, start, _ in calls for times in recorder.token_times]
    gaps = [
        later - earlier
        for recorder, _, _ in calls
        for times in recorder.token_times
        for earlier, later in pairwise(times)
    ]
    seconds = sum(end - start for _, start, end in calls)
    num_tokens = sum(len(tokens) for call in outputs for tokens in call)
    reserved = sum(recorder.reserved_slots for recorder, _, _ in calls)
    filled = sum(recorder.filled_slots for recorder, _, _ in calls)
    return {
        "seconds": seconds,
        "wall_seconds": wall_seconds,
        "output_tokens": num_tokens,
        "tokens_per_second": num_tokens / seconds,
        "ms_per_token": 1000 * seconds / num_tokens,
        "ttft_ms": 1000 * statistics.mean(first_tokens),
        "decode_ms": 1000 * statistics.median(gaps) if gaps else None,
        "most_at_once": max(recorder.most_at_once for recorder, _, _ in calls) or None,
        "peak_slots": max(recorder.peak_slots for recorder, _, _ in calls) or None,
        "waste_percent": 100 * (1 - filled / reserved) if reserved else None,
        "preemptions": sum(recorder.preemptions for recorder, _, _ in calls),
        "tokens_digest": hashlib.sha256(json.dumps(outputs).encode()).hexdigest()[:16],
    }
