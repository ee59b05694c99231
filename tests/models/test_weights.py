"""The test checkpoints are what they claim to be: lively, reproducible, in both spellings."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.weights import lively_qwen3, random_llama, random_qwen2

BUILDERS = [lively_qwen3, random_llama, random_qwen2]


def greedy(path: Path, prompt: list[int], length: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("build", BUILDERS)
def test_greedy_output_varies(build: Callable[..., Path], checkpoints: Path) -> None:
    for prompt in ([1, 2, 3], [7], list(range(100, 120))):
        assert len(set(greedy(build(checkpoints), prompt, 64))) >= 20


@pytest.mark.parametrize("build", BUILDERS)
def test_same_arguments_give_the_same_weights(build: Callable[..., Path], checkpoints: Path, tmp_path: Path) -> None:
    once, again = build(checkpoints), build(tmp_path)
    first, second = load_file(once / "model.safetensors"), load_file(again / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert build(checkpoints) == once
    other = load_file(build(tmp_path, seed=1) / "model.safetensors")
    assert not torch.equal(other["lm_head.weight"], first["lm_head.weight"])


def test_qwen2_biases_are_far_from_zero(checkpoints: Path) -> None:
    tensors = load_file(random_qwen2(checkpoints) / "model.safetensors")
    for part in "qkv":
        assert tensors[f"model.layers.0.self_attn.{part}_proj.bias"].abs().mean() > 0.2


def test_spellings_and_shards(tmp_path: Path) -> None:
    new = json.loads((random_llama(tmp_path) / "config.json").read_text())
    old = json.loads((random_llama(tmp_path, spelling="old", head_dim=None) / "config.json").read_text())
    assert "rope_parameters" in new and "dtype" in new and new["head_dim"] == 16
    assert old["rope_theta"] == 10000.0 and old["torch_dtype"] == "float32" and "head_dim" not in old
    assert "rope_parameters" not in old and "dtype" not in old
    sharded = lively_qwen3(tmp_path, save_in_shards=True)
    assert len(list(sharded.glob("*.safetensors"))) > 2 and (sharded / "model.safetensors.index.json").exists()
