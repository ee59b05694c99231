"""The engine, beside vLLM: the contenders of its benchmarks."""

import argparse
import importlib.util
from typing import Any

from benchmarks.lib.harness import Contender
from benchmarks.lib.workloads import SHAPES

SHAPE, LARGE_SHAPE, EXPERTS_SHAPE = (SHAPES / f"Qwen3-{size}" for size in ("0.6B", "8B", "30B-A3B"))


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
