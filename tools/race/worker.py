"""One engine of the race, in a process of its own, which `tools/race/race.py` starts.

It loads, warms up, and sends {"ready": True}. The next message that it receives starts the clock. From time to time it
sends how far it is, and at the end the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.lib.process import ClockName, facts, synchronize
from benchmarks.lib.workloads import BLOCK_SIZE, make_requests
from benchmarks.stages.runners import CallRecorder, EngineRunner, Runner, StageRunner
from nanovllm.trace_view.engine_state import Event
from tools.race.workload import NANOVLLM, Workload

REPORT_EVERY = 0.04  # seconds; oftener than the picture is drawn, and too seldom to be felt


class Log(CallRecorder):
    """Listens to an engine from `start` to `stop`: keeps every event, and tells now and then how far it has come.

    Events are kept with the time since the start by `clock` (see `benchmarks/lib/process.py`), and with their steps
    numbered from 1, whatever the warm-up has used up. Progress is told by the clock on the wall, because somebody is
    watching.
    """

    def __init__(self, send: Callable[[Event], None], clock: ClockName) -> None:
        super().__init__([], BLOCK_SIZE, clock)
        self.send = send
        self.events: list[Event] = []
        self.listening = False
        self.last_step = 0  # of the warm-up
        self.tokens = self.finished = 0
        self.zero = self.started = self.reported = 0.0

    def start(self) -> None:
        self.listening = True
        self.started = self.reported = time.perf_counter()
        self.zero = self.clock()

    def stop(self) -> float:
        """Seconds since the start."""
        self.listening = False
        return round(self.clock() - self.zero, 6)

    def on_event(self, event: Event) -> None:
        if not self.listening:
            self.last_step = event["step"]
            return
        step = max(0, event["step"] - self.last_step)
        self.events.append(event | {"t": round(self.clock() - self.zero, 6), "step": step})
        if event["type"] == "token":
            self.tokens += len(event["ids"])
            if event["t"] - self.reported >= REPORT_EVERY:
                self.reported = event["t"]
                self.send({"at": [event["t"] - self.started, self.tokens, self.finished]})
        elif event["type"] == "finished":
            self.finished += 1


def make_runner(engine: str, model: str, device: str) -> Runner:
    if engine == NANOVLLM:
        return EngineRunner(model, device)
    return StageRunner(model, device, number=int(engine.removeprefix("stage_")), options={})


def run(job: dict[str, Any], send: Callable[[Event], None], wait: Callable[[], object]) -> dict[str, Any]:
    """Run the job in this process, and return its result."""
    workload, device = Workload(**job["workload"]), job["device"]
    log = Log(send, job["clock"])
    runner = make_runner(job["engine"], job["model"], device)
    runner.prepare(workload.scenario)
    # Prompts of the same number and lengths, so that compilers have run
    runner.generate(make_requests([(len(prompt), 2) for prompt in workload.prompts], runner.vocab_size, seed=0), log)
    send({"ready": True})
    wait()
    synchronize(device)
    log.start()
    outputs = runner.generate(workload.scenario.calls[0], log)
    synchronize(device)
    seconds = log.stop()
    if isinstance(runner, StageRunner) and hasattr(runner.engine, "close"):  # stage 7 has processes of its own
        runner.engine.close()
    machine = {**facts(device), "clock": job["clock"]}
    return {"seconds": seconds, "outputs": outputs, "events": log.events, "machine": machine}
