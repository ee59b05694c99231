"""The engine, beside vLLM: the options that its benchmarks share, and their contenders."""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import harness
from benchmarks.lib.harness import EMBEDDED_MODEL, Comparison, Contender, Showcase
from benchmarks.lib.workloads import SHAPES

SHAPE, LARGE_SHAPE = SHAPES / "Qwen3-0.6B", SHAPES / "Qwen3-8B"


def make_parser(module: str, doc: str | None, rounds: int = 1, repeats: int | None = None) -> argparse.ArgumentParser:
    """The options of `python -m benchmarks.engine.MODULE`."""
    made = harness.make_parser(f"engine.{module}", doc)
    made.add_argument("--out", type=Path, required=True, help="directory for the JSON")
    made.add_argument("--rounds", type=int, default=rounds, help="processes of every contender (default %(default)s)")
    if repeats is not None:
        told = f"measurements in a process (default {repeats})"
        made.add_argument("--repeats", type=int, default=repeats, help=told)
    made.add_argument("--model", type=Path, help="directory with a config.json (default: this benchmark's shape)")
    made.add_argument("--device", help="default: cuda if there is a GPU, else cpu")
    made.add_argument("--vllm-path", metavar="PATH", help="where vLLM can be imported from: its PYTHONPATH")
    made.add_argument("--flash-path", metavar="PATH", help="the same for flash-attn, for nanovllm's processes")
    made.add_argument("--commit", help="what is measured, where there is no git to ask")
    made.add_argument("--quick", action="store_true", help="the embedded model and a tiny workload: for tests")
    return made


def check_options(options: argparse.Namespace) -> argparse.Namespace:
    """The same with its defaults filled in; exits with one line if they make no sense."""
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cpu" and not options.quick:
        sys.exit("this measures a GPU, and there is none here; --quick tries it out on a CPU")
    if options.rounds < 1:
        sys.exit(f"--rounds {options.rounds}: it must be at least 1")
    options.model = (options.model or (EMBEDDED_MODEL if options.quick else SHAPE)).resolve()
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
    spec = {"package": "vllm", "options": {**engine_options(options), **config}, "path": options.vllm_path}
    return [Contender(name, spec)]


Measure = Callable[[Contender, argparse.Namespace], dict[str, Any]]  # see `harness.run_process`


def run(
    build: Callable[[argparse.Namespace], Showcase],
    module: str,
    doc: str | None,
    rounds: int = 1,
    repeats: int | None = None,
    measure: Measure | None = None,
) -> None:
    """The command `python -m benchmarks.engine.MODULE`: measure what `build` makes of the options."""
    options = check_options(make_parser(module, doc, rounds, repeats).parse_args())
    sys.exit(bool(compare(build(options), module, options, measure).failures))


def compare(
    showcase: Showcase,
    module: str,
    options: argparse.Namespace,
    measure: Measure | None = None,
    only: Collection[str] | None = None,
) -> Comparison:
    """Measure every contender by `measure`, or else by MODULE's function `measure` in processes of its own."""
    arguments = {"repeats": options.repeats} if "repeats" in options else {}
    arguments |= showcase.arguments

    def in_process(contender: Contender) -> dict[str, Any]:
        if measure is not None:
            return measure(contender, options)
        return harness.run_process(contender, f"benchmarks.engine.{module}", arguments, options)

    comparison = Comparison(showcase, options)
    comparison.run(in_process, only)
    return comparison
