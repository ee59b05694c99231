"""One engine of the race, in a process that does nothing else: `python -m tools.race.worker`.

Talks with `tools/race/race.py` in lines of JSON. In comes the job; out goes {"ready": true} when model and libraries
are loaded and warmed up; in comes any line, which starts the clock; out go the moments, and at last the result.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

from benchmarks.lib.recorder import CLOCKS, ClockName
from benchmarks.lib.worker import facts, synchronize
from stages.manifest import Stage, load_stage
from tools.race.workload import BLOCK_SIZE, NANOVLLM, Workload

REPORT_EVERY = 0.04  # seconds; oftener than the picture is drawn, and too seldom to be felt
Event = dict[str, Any]


class Log:
    """Listens to an engine: keeps every event, and tells now and then how far it has come.

    What is kept has its time from the start by `clock` (see `benchmarks/lib/recorder.py`); what is told, by the
    clock on the wall, since somebody is watching.
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


class Runner(Protocol):
    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        """Greedily exactly so many tokens for each prompt."""
        ...

    def close(self) -> None: ...


class StageRunner:
    def __init__(self, number: int, model: str, device: str, workload: Workload, log: Log) -> None:
        stage = load_stage(number)
        options = stage_options(stage, workload)
        self.engine = stage.engine_class()(model, device=device, on_event=log, **options)

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        from stages.core import SamplingParams

        self.engine.trace.step = 0
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in max_tokens]
        outputs: list[list[int]] = self.engine.generate(prompts, params)
        return outputs

    def close(self) -> None:
        if hasattr(self.engine, "close"):  # stage 7 has processes of its own
            self.engine.close()


def stage_options(stage: Stage, workload: Workload) -> dict[str, int]:
    """The same KV memory for every stage: as blocks, or as rows that could each hold the longest request."""
    if "num_blocks" in stage.options:
        limits = {"num_blocks": workload.num_blocks, "block_size": BLOCK_SIZE, "max_num_seqs": workload.max_num_seqs}
    else:
        limits = {"max_num_seqs": max(1, min(workload.max_num_seqs, workload.kv_slots // workload.longest))}
    return {name: value for name, value in limits.items() if name in stage.options}


class NanovllmRunner:
    """The engine, which numbers its requests over all calls; here they count from 0, as a stage's do."""

    def __init__(self, model: str, device: str, workload: Workload, log: Log) -> None:
        from nanovllm import LLM

        self.log = log
        self.first = self.first_step = 0
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
        if not self.log.listening:
            self.first, self.first_step = int(event["request"]) + 1, event["step"] + 1
            return
        for told in as_a_stage(event, self.first, self.first_step):
            self.log(told)

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        from nanovllm import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in max_tokens]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def close(self) -> None:
        self.llm.close()


def as_a_stage(event: Event, first: int, first_step: int) -> list[Event]:
    """What a stage would have said: requests count from 0 and steps from 1, and a sequence that lets go of its blocks
    says so. The engine names the blocks that are free now, and is silent if others still hold them all."""
    told = {name: value for name, value in event.items() if name != "choice"}
    told |= {"request": int(event["request"]) - first, "step": max(0, event["step"] + 1 - first_step)}
    if event["type"] not in ("preempted", "finished"):
        return [told]
    when_and_who = {name: told[name] for name in ("t", "step", "request")}
    return [told, when_and_who | {"type": "blocks", "taken": [], "shared": [], "freed": []}]


def make_runner(engine: str, model: str, device: str, workload: Workload, log: Log) -> Runner:
    if engine == NANOVLLM:
        return NanovllmRunner(model, device, workload, log)
    return StageRunner(int(engine.removeprefix("stage_")), model, device, workload, log)


def warm_up(runner: Runner, workload: Workload, vocab_size: int) -> None:
    """As many prompts of the same lengths, of random tokens, two tokens each: whatever compiles has compiled then."""
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab_size) for _ in prompt] for prompt in workload.prompts]
    runner.generate(prompts, [2] * len(prompts))


def run(job: dict[str, Any], send: Callable[[Event], None], wait: Callable[[], object]) -> dict[str, Any]:
    """Do a job in this process."""
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
    """Standard output for the protocol alone: whatever a library prints goes to standard error from now on."""
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
