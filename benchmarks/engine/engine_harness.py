"""How engines are compared: each in a fresh process, in turn, several rounds; what is measured is the benchmark's own.

Contenders are nanovllm, in one or more configurations, and vLLM where it can be imported. The JSON is written after
every process, so that a run that is cut short keeps its rounds. A contender that fails is reported; the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.lib import harness
from benchmarks.lib.harness import Contender, Showcase
from benchmarks.lib.worker import facts

SHAPE = harness.ROOT / "benchmarks" / "shapes" / "Qwen3-0.6B"
PROCESS_SECONDS = 300  # vLLM took 136 s to start for the first time; what takes longer than this hangs
# No questions to the network; FlashInfer is no part of what was packed for machines without one.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def add_options(parser: argparse.ArgumentParser, rounds: int = 2) -> None:
    parser.add_argument("--out", type=Path, required=True, help="directory for the JSON")
    parser.add_argument("--rounds", type=int, default=rounds, help="processes of every contender (default %(default)s)")
    parser.add_argument("--model", type=Path, help="directory with a config.json (default: this benchmark's shape)")
    parser.add_argument("--device", help="default: cuda if there is a GPU, else cpu")
    parser.add_argument("--vllm-path", metavar="PATH", help="where vLLM can be imported from: its PYTHONPATH")
    parser.add_argument("--flash-path", metavar="PATH", help="the same for flash-attn, for nanovllm's processes")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--quick", action="store_true", help="the embedded model and a tiny workload: for tests")


def check_options(options: argparse.Namespace) -> argparse.Namespace:
    """The same with its defaults filled in; exits with one line if they make no sense."""
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cpu" and not options.quick:
        sys.exit("this measures a GPU, and there is none here; --quick tries it out on a CPU")
    if options.rounds < 1:
        sys.exit(f"--rounds {options.rounds}: it must be at least 1")
    options.model = (options.model or (harness.EMBEDDED_MODEL if options.quick else SHAPE)).resolve()
    return options


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """What every contender is configured with, whichever package it is."""
    if options.quick:
        return {"max_model_len": 256}
    return {"load_format": "dummy", "max_model_len": 4096, "gpu_memory_utilization": 0.9}


def ours(options: argparse.Namespace, name: str = "nanovllm", variant: str | None = None, **config: Any) -> Contender:
    """nanovllm with `config` on top of what all have."""
    config = {**engine_options(options), "device": options.device, **config}
    if options.device == "cpu":
        config.setdefault("kv_cache_gib", 1 / 16)
    spec = {"package": "nanovllm", "options": config, "variant": variant, "path": options.flash_path}
    return Contender(name, spec)


def vllm(options: argparse.Namespace, name: str = "vLLM", **config: Any) -> list[Contender]:
    """vLLM as a list of one, or of none where it cannot be imported."""
    if options.vllm_path is None and importlib.util.find_spec("vllm") is None:
        return []
    spec = {"package": "vllm", "options": {**engine_options(options), **config}, "variant": None}
    return [Contender(name, {**spec, "path": options.vllm_path})]


def python_path(contender: Contender) -> dict[str, str]:
    """The environment of a process of this contender: only its own packages can be imported."""
    path = contender.spec["path"]
    return {**os.environ, **ENVIRONMENT, **({"PYTHONPATH": path} if path else {})}


def job_of(contender: Contender, module: str, arguments: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What `engine_worker.run` needs to know."""
    place = {"model": str(options.model), "device": options.device}
    return {**contender.spec, **place, "module": module, "arguments": arguments, "started": time.time()}


def run_process(
    contender: Contender,
    module: str,
    arguments: dict[str, Any],
    options: argparse.Namespace,
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """What `module.measure` found in a fresh process. Raises RuntimeError with the last words of one that fails."""
    job = job_of(contender, module, arguments, options)
    variables = {**python_path(contender), **(environment or {})}
    with tempfile.TemporaryDirectory() as scratch:
        result, log = Path(scratch) / "result.json", Path(scratch) / "log"
        with log.open("w") as words:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.engine.engine_worker", str(result)],
                stdin=subprocess.PIPE,
                stdout=words,
                stderr=words,
                text=True,
                cwd=harness.ROOT,
                env=variables,
                start_new_session=True,
            )
            try:
                process.communicate(json.dumps(job), timeout=PROCESS_SECONDS)
            except subprocess.TimeoutExpired:
                words.write(f"\ngave up after {PROCESS_SECONDS} s\n")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and what it started, so that the card is free
                process.wait()
        if process.returncode != 0 or not result.is_file():
            raise RuntimeError(
                f"{contender.name} failed (exit {process.returncode}):\n{log.read_text()[-2000:].strip()}"
            )
        measured: dict[str, Any] = json.loads(result.read_text())
    return measured


@dataclass
class Comparison:
    """A showcase of engines under way: its records so far, and what failed."""

    showcase: Showcase
    options: argparse.Namespace
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.engines: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        self.earlier_failures: dict[str, str] = {}  # in the file that is added to
        self.console = Console(width=150)

    def run(
        self, measure: Callable[[Contender], dict[str, Any]], only: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Call `measure` for every contender in every round (see `run_process`), write it all down and print it.

        only: the names of the contenders to measure. Of the others the result keeps what is in the file already.
        """
        start = time.perf_counter()
        contenders = [c for c in self.showcase.contenders if only is None or c.name in only]
        if only is not None:
            self.keep_others(only)
        for number in range(self.options.rounds):
            for contender in harness.order_of_round(contenders, number):
                if contender.name in self.failures:
                    continue
                begin = time.perf_counter()
                try:
                    measured = measure(contender)
                except RuntimeError as error:
                    self.failures[contender.name] = str(error)
                    self.console.print(str(error), markup=False)
                    continue
                self.take(number, contender, measured)
                took, total = time.perf_counter() - begin, time.perf_counter() - start
                self.console.print(f"round {number + 1} {contender.name}: {took:.0f} s, {total:.0f} s so far")
        if not self.records:
            sys.exit(f"{self.showcase.name}: nothing could be measured")
        result = self.result()
        present(result, self.console)
        self.console.print(f"written to {write(result, self.options.out)}")
        return result

    def keep_others(self, measured_now: Collection[str]) -> None:
        """Take over the other contenders from the file that will be written, if the same was measured there."""
        machine = facts(self.options.device)
        path = harness.result_path(self.showcase.name, machine["device"], self.options.out)
        if not path.is_file():
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["commit"] != commit(self.options) or found["workload"] != self.showcase.workload:
            self.console.print(f"{path} is of another commit or workload: written anew")
            return
        known = {contender.name for contender in self.showcase.contenders} - set(measured_now)
        for record in found["rounds"]:
            if record["contender"] in known:
                self.records.append(record | {"facts": found["machine"], "parameters": None})
        self.engines |= {name: engine for name, engine in found["engines"].items() if name in known}
        self.earlier_failures = {name: text for name, text in found["failures"].items() if name in known}

    def take(self, number: int, contender: Contender, measured: dict[str, Any]) -> None:
        common = {"contender": contender.name, "pid": measured["pid"], "facts": measured["facts"]}
        for i, scenarios in enumerate(measured["repetitions"]):
            record = {"round": number * len(measured["repetitions"]) + i, **common, "scenarios": scenarios}
            self.records.append(record | {"parameters": None})
        config = {k: v for k, v in contender.spec["options"].items() if k != "device"}
        seen = self.engines.setdefault(contender.name, {"engine": measured["engine"], "options": config, "ready_s": []})
        seen["ready_s"].append(measured["ready_seconds"])
        write(self.result(), self.options.out)

    def result(self) -> dict[str, Any]:
        made = harness.assemble(self.showcase, self.records, self.options.model)
        made |= {
            "engines": self.engines,
            "failures": self.earlier_failures | {k: v.splitlines()[-1] for k, v in self.failures.items()},
            **self.extra,
        }
        made |= {"model": {"name": harness.model_name(self.options.model)}, "commit": commit(self.options)}
        return made


def commit(options: argparse.Namespace) -> dict[str, Any]:
    """Which code is measured. A copy of the working tree has no git to ask, so it can be told."""
    return {"hash": options.commit, "modified": False} if options.commit else harness.commit()


def present(result: dict[str, Any], console: Console) -> None:
    """The table, and below it what the figures say."""
    from benchmarks.stages.stage_bench import remarks, render

    console.print(render(result))
    lines: Iterable[str] = result["notes"]
    figure = next(f for f in result["figures"] if f["key"] == result["headline"])
    if result["contender"] != result["rival"] and {result["contender"], result["rival"]} <= figure["values"].keys():
        lines = remarks(result)
    for line in lines:
        console.print(f"- {line}")


def write(result: dict[str, Any], directory: Path) -> Path:
    return harness.write_result(result, directory)
