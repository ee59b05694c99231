"""Checkpoints in FP8, and what they say: made from a checkpoint in floating point, with loops in place of the loader's
indices.

    fp8, widened = in_fp8(lively_qwen3(directory), "block")

`widened` has no `quantization_config`. Each of its weights is stored value times scale in float32: for Hugging Face.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.weights import lively_qwen3, lively_qwen3_moe, random_mixtral, random_qwen2

Layout = Literal["block", "channel"]
BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}  # as in Qwen/Qwen3-8B-FP8
CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "output_activations": None,
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
                "group_size": None,
                "block_structure": None,
                "observer": "minmax",
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
                "observer": None,
            },
        }
    },
}  # as in RedHatAI/Qwen3-8B-FP8-dynamic
SAID: dict[Layout, dict[str, Any]] = {"block": BLOCK, "channel": CHANNEL}
PROJECTIONS = "_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"  # the last three are Mixtral's
SCALE = {"block": "weight_scale_inv", "channel": "weight_scale"}


def in_fp8(
    source: Path, layout: Layout, directory: Path | None = None, *, left: tuple[str, ...] = ()
) -> tuple[Path, Path]:
    """Two copies of a checkpoint of one file: with its projections in FP8, and with these widened.

    directory: where they are written, or found; None: beside the checkpoint. left: parts of names of weights that stay
    as they are.
    """
    suffix, place = "".join(f"-{part.replace('.', '_')}" for part in left), directory or source.parent
    targets = tuple(place / f"{source.name}-{layout}{suffix}-{kind}" for kind in ("fp8", "widened"))
    if not all(target.exists() for target in targets):
        tensors = load_file(source / "model.safetensors")
        small, wide = dict(tensors), dict(tensors)
        for name, weight in tensors.items():
            if name.endswith(PROJECTIONS) and not any(part in name for part in left):
                values, scale, widened = quantised(weight.float(), layout)
                small[name], small[name.removesuffix("weight") + SCALE[layout]] = values, scale
                wide[name] = widened
        for target, content, said in zip(targets, (small, wide), (SAID[layout], None), strict=True):
            write(source, target, content, said)
    return targets[0], targets[1]


def wide_qwen3(directory: Path, **over: Any) -> Path:
    """Of sizes with which the kernels can keep weights in FP8, on two ranks all but down_proj."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}
    return lively_qwen3(directory, **sizes | over)


def wide_qwen3_moe(directory: Path, **over: Any) -> Path:
    """Of sizes with which the kernels can keep experts in FP8, on two ranks as well."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
    return lively_qwen3_moe(directory, **sizes | over)


def wide_mixtral(directory: Path, **over: Any) -> Path:
    """The same of Mixtral, whose names differ."""
    return random_mixtral(directory, hidden_size=128, intermediate_size=256, **over)


def wide_qwen2(directory: Path) -> Path:
    """With biases. On four ranks two have the same key/value head."""
    return random_qwen2(directory, hidden_size=256, intermediate_size=1024, num_attention_heads=4, head_dim=64)


def quantised(weight: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Values in FP8, scales, and what they stand for. Scales differ widely, so that a wrong one shows."""
    rows, columns = (128, 128) if layout == "block" else (1, weight.shape[1])
    values, widened = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales: list[list[Tensor]] = []
    for i, band in enumerate(weight.split(rows)):
        scales.append([])
        for j, cell in enumerate(band.split(columns, dim=1)):
            scale = cell.abs().max() / 448
            scales[-1].append(scale)
            place = slice(i * rows, i * rows + len(cell)), slice(j * columns, j * columns + cell.shape[1])
            values[place] = (cell / scale).to(torch.float8_e4m3fn)
            widened[place] = values[place].float() * scale
    return values, torch.tensor(scales), widened


def write(source: Path, target: Path, tensors: dict[str, Tensor], said: dict[str, Any] | None) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    shutil.copytree(source, scratch, dirs_exist_ok=True)
    save_file(tensors, scratch / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (scratch / "config.json").write_text(json.dumps(config if said is None else config | {"quantization_config": said}))
    try:
        os.replace(scratch, target)
    except OSError:  # another test process was faster
        shutil.rmtree(scratch)
