"""Tiny Hugging Face checkpoints for tests, written by `transformers` itself.

A freshly initialised model with tied embeddings repeats one token for ever, so that "equal to Hugging Face" proves
nothing on it. The checkpoints here are *lively*: untied, with weights of about unit gain, so that greedy output wanders
through the vocabulary (`tests/models/test_weights.py` asserts it).

    path = lively_qwen3(directory, num_hidden_layers=2)

Each builder writes into a subdirectory named after its arguments and returns it; a second call with the same directory
and arguments finds it there, so a session-wide directory makes it a cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()  # or "Writing model shards" stands in the report of every test that fails

Spelling = Literal["new", "old"]

VOCAB = 512
SHARED = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": None,  # generation_config.json has them
    "pad_token_id": None,
}


def lively_qwen3(directory: Path | str, **over: Any) -> Path:
    """Qwen3: q/k-norm, head_dim 32 that is not hidden / heads, 4 heads over 2. `over`: see `write_checkpoint`."""
    shape = {
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    return write_checkpoint(directory, Qwen3ForCausalLM, Qwen3Config, shape, over)


def random_llama(directory: Path | str, **over: Any) -> Path:
    """Llama: three query heads a KV head (6 over 2). `over`: see `write_checkpoint`.

    `head_dim=None` writes a config without that key.
    """
    shape = {
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    return write_checkpoint(directory, LlamaForCausalLM, LlamaConfig, shape, over)


def random_qwen2(directory: Path | str, **over: Any) -> Path:
    """Qwen2: biases on q, k and v, random and far from zero. `over`: see `write_checkpoint`."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return write_checkpoint(directory, Qwen2ForCausalLM, Qwen2Config, shape, over)


def random_mistral(directory: Path | str, **over: Any) -> Path:
    """Mistral: a window of 8 in all layers. `over`: see `write_checkpoint`."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return write_checkpoint(directory, MistralForCausalLM, MistralConfig, shape | {"sliding_window": 8}, over)


def random_smollm3(directory: Path | str, **over: Any) -> Path:
    """SmolLM3: the second of three layers has no RoPE. `over`: see `write_checkpoint`."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return write_checkpoint(directory, SmolLM3ForCausalLM, SmolLM3Config, shape | {"no_rope_layer_interval": 2}, over)


def random_seed_oss(directory: Path | str, **over: Any) -> Path:
    """Seed-OSS: biases on q, k and v, random and far from zero. `over`: see `write_checkpoint`."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return write_checkpoint(directory, SeedOssForCausalLM, SeedOssConfig, shape | {"head_dim": 32}, over)


def windowed_qwen3(directory: Path | str, **over: Any) -> Path:
    """`lively_qwen3` with a window of 8 in all but the first of its layers. `over`: see `write_checkpoint`."""
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    return lively_qwen3(directory, **windows | over)


def lively_gemma3(directory: Path | str, **over: Any) -> Path:
    """Gemma 3, text alone: a window of 8 in two of three layers, scores scaled by what is not the size of a head, and
    norms of its own. Untied, since a tied one repeats one token. `over`: see `write_checkpoint`."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    return write_checkpoint(directory, Gemma3ForCausalLM, Gemma3TextConfig, shape, over)


def lively_qwen3_moe(directory: Path | str, **over: Any) -> Path:
    """Qwen3-MoE: 3 of 8 experts, in all layers. `over`: see `write_checkpoint`."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    return write_checkpoint(directory, Qwen3MoeForCausalLM, Qwen3MoeConfig, shape, over)


def random_qwen2_moe(directory: Path | str, **over: Any) -> Path:
    """Qwen2-MoE: 2 of 6 experts and the shared one, and biases on q, k and v. `over`: see `write_checkpoint`."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return write_checkpoint(directory, Qwen2MoeForCausalLM, Qwen2MoeConfig, shape, over)


def random_mixtral(directory: Path | str, **over: Any) -> Path:
    """Mixtral: 2 of 4 experts. `over`: see `write_checkpoint`."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return write_checkpoint(directory, MixtralForCausalLM, MixtralConfig, shape, over)


def write_checkpoint(
    directory: Path | str,
    model_class: type[PreTrainedModel],
    config_class: type[PreTrainedConfig],
    shape: dict[str, Any],
    over: dict[str, Any],
) -> Path:
    """Write (or find) a random checkpoint under `directory` and return its path.

    `over` holds config keys and five keys of its own: `seed` (0), `eos_token_ids` (of generation_config.json, default
    the last two ids), `save_in_shards` (False; True gives several safetensors and an index), `spelling` ("new":
    rope_parameters and dtype, as transformers 5 writes; "old": rope_theta, rope_scaling and torch_dtype),
    `experts_apart` (True; False gives one tensor for the experts of a layer, as transformers 5 has them in memory).
    """
    over = dict(over)
    name = f"{model_class.__name__}-{hashlib.sha256(json.dumps(over, sort_keys=True).encode()).hexdigest()[:16]}"
    target = Path(directory) / name
    if target.exists():
        return target
    seed: int = over.pop("seed", 0)
    in_shards: bool = over.pop("save_in_shards", False)
    experts_apart: bool = over.pop("experts_apart", True)
    spelling: Spelling = over.pop("spelling", "new")
    eos: list[int] | None = over.pop("eos_token_ids", None)
    settings = {**SHARED, **shape, **over}
    without_head_dim = settings.get("head_dim", 0) is None
    if without_head_dim:
        del settings["head_dim"]
    vocab = settings["vocab_size"]

    model = model_class(config_class(**settings)).float().eval()
    enliven(model, seed)
    if model_class is Gemma3ForCausalLM:
        remove_offsets(model)
    model.generation_config = GenerationConfig(eos_token_id=eos if eos is not None else [vocab - 2, vocab - 1])

    # Written beside its place and renamed, so that a test killed half-way leaves no half checkpoint to be found.
    Path(directory).mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=directory))
    size = "100KB" if in_shards else "1GB"
    model.save_pretrained(scratch, max_shard_size=size, save_original_format=experts_apart)
    if without_head_dim or spelling == "old":
        rewrite_config(scratch / "config.json", spelling, drop=("head_dim",) if without_head_dim else ())
    try:
        os.replace(scratch, target)
    except OSError:  # another test process was faster
        shutil.rmtree(scratch)
    return target


def with_nan_token(checkpoint: Path, token: int) -> Path:
    """A copy of a checkpoint in which the embedding of `token` is NaN, and with it all that is computed from it."""
    target = checkpoint.with_name(f"{checkpoint.name}-nan-{token}")
    if not target.exists():
        scratch = Path(tempfile.mkdtemp(dir=checkpoint.parent))
        shutil.copytree(checkpoint, scratch, dirs_exist_ok=True)
        weights = load_file(scratch / "model.safetensors")
        weights["model.embed_tokens.weight"][token] = float("nan")
        save_file(weights, scratch / "model.safetensors", {"format": "pt"})
        os.replace(scratch, target)
    return target


def enliven(model: PreTrainedModel, seed: int) -> None:
    """Fill every parameter of `model` with seeded random values under which greedy output does not get stuck."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise)
            else:
                # Unit gain keeps activations near one; twice that lets the layers outweigh the token's own embedding.
                parameter.copy_(2.0 * noise / parameter.shape[-1] ** 0.5)


def remove_offsets(model: PreTrainedModel) -> None:
    """Gemma adds 1 to the weights of norms and multiplies the embedding. With less of both it is lively, even tied."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.sub_(1)
            elif "embed_tokens" in name:
                parameter.div_(4 * model.config.hidden_size**0.5)


def rewrite_config(path: Path, spelling: Spelling, drop: tuple[str, ...] = ()) -> None:
    """Rewrite a config.json in place without the keys in `drop`; "old" spells RoPE and dtype as transformers 4 did."""
    config = json.loads(path.read_text())
    for key in drop:
        config.pop(key, None)  # some families have no such key
    if spelling == "old":
        rope = config.pop("rope_parameters")
        if "full_attention" in rope:  # Gemma
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
        config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2))
