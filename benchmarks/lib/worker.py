"""One contender on some scenarios, in a process that does nothing else: `python -m benchmarks.lib.worker RESULT < JOB`.

Job and result are JSON (`harness.run_worker` writes and reads them). Model and libraries are loaded and warmed up
before the clock starts.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.lib.recorder import CLOCKS, CallRecorder, ClockName, choose_clock, metrics
from benchmarks.lib.workloads import Request, Scenario

BLOCK_SIZE = 16


class Runner(Protocol):
    """What generates: a stage or Hugging Face. `num_parameters` and `vocab_size` describe its model."""

    num_parameters: int
    vocab_size: int

    def prepare(self, scenario: Scenario) -> None:
        """Get ready for a scenario: nothing of earlier ones may be left in a cache."""
        ...

    def generate(self, requests: list[Request], recorder: CallRecorder) -> list[list[int]]: ...


class StageRunner:
    """An engine of `stages/`, built anew for every scenario with the scenario's limits."""

    def __init__(
        self, model: str, device: str, *, number: int, options: dict[str, Any] | None = None, compiled: bool = False
    ) -> None:
        from benchmarks.stages.compiled import CompiledEngine
        from stages.manifest import load_stage

        self.stage = load_stage(number)
        self.engine_class: Any = CompiledEngine if compiled else self.stage.engine_class()
        self.options = options or {}
        self.model, self.device = model, device
        self.recorder: CallRecorder | None = None
        self.engine: Any = None
        self.num_parameters = self.vocab_size = 0
        if number == 2:
            self.watch_static_cache()

    def watch_static_cache(self) -> None:
        """Stage 2 has no blocks to tell of, so the rectangle that it allocates is looked at as it is made."""
        from stages import stage_2_kv_cache

        runner = self

        class WatchedKVCache(stage_2_kv_cache.KVCache):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                if runner.recorder is not None:
                    runner.recorder.on_rectangle(*self.k.shape[1:3])

        stage_2_kv_cache.KVCache = WatchedKVCache  # type: ignore[misc, assignment]

    def prepare(self, scenario: Scenario) -> None:
        longest = max(request.length for call in scenario.calls for request in call)
        limits = {
            "block_size": BLOCK_SIZE,
            "num_blocks": scenario.num_blocks(BLOCK_SIZE),
            "max_num_seqs": scenario.max_num_seqs if self.stage.number > 2 else scenario.num_rows(longest),
        }
        options = {name: value for name, value in limits.items() if name in self.stage.options} | self.options
        self.engine = None  # the one before goes first, with its memory and its processes
        self.engine = self.engine_class(self.model, device=self.device, on_event=self.on_event, **options)
        self.num_parameters = sum(p.numel() for p in self.engine.model.parameters())
        self.vocab_size = self.engine.config.vocab_size

    def on_event(self, event: dict[str, Any]) -> None:
        if self.recorder is not None:
            self.recorder.on_event(event)

    def generate(self, requests: list[Request], recorder: CallRecorder) -> list[list[int]]:
        from stages.core import SamplingParams

        self.recorder = recorder
        params = [SamplingParams(temperature=0, max_tokens=r.max_tokens, ignore_eos=True) for r in requests]
        outputs: list[list[int]] = self.engine.generate([r.prompt for r in requests], params)
        return outputs


def make_runner(contender: dict[str, Any], model: str, device: str) -> Runner:
    options = {name: value for name, value in contender.items() if name != "kind"}
    if contender["kind"] == "stage":
        return StageRunner(model, device, **options)
    if contender["kind"] == "engine":
        from benchmarks.engine.engine_runner import EngineRunner

        return EngineRunner(model, device)
    from benchmarks.stages.hugging_face import HuggingFaceRunner  # takes seconds to import

    return HuggingFaceRunner(model, device, **options)


def run_scenario(runner: Runner, scenario: Scenario, device: str, clock: ClockName) -> dict[str, Any]:
    runner.prepare(scenario)
    warm_up = scenario.warm_up(runner.vocab_size)
    runner.generate(warm_up, CallRecorder(warm_up, BLOCK_SIZE, clock))
    calls, outputs = [], []
    wall_start = time.perf_counter()
    for requests in scenario.calls:
        recorder = CallRecorder(requests, BLOCK_SIZE, clock)
        synchronize(device)
        start = CLOCKS[clock]()
        outputs.append(runner.generate(requests, recorder))
        synchronize(device)
        calls.append((recorder, start, CLOCKS[clock]()))
    return metrics(calls, outputs, time.perf_counter() - wall_start) | memory(runner)


def memory(runner: Runner) -> dict[str, float]:
    """MiB of weights, and of room for keys and values, that this process holds, where they can be looked at."""
    found = {}
    model = runner.engine.model if isinstance(runner, StageRunner) else getattr(runner, "model", None)
    if isinstance(model, torch.nn.Module):
        found["weights_mib"] = sum(p.nbytes for p in model.parameters()) / 2**20
    if cache := getattr(getattr(runner, "engine", None), "cache", None):
        found["kv_mib"] = (cache.k.nbytes + cache.v.nbytes) / 2**20
    return found


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def processor_name() -> str:
    """The CPU's model as the operating system calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def facts(device: str) -> dict[str, Any]:
    """What a figure depends on besides the code; nothing that names the machine or its owner."""
    return {
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu",
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
    }


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job (see `harness.run_worker`) in this process."""
    runner = make_runner(job["contender"], job["model"], job["device"])
    scenarios = [Scenario.from_json(raw) for raw in job["scenarios"]]
    several = any(scenario.several_processes for scenario in scenarios)
    clock: ClockName = "wall" if several else choose_clock(job["device"], job["threads"])
    results = {scenario.name: run_scenario(runner, scenario, job["device"], clock) for scenario in scenarios}
    return {
        "pid": os.getpid(),
        "facts": {**facts(job["device"]), "clock": clock},
        "parameters": runner.num_parameters,
        "scenarios": results,
    }


def main() -> None:
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    Path(sys.argv[1]).write_text(json.dumps(run(job)))


if __name__ == "__main__":
    main()
