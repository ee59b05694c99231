"""How contenders are compared: each in a fresh process, in turn, several rounds, medians, all written down.

Each round begins with another contender, so that neither a warm machine nor a busy minute favours anybody. The result
is written after every process: a run that is cut short keeps its rounds. A contender that fails is reported, and the
others go on.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.lib import tables
from benchmarks.lib.children import child
from benchmarks.lib.process import facts
from benchmarks.lib.workloads import Scenario

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
EMBEDDED_MODEL = ROOT / "assets" / "story_model"
PROCESS_SECONDS = 600  # a process that takes longer hangs: vLLM took 136 s to start for the first time
# No questions to the network; FlashInfer is no part of what was packed for machines without one.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TOKENIZERS_PARALLELISM": "false",
}

T = TypeVar("T")
Measured = dict[str, dict[str, Any]]  # by scenario, the figures of one repetition: {"batch 1": {"ms_per_token": 1.2}}
Measure = Callable[..., list[Any]]  # in a process of its own: figures of each repetition


# --- what is compared -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """`spec` is what its process needs to know; `arguments` of the benchmark's `measure` are for it alone."""

    name: str
    spec: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A column of the table. `value` takes it from one repetition; None where it does not apply."""

    key: str
    label: str
    unit: str
    better: Literal["lower", "higher"]
    value: Callable[[Measured], float | None]


@dataclass
class Showcase:
    """What is compared.

    `contender` (default: the first) is to win the figure `headline` against `rival` (default: the last). The tables of
    the README have the figures in `shown` (default: all). `measure` and `arguments` are what the process of a contender
    calls, `rounds` is the number of such processes, and `repeats` that of measurements in each; `run` is for a
    contender that takes several processes (see `run_process`). `scenarios` are for stages and Hugging Face. The result
    has `extra` in it, and what `derive` makes of it.
    """

    name: str
    title: str
    workload: str
    contenders: list[Contender]
    figures: list[Figure]
    headline: str = ""
    shown: tuple[str, ...] = ()
    contender: str = ""
    rival: str = ""
    notes: list[str] = field(default_factory=list)
    scenarios: list[Scenario] = field(default_factory=list)
    measure: Measure | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    rounds: int = 1
    repeats: int | None = None
    run: Callable[[Contender, argparse.Namespace], dict[str, Any]] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    derive: Callable[[dict[str, Any]], dict[str, Any]] = lambda result: {}

    def __post_init__(self) -> None:
        self.headline = self.headline or self.figures[0].key
        self.shown = self.shown or tuple(figure.key for figure in self.figures)
        self.contender = self.contender or self.contenders[0].name
        self.rival = self.rival or self.contenders[-1].name


def metric(scenario: str, name: str) -> Callable[[Measured], float | None]:
    """The value of a figure that is simply a metric of a scenario."""
    return lambda measured: measured[scenario].get(name) if scenario in measured else None


def lower(key: str, label: str, unit: str, scenario: str, name: str) -> Figure:
    """A figure that is a metric of a scenario, better the lower it is."""
    return Figure(key, label, unit, "lower", metric(scenario, name))


def higher(key: str, label: str, unit: str, scenario: str, name: str) -> Figure:
    """A figure that is a metric of a scenario, better the higher it is."""
    return Figure(key, label, unit, "higher", metric(scenario, name))


def by_batch(name: str, label: str, batches: Sequence[int]) -> list[Figure]:
    """A figure in milliseconds for each batch size; its scenarios are called "batch 8"."""
    return [lower(f"{name}_{b}", f"{label}, batch {b}", "ms", f"batch {b}", name) for b in batches]


def make_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Of the command `python -m benchmarks.MODULE`, whose docstring's first line says what it does."""
    name, says = f"python -m benchmarks.{module}", (doc or "").partition("\n")[0]
    return argparse.ArgumentParser(prog=name, description=says)


# --- one process ------------------------------------------------------------------------------------------------------


def python_path(contender: Contender) -> dict[str, str]:
    """The environment of a process of this contender: only its own packages can be imported."""
    path = contender.spec.get("path")
    return os.environ | ENVIRONMENT | ({"PYTHONPATH": path} if path else {})


def job_of(
    contender: Contender, measure: Measure, arguments: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """What `process.run` needs to know. `options.threads` and `options.clock` may be missing.

    The model is that of `options`, unless the contender has one of its own.
    """
    return {
        "model": str(options.model),
        **contender.spec,
        "device": options.device,
        "threads": getattr(options, "threads", None),
        "clock": getattr(options, "clock", "wall"),
        "measure": f"{measure.__module__}.{measure.__name__}",
        "arguments": arguments | contender.arguments,
        "started": time.time(),
    }


def run_process(
    contender: Contender,
    measure: Measure,
    arguments: dict[str, Any],
    options: argparse.Namespace,
    environment: dict[str, str] | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """What `measure` found in a fresh process, which is given up after `seconds` (default `PROCESS_SECONDS`).

    Raises RuntimeError with the last words of one that fails.
    """
    seconds = seconds or PROCESS_SECONDS
    job = job_of(contender, measure, arguments, options)
    threads = {"OMP_NUM_THREADS": str(job["threads"])} if job["threads"] else {}
    with tempfile.TemporaryDirectory() as scratch:
        result, log = Path(scratch) / "result.json", Path(scratch) / "log"
        command = [sys.executable, "-m", "benchmarks.lib.process", str(result)]
        env = python_path(contender) | threads | (environment or {})
        with (
            log.open("w") as words,
            child(command, stdin=subprocess.PIPE, stdout=words, stderr=words, cwd=ROOT, env=env) as process,
        ):
            try:
                process.communicate(json.dumps(job), timeout=seconds)
            except subprocess.TimeoutExpired:
                words.write(f"\ngave up after {seconds} s\n")
        if process.returncode != 0 or not result.is_file():
            last_words = log.read_text()[-2000:].strip()
            raise RuntimeError(f"{contender.name} failed (exit {process.returncode}):\n{last_words}")
        measured: dict[str, Any] = json.loads(result.read_text())
    return measured


# --- all of them ------------------------------------------------------------------------------------------------------


def order_of_round(contenders: list[T], number: int) -> list[T]:
    """Every round another contender is first."""
    first = number % len(contenders)
    return contenders[first:] + contenders[:first]


class Comparison:
    """A showcase under way: its records so far, and what failed.

    options: of the command line, with `out`, `rounds`, `model` and `device`.
    """

    def __init__(self, showcase: Showcase, options: argparse.Namespace) -> None:
        self.showcase, self.options = showcase, options
        self.records: list[dict[str, Any]] = []
        self.machine: dict[str, Any] = {}
        self.engines: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        self.earlier_failures: dict[str, str] = {}  # in the file that is added to

    def run(self, only: Collection[str] | None = None) -> dict[str, Any]:
        """Measure every contender in every round, write it all down and print it.

        only: the names of the contenders to measure. Of the others the result keeps what is in the file already.
        """
        start = time.perf_counter()
        names = [contender.name for contender in self.showcase.contenders]
        if unknown := set(only or ()) - set(names):
            sys.exit(f"there is no contender {min(unknown)!r}; there are {', '.join(names)}")
        contenders = [c for c in self.showcase.contenders if only is None or c.name in only]
        if only is not None:
            self.keep_others(only)
        for number in range(self.options.rounds or self.showcase.rounds):
            for contender in order_of_round(contenders, number):
                if contender.name in self.failures:
                    continue
                begin = time.perf_counter()
                try:
                    measured = self.measure(contender)
                except RuntimeError as error:
                    self.failures[contender.name] = str(error)
                    print(error, flush=True)
                    continue
                self.take(number, contender, measured)
                took, total = time.perf_counter() - begin, time.perf_counter() - start
                print(f"round {number + 1} {contender.name}: {took:.0f} s, {total:.0f} s so far", flush=True)
        if not self.records:
            sys.exit(f"{self.showcase.name}: nothing could be measured")
        return self.finish()

    def measure(self, contender: Contender) -> dict[str, Any]:
        s = self.showcase
        if s.run is not None:
            return s.run(contender, self.options)
        assert s.measure is not None
        repeats = {} if s.repeats is None else {"repeats": self.options.repeats or s.repeats}
        return run_process(contender, s.measure, repeats | s.arguments, self.options)

    def keep_others(self, measured_now: Collection[str]) -> None:
        """Take over the other contenders from the file that will be written, if the same was measured there."""
        path = result_path(self.showcase.name, facts(self.options.device)["device"], self.options.out)
        if not path.is_file():
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["commit"] != commit() or found["workload"] != self.showcase.workload:
            print(f"{path} is of another commit or workload: written anew")
            return
        known = {contender.name for contender in self.showcase.contenders} - set(measured_now)
        self.machine = found["machine"]
        self.records += [record for record in found["rounds"] if record["contender"] in known]
        self.engines |= {name: engine for name, engine in found["engines"].items() if name in known}
        self.earlier_failures = {name: text for name, text in found["failures"].items() if name in known}

    def take(self, number: int, contender: Contender, measured: dict[str, Any]) -> None:
        """Add what a process measured in round `number`, and write the result."""
        repetitions = measured["repetitions"]
        self.machine = self.machine or measured["facts"]
        common = {"contender": contender.name, "pid": measured["pid"]}
        for i, scenarios in enumerate(repetitions):
            self.records.append({"round": number * len(repetitions) + i, **common, "scenarios": scenarios})
        if "engine" in measured:
            config = {k: v for k, v in contender.spec["options"].items() if k != "device"}
            known = {"engine": measured["engine"], "options": config, "ready_s": []}
            self.engines.setdefault(contender.name, known)["ready_s"].append(measured["ready_seconds"])
        write_result(self.result(), self.options.out)

    def result(self) -> dict[str, Any]:
        """What is written down so far."""
        s = self.showcase
        told = ("name", "title", "workload", "headline", "shown", "contender", "rival", "notes")
        result = {
            **{key: getattr(s, key) for key in told},
            "machine": self.machine,
            "commit": commit(),
            "model": {"name": model_name(self.options.model)},
            "figures": summarize(s, self.records),
            "differing_tokens": differing_tokens(self.records),
            "rounds": self.records,
            "engines": self.engines,
            "failures": self.earlier_failures | {k: v.splitlines()[-1] for k, v in self.failures.items()},
            **s.extra,
        }
        return result | s.derive(result)

    def finish(self) -> dict[str, Any]:
        """Write the result, print its table, and below it what the figures say."""
        result = self.result()
        path = write_result(result, self.options.out)
        remarks = (f"- {line}" for line in tables.remarks(result))
        Console(width=150).print(Markdown("\n".join([*tables.whole(result), *remarks])))
        print(f"written to {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
        return result


# --- the result -------------------------------------------------------------------------------------------------------


def summarize(showcase: Showcase, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median and spread of every figure for every contender that has it."""
    figures = []
    for figure in showcase.figures:
        values = {}
        for contender in showcase.contenders:
            mine = [figure.value(r["scenarios"]) for r in records if r["contender"] == contender.name]
            numbers = [value for value in mine if value is not None]
            if numbers:
                median = statistics.median(numbers)
                values[contender.name] = {"median": median, "min": min(numbers), "max": max(numbers)}
        about = {key: getattr(figure, key) for key in ("key", "label", "unit", "better")}
        figures.append({**about, "values": values})
    return figures


def differing_tokens(records: list[dict[str, Any]]) -> dict[str, list[str]]:
    """For each scenario the contenders whose greedy tokens are not those of most others; empty where all agree."""
    digests: dict[str, dict[str, str]] = {}
    for record in records:
        for scenario, measured in record["scenarios"].items():
            if "tokens_digest" in measured:  # nobody's tokens are compared where they are drawn at random
                digests.setdefault(scenario, {})[record["contender"]] = measured["tokens_digest"]
    differing = {}
    for scenario, by_contender in digests.items():
        usual = statistics.mode(by_contender.values())
        differing[scenario] = [name for name, digest in by_contender.items() if digest != usual]
    return {scenario: names for scenario, names in differing.items() if names}


def headline_gain(result: dict[str, Any]) -> float:
    """The gain in the figure that the showcase is about."""
    return tables.gain(tables.figures(result)[result["headline"]], result["contender"], result["rival"])


def commit(*paths: str) -> dict[str, Any]:
    """Which code was measured: the commit, and whether there was more than that in `paths` (default: all that is
    measured). A copy of the tree whose git does not know is told by NANOVLLM_COMMIT."""
    if told := os.environ.get("NANOVLLM_COMMIT"):
        return {"hash": told, "modified": False}

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("status", "--porcelain", "--", *(paths or ("stages", "nanovllm", "benchmarks/*.py")))
    found = git("rev-parse", "--short=12", "HEAD") or "unknown"
    return {"hash": found, "modified": bool(changed)}


def model_name(model: Path) -> str:
    """The model without the place where somebody keeps it."""
    return model.relative_to(ROOT).as_posix() if model.is_relative_to(ROOT) else model.name


def card_slug(device_name: str) -> str:
    """ "NVIDIA H100 80GB HBM3" -> "h100": the first word with a digit in it."""
    words = re.findall(r"[\w-]+", device_name.lower())
    return next((word for word in words if any(c.isdigit() for c in word)), "gpu")


def result_path(name: str, device_name: str, directory: Path = RESULTS) -> Path:
    """stage_3.json for the CPU, stage_3.h100.json for a card."""
    return directory / (f"{name}.json" if device_name == "cpu" else f"{name}.{card_slug(device_name)}.json")


def write_result(result: dict[str, Any], directory: Path = RESULTS) -> Path:
    return write_json(result, result_path(result["name"], result["machine"]["device"], directory))


def write_json(result: dict[str, Any], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path
