"""One engine of the race, in a process of its own: `python -m tools.race.worker`.

The process exchanges lines of JSON with `tools/race/race.py`. It reads the job, loads and warms up, and writes
{"ready": true}. Any further line starts the clock. Then it writes how far it is from time to time, and at last the
result.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.lib.process import facts, synchronize
from benchmarks.lib.recorder import CLOCKS, ClockName
from stages.manifest import load_stage
from tools.race.workload import BLOCK_SIZE, NANOVLLM, Workload

REPORT_EVERY = 0.04  # seconds; oftener than the picture is drawn, and too seldom to be felt
Event = dict[str, Any]


class Log:
    """Listens to an engine: keeps every event, and tells now and then how far it has come.

    Events are kept with the time since the start by `clock` (see `benchmarks/lib/recorder.py`). Progress is told by the
    clock on the wall, because somebody is watching.
    """

    def __init__(self, send: Callable[[Event], None], clock: ClockName) -> None:
        self.send, self.clock = send, CLOCKS[clock]
        self.events: list[Event] = []
        self.listening = False
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

    def __call__(self, event: Event) -> None:
        if not self.listening:
            return
        self.events.append(event | {"t": round(self.clock() - self.zero, 6)})
        if event["type"] == "token":
            self.tokens += len(event["ids"])
            if event["t"] - self.reported >= REPORT_EVERY:
                self.reported = event["t"]
                self.send({"at": [event["t"] - self.started, self.tokens, self.finished]})
        elif event["type"] == "finished":
            self.finished += 1


class StageRunner:
    """A stage, with the interface of both runners."""

    def __init__(self, number: int, model: str, device: str, workload: Workload, log: Log) -> None:
        stage = load_stage(number)
        self.engine = stage.engine_class()(model, device=device, on_event=log, **workload.stage_options(stage))

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        """Generate greedily exactly so many tokens for each prompt."""
        from stages.core import SamplingParams

        self.engine.trace.step = 0
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in max_tokens]
        outputs: list[list[int]] = self.engine.generate(prompts, params)
        return outputs

    def close(self) -> None:
        if hasattr(self.engine, "close"):  # stage 7 has processes of its own
            self.engine.close()


class NanovllmRunner:
    """The engine. It numbers requests and steps over all calls; the log gets them as a stage numbers them.

    That is, in the race's call requests from 0 and steps from 1.
    """

    def __init__(self, model: str, device: str, workload: Workload, log: Log) -> None:
        from nanovllm import LLM

        self.log = log
        self.first_request = self.first_step = 0
        self.llm = LLM(
            model,
            device=device,
            skip_tokenizer_init=True,
            on_event=self.on_event,
            max_num_seqs=workload.max_num_seqs,
            kvcache_block_size=BLOCK_SIZE,
            num_kv_blocks=workload.num_blocks,
        )

    def on_event(self, event: Event) -> None:
        request, step = int(event["request"]), event["step"]
        if not self.log.listening:
            self.first_request, self.first_step = request + 1, step + 1
        self.log(event | {"request": request - self.first_request, "step": max(0, step - self.first_step + 1)})

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        from nanovllm import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in max_tokens]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def close(self) -> None:
        self.llm.close()


Runner = StageRunner | NanovllmRunner


def make_runner(engine: str, *args: Any) -> Runner:
    return NanovllmRunner(*args) if engine == NANOVLLM else StageRunner(int(engine.removeprefix("stage_")), *args)


def warm_up(runner: Runner, workload: Workload, vocab_size: int) -> None:
    """Generate two tokens for random prompts of the same number and lengths, so that compilers have run."""
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab_size) for _ in prompt] for prompt in workload.prompts]
    runner.generate(prompts, [2] * len(prompts))


def run(job: dict[str, Any], send: Callable[[Event], None], wait: Callable[[], object]) -> dict[str, Any]:
    """Run the job in this process, and return its result."""
    workload, device = Workload(**job["workload"]), job["device"]
    log = Log(send, job["clock"])
    runner = make_runner(job["engine"], job["model"], device, workload, log)
    config = json.loads((Path(job["model"]) / "config.json").read_text(encoding="utf-8"))
    warm_up(runner, workload, config["vocab_size"])
    send({"ready": True})
    wait()
    synchronize(device)
    log.start()
    outputs = runner.generate(workload.prompts, workload.max_tokens)
    synchronize(device)
    seconds = log.stop()
    runner.close()
    machine = {**facts(device), "clock": job["clock"]}
    return {"seconds": seconds, "outputs": outputs, "events": log.events, "machine": machine}


def private_channel() -> TextIO:
    """Standard output, for the protocol alone: what a library prints goes to standard error from now on."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def main() -> None:
    channel = private_channel()

    def send(message: Event) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    def wait() -> None:
        if not sys.stdin.readline():
            sys.exit("the race was called off")

    job = json.loads(sys.stdin.readline())
    if job["device"] == "cpu":
        torch.set_num_threads(1)  # as fast as two on a model this small, and it disturbs nobody
    send({"result": run(job, send, wait)})


if __name__ == "__main__":
    main()
