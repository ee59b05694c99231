"""A checkpoint of any size that tells the stories of the embedded model: `make race ARGS="--model Qwen3-0.6B"`.

A race is worth watching with a model of the size that people serve, and with texts that can be read. Weights of that
size cannot be shipped, and random ones write nonsense. So the weights are random, and the story model is laid into a
corner of them: its 256 columns are the first of 1024, its 4 heads the first of 16, its 8 layers the first of 28. All
other weights are read and multiplied like any others, so a step takes as long as with a trained model of the shape.
But their results change nothing, because the weights by which they would enter the residual stream are zero.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.race.workload import EMBEDDED_MODEL

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = "-story"  # of the directories
Config = dict[str, Any]
# As many as the story model's, or more
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "heads_per_kv_head",
)  # fmt: skip


def read_config(checkpoint: Path) -> Config:
    """config.json, with how many query heads share a key/value head."""
    config: Config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return config | {"heads_per_kv_head": config["num_attention_heads"] // config["num_key_value_heads"]}


def story_checkpoint(shape: str, directory: Path | None = None, story: Path = EMBEDDED_MODEL) -> Path:
    """Write (or find) the checkpoint `directory`/`shape`-story, in bfloat16. directory: default build/checkpoints.

    Raises ValueError if there is no such shape in benchmarks/shapes, or if the story model does not fit into it.
    """
    from safetensors.torch import load_file, save_file

    from benchmarks.lib import workloads

    directory = directory or workloads.CHECKPOINTS
    target = directory / (shape + SUFFIX)
    if target.is_dir():
        return target
    small = read_config(story)
    if (workloads.SHAPES / shape / "config.json").is_file():  # before gigabytes are written
        check_fit(shape, read_config(workloads.SHAPES / shape), small)
    random = workloads.random_checkpoint(shape, directory)
    large = read_config(random)
    weights: dict[str, Tensor] = {}
    for file in sorted(random.glob("*.safetensors")):
        weights |= load_file(file)
    lay_in(weights, load_file(story / "model.safetensors"), large, small)
    config = json.loads((random / "config.json").read_text(encoding="utf-8"))
    # Angles of rotation like the story model's; and epsilon is added to a mean, which unused columns make smaller (the
    # norms of queries and keys have the same epsilon, but far larger means)
    config["rope_parameters"] = small["rope_parameters"]
    config["rms_norm_eps"] = small["rms_norm_eps"] * small["hidden_size"] / large["hidden_size"]
    config["eos_token_id"] = small["eos_token_id"]
    with tempfile.TemporaryDirectory(dir=directory) as scratch:  # renamed when it is whole
        made = Path(scratch, target.name)
        made.mkdir()
        save_file(weights, made / "model.safetensors", {"format": "pt"})
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copyfile(story / name, made / name)
        workloads.put_in_place(made, target)
    return target


def recorded_name(checkpoint: Path) -> str:
    """What a recording calls a checkpoint."""
    from benchmarks.lib import harness, workloads

    if checkpoint.parent == workloads.CHECKPOINTS and checkpoint.name.endswith(SUFFIX):
        return f"the story model in {checkpoint.name.removesuffix(SUFFIX)}'s shape"
    return harness.model_name(checkpoint)


def check_fit(shape: str, large: Config, small: Config) -> None:
    """Raises ValueError, which says what is too small, if the story model does not fit into the shape."""
    if large["model_type"] != small["model_type"]:
        raise ValueError(
            f"the story model is of type {small['model_type']}; {shape} is of type {large['model_type']}, "
            "so choose another shape"
        )
    for name in SIZES:
        if large[name] < small[name]:
            raise ValueError(f"{name} of {shape} is {large[name]}; the story model needs at least {small[name]}")
    if large["head_dim"] % small["head_dim"]:
        raise ValueError(f"head_dim of {shape} is {large['head_dim']}, not a multiple of {small['head_dim']}")


def lay_in(weights: dict[str, Tensor], story: dict[str, Tensor], large: Config, small: Config) -> None:
    """Change the shape's `weights`, by name, so that the model computes the story model's logits; of ids that only the
    shape has the logits are zero.

    With twice as wide a head, dimension 2i rotates as fast as the narrow head's dimension i (in general: `ratio` times
    i), so that is where it goes. Means are what needs care: RMSNorm divides by the root of the mean square. Over hidden
    states with unused columns that mean is too small, which the norm's weights make up for. Keys fill the unused
    dimensions with copies, so that their mean stays. Queries have zeros there. Their mean makes them larger by
    sqrt(ratio), as much as the scale of attention, 1 / sqrt(head_dim), has become smaller.
    """
    import torch

    hidden, inner = small["hidden_size"], small["intermediate_size"]
    head, narrow = large["head_dim"], small["head_dim"]
    ratio, group = head // narrow, small["heads_per_kv_head"]
    kv_heads = torch.arange(small["num_key_value_heads"])
    q_heads = (kv_heads[:, None] * large["heads_per_kv_head"] + torch.arange(group)).flatten()
    every = ratio * torch.arange(narrow)  # the dimensions of a head that are used
    q, kv = ((heads[:, None] * head + every).flatten() for heads in (q_heads, kv_heads))  # rows of the projections
    smaller = math.sqrt(hidden / large["hidden_size"])

    for i in range(large["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):  # all that enters the residual stream
            weights[layer + name].zero_()
        if i >= small["num_hidden_layers"]:
            continue
        mine = {
            name: weights[layer + name]
            for name in (key.removeprefix(layer) for key in weights if key.startswith(layer))
        }
        its = {name: story[layer + name] for name in mine}
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            mine[name][:hidden] = its[name] * smaller
        rows = mine["self_attn.q_proj.weight"].unflatten(0, (-1, head))  # [heads, head_dim, H]
        rows[q_heads] = 0
        mine["self_attn.q_proj.weight"][q, :hidden] = its["self_attn.q_proj.weight"]
        copies = its["self_attn.k_proj.weight"].repeat_interleave(ratio, 0)
        mine["self_attn.k_proj.weight"][: len(copies), :hidden] = copies
        mine["self_attn.v_proj.weight"][kv, :hidden] = its["self_attn.v_proj.weight"]
        mine["self_attn.o_proj.weight"][:hidden, q] = its["self_attn.o_proj.weight"]
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            mine[name][:] = its[name].repeat_interleave(ratio)
        for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            mine[name][:inner, :hidden] = its[name]
        mine["mlp.down_proj.weight"][:hidden, :inner] = its["mlp.down_proj.weight"]
    weights["model.norm.weight"][:hidden] = story["model.norm.weight"] * smaller
    words = story["model.embed_tokens.weight"]
    for name in weights.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        weights[name][:, :hidden] = 0
        weights[name][: len(words)] = 0
        weights[name][: len(words), :hidden] = words
