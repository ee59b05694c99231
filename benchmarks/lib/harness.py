"""How a comparison is made: each contender in a fresh process, in turn, several rounds, medians, all written down.

A showcase names contenders, scenarios and figures. Each round starts each contender anew, and each round begins with
another one, so that neither a warm machine nor a busy minute favours anybody.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.lib.workloads import Scenario

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
EMBEDDED_MODEL = ROOT / "assets" / "story_model"

Measured = dict[str, dict[str, Any]]  # scenario name -> its metrics (`recorder.metrics`)


@dataclass(frozen=True)
class Contender:
    """`spec` is what the worker needs to know; `only` names the scenarios it takes part in (None: all)."""

    name: str
    spec: dict[str, Any]
    only: tuple[str, ...] | None = None


def stage_contender(number: int, only: tuple[str, ...] | None = None) -> Contender:
    return Contender(f"stage {number}", {"kind": "stage", "number": number}, only)


def hf_contender(
    name: str, *, batch: bool = False, cache: bool = True, limited: bool = True, only: tuple[str, ...] | None = None
) -> Contender:
    """`limited=False` lets it have as much KV memory as it wants, whatever the others have."""
    return Contender(name, {"kind": "hf", "batch": batch, "use_cache": cache, "limited": limited}, only)


@dataclass(frozen=True)
class Figure:
    """A column of the table. `value` takes it from what one process measured; None where it does not apply."""

    key: str
    label: str
    unit: str
    better: Literal["lower", "higher"]
    value: Callable[[Measured], float | None]


@dataclass(frozen=True)
class Showcase:
    """What is compared. `contender` must win the figure `headline` against `rival`; the README has those in `shown`."""

    name: str
    title: str
    workload: str
    contenders: list[Contender]
    scenarios: list[Scenario]
    figures: list[Figure]
    headline: str
    shown: tuple[str, ...]
    contender: str
    rival: str
    notes: list[str] = field(default_factory=list)


def metric(scenario: str, name: str) -> Callable[[Measured], float | None]:
    """The figure that is simply a metric of a scenario."""
    return lambda measured: measured[scenario].get(name) if scenario in measured else None


def run_worker(
    contender: Contender, scenarios: list[Scenario], model: Path, device: str, threads: int
) -> dict[str, Any]:
    """What `contender` measured in a process of its own. Raises RuntimeError with its last words if it fails."""
    job = {
        "contender": contender.spec,
        "model": str(model),
        "device": device,
        "threads": threads,
        "scenarios": [s.as_json() for s in scenarios if contender.only is None or s.name in contender.only],
    }
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        command = [sys.executable, "-m", "benchmarks.lib.worker", str(result)]
        done = subprocess.run(command, input=json.dumps(job), text=True, capture_output=True, cwd=ROOT, env=environment)
        if done.returncode != 0:
            raise RuntimeError(f"{contender.name} failed (exit {done.returncode}):\n{done.stderr[-2000:]}")
        measured: dict[str, Any] = json.loads(result.read_text())
    return measured


def order_of_round(contenders: list[Contender], number: int) -> list[Contender]:
    """Every round another contender is first."""
    first = number % len(contenders)
    return contenders[first:] + contenders[:first]


def run_rounds(showcase: Showcase, model: Path, *, device: str, threads: int, rounds: int) -> Iterator[dict[str, Any]]:
    """One record for each process, as soon as it is done: round, contender, and what the worker measured."""
    for number in range(rounds):
        for contender in order_of_round(showcase.contenders, number):
            measured = run_worker(contender, showcase.scenarios, model, device, threads)
            yield {"round": number, "contender": contender.name, **measured}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarize(showcase: Showcase, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median and spread of every figure for every contender that has it."""
    figures = []
    for figure in showcase.figures:
        values = {}
        for contender in showcase.contenders:
            mine = [figure.value(r["scenarios"]) for r in records if r["contender"] == contender.name]
            numbers = [value for value in mine if value is not None]
            if numbers:
                values[contender.name] = spread(numbers)
        figures.append(
            {"key": figure.key, "label": figure.label, "unit": figure.unit, "better": figure.better, "values": values}
        )
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


def gain(figure: dict[str, Any], contender: str, rival: str) -> float:
    """How many times better `contender` is than `rival` by their medians; below 1 it loses."""
    mine, other = figure["values"][contender]["median"], figure["values"][rival]["median"]
    ratio: float = mine / other if figure["better"] == "higher" else other / mine
    return ratio


def headline_gain(result: dict[str, Any]) -> float:
    """The gain in the figure that the showcase is about."""
    figure = next(f for f in result["figures"] if f["key"] == result["headline"])
    return gain(figure, result["contender"], result["rival"])


def code_of(showcase: Showcase) -> list[str]:
    """The paths in this repository that its figures depend on."""
    packages = {"stage": "stages", "engine": "nanovllm"}
    kinds = {contender.spec.get("kind") for contender in showcase.contenders}
    return ["benchmarks/*.py", *(path for kind, path in packages.items() if kind in kinds)]


def commit(*paths: str) -> dict[str, Any]:
    """Which code was measured: the commit, and whether there was more than that in `paths` (default: the engine).

    A copy of the tree whose git does not know is told by NANOVLLM_COMMIT.
    """
    if told := os.environ.get("NANOVLLM_COMMIT"):
        return {"hash": told, "modified": False}

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("status", "--porcelain", "--", *(paths or ("nanovllm", "benchmarks/*.py")))
    found = git("rev-parse", "--short=12", "HEAD") or "unknown"
    return {"hash": found, "modified": bool(changed)}


def model_name(model: Path) -> str:
    """The model without the place where somebody keeps it."""
    return model.relative_to(ROOT).as_posix() if model.is_relative_to(ROOT) else model.name


def assemble(showcase: Showcase, records: list[dict[str, Any]], model: Path) -> dict[str, Any]:
    """The result of a showcase, ready to be written down."""
    return {
        "name": showcase.name,
        "title": showcase.title,
        "workload": showcase.workload,
        "headline": showcase.headline,
        "shown": showcase.shown,
        "contender": showcase.contender,
        "rival": showcase.rival,
        "notes": showcase.notes,
        "machine": records[0]["facts"],
        "commit": commit(*code_of(showcase)),
        "model": {"name": model_name(model), "parameters": records[0]["parameters"]},
        "figures": summarize(showcase, records),
        "differing_tokens": differing_tokens(records),
        "rounds": [{k: r[k] for k in ("round", "contender", "pid", "scenarios")} for r in records],
    }


def card_slug(device_name: str) -> str:
    """ "NVIDIA H100 80GB HBM3" -> "h100": the first word with a digit in it."""
    words = re.findall(r"[\w-]+", device_name.lower())
    return next((word for word in words if any(c.isdigit() for c in word)), "gpu")


def result_path(name: str, device_name: str, directory: Path = RESULTS) -> Path:
    """stage_3.json for the CPU, stage_3.h100.json for a card."""
    return directory / (f"{name}.json" if device_name == "cpu" else f"{name}.{card_slug(device_name)}.json")


def write_result(result: dict[str, Any], directory: Path = RESULTS) -> Path:
    path = result_path(result["name"], result["machine"]["device"], directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path
