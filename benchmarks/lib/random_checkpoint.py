"""Checkpoints of a real model's shape with random weights, for measurements: time does not depend on what they say."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from benchmarks.lib.harness import ROOT

SHAPES = ROOT / "benchmarks" / "shapes"


def random_checkpoint(shape: str, directory: Path = ROOT / "build" / "checkpoints") -> Path:
    """Write (or find) the checkpoint `directory`/`shape`-random, in bfloat16, from a fixed seed.

    Raises ValueError if there is no such shape in benchmarks/shapes.
    """
    if not (SHAPES / shape / "config.json").is_file():
        known = ", ".join(sorted(path.name for path in SHAPES.iterdir()))
        raise ValueError(f"there is no shape {shape!r} in benchmarks/shapes; there are {known}")
    target = directory / f"{shape}-random"
    if target.is_dir():
        return target
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds to import
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(SHAPES / shape)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a CPU takes a quarter of a minute for it
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    scratch = directory / f"{shape}.partial"  # renamed when it is whole: an interrupted run leaves nothing to be found
    shutil.rmtree(scratch, ignore_errors=True)
    model.save_pretrained(scratch)
    scratch.rename(target)
    return target
