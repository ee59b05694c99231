"""A checkpoint but for its weights: where it is, what its config.json asks for, its EOS ids (CASES L2, L3)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.models.checkpoint import read_eos_token_ids
from nanovllm.models.config import parse_config
from nanovllm.models.loader import load_model
from tests.weights import lively_qwen3, random_llama, random_qwen2


def test_directories_that_are_no_checkpoint(checkpoints: Path, edit: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_model(tmp_path / "empty")
    path = edit(lively_qwen3(checkpoints))
    weights = path / "model.safetensors"
    weights.rename(path / "a.safetensors")
    load_model(path)  # one file is no riddle, whatever its name
    shutil.copy(path / "a.safetensors", path / "b.safetensors")
    with pytest.raises(ValueError, match=r"a\.safetensors, b\.safetensors"):
        load_model(path)
    (path / "a.safetensors").unlink()
    (path / "b.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        load_model(path)


@pytest.mark.parametrize("model", ["/no/such/directory", "./nothing", "nothing", "a/b/c", "~/nothing"])
def test_names_that_are_neither_a_directory_nor_a_hub_id(model: str) -> None:
    with pytest.raises(ValueError, match="neither a directory nor a hub id"):
        load_model(model)


def test_a_hub_id_is_fetched_once_and_only_what_is_needed(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        if repo_id == "nobody/nothing":
            raise FileNotFoundError("404")
        return str(lively_qwen3(checkpoints))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert load_model("Qwen/Qwen3-0.6B").path == lively_qwen3(checkpoints)
    assert "*.safetensors" in asked[0][1] and not any("bin" in pattern for pattern in asked[0][1])
    load_model("Qwen/Qwen3-0.6B", load_format="dummy")
    assert "*.safetensors" not in asked[1][1]
    with pytest.raises(ValueError, match=r"nobody/nothing.*404"):
        load_model("nobody/nothing")


def raw_config(path: Path, **changes: Any) -> dict[str, Any]:
    raw = json.loads((path / "config.json").read_text()) | changes
    return {key: value for key, value in raw.items() if value is not ...}  # `...` drops a key


@pytest.mark.parametrize("kind", ["longrope", "su", "mrope", "proportional"])
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "rope_scaling with type"])
def test_an_unsupported_rope_scaling_is_refused_by_name(kind: str, spelling: str, checkpoints: Path) -> None:
    """L3"""
    scaling = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
    if spelling != "rope_parameters":
        old = {"type": kind, "factor": 2.0} if spelling.endswith("type") else scaling
        raw = raw_config(random_llama(checkpoints), rope_parameters=..., rope_scaling=old, rope_theta=1e4)
    else:
        raw = raw_config(random_llama(checkpoints), rope_parameters=scaling)
    with pytest.raises(ValueError, match=f"'{kind}' is not supported"):
        parse_config(raw)


def test_a_rope_scaling_beside_rope_parameters_is_never_ignored(checkpoints: Path) -> None:
    """L3: added by hand, as model cards advise, to a config that transformers 5 wrote."""
    path, parameters = random_llama(checkpoints), {"rope_type": "default", "rope_theta": 1e4}
    for kind in ("yarn", "dynamic", "linear"):
        raw = raw_config(path, rope_parameters=parameters, rope_scaling={"type": kind, "factor": 4.0})
        with pytest.raises(ValueError, match="rope_scaling contradicts rope_parameters; move it"):
            parse_config(raw)
    assert parse_config(raw_config(path, rope_parameters={"rope_theta": 1e4}, rope_scaling={"type": "default"}))
    linear = {"rope_type": "linear", "factor": 4.0}
    agreed = raw_config(path, rope_parameters=linear | {"rope_theta": 1e4}, rope_scaling=linear)
    assert parse_config(agreed) == parse_config(agreed | {"rope_scaling": None})
    for more in ({"rope_theta": 5e5}, {"attention_factor": 0.5}):  # which Hugging Face would lose
        raw = raw_config(path, rope_parameters=linear | {"rope_theta": 1e4} | more, rope_scaling=linear)
        with pytest.raises(ValueError, match="rope_scaling contradicts rope_parameters; move it"):
            parse_config(raw)
    raw = raw_config(path, rope_parameters=parameters | {"rope_theta": 5e5}, rope_scaling={"rope_type": "default"})
    with pytest.raises(ValueError, match="rope_scaling contradicts rope_parameters; move it"):
        parse_config(raw)
    assert parse_config(raw | {"rope_theta": 5e5}).rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not supported; supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": ...}, "model_type=None"),
        ({"model_type": ["qwen3"]}, r"model_type=\['qwen3'\] is not supported"),
        ({"num_experts": 8}, "model_type='qwen3' with a mixture of experts"),
        ({"vocab_size": ..., "num_hidden_layers": ...}, "vocab_size, num_hidden_layers"),
        ({"hidden_size": "96"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "need a positive sliding_window"),
        ({"use_sliding_window": True, "sliding_window": -4, "max_window_layers": 0, "layer_types": ...}, "got -4"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn' lacks a number for factor"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be int or float; got None"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be bool; got 'false'"),
        ({"rope_scaling": [1, 2]}, r"rope_scaling must be dict; got \[1, 2\]"),
        ({"use_sliding_window": True, "max_window_layers": None}, "max_window_layers must be int; got None"),
        ({"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 31}, "head_dim=31"),
        ({"model_type": "llama", "hidden_size": 2, "head_dim": None}, "head_dim=0 must be even and positive"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ between layers"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "lacks a number for low_freq"),
    ],
)
def test_a_config_that_is_not_supported_is_refused_by_name(
    changes: dict[str, Any], message: str, checkpoints: Path, edit: Callable[..., Path]
) -> None:
    path = edit(lively_qwen3(checkpoints))
    (path / "config.json").write_text(json.dumps(raw_config(path, **changes)))
    with pytest.raises(ValueError, match=message) as caught:
        load_model(path)
    assert str(path / "config.json") in str(caught.value)


def test_what_a_config_without_head_dim_means_depends_on_the_family(checkpoints: Path) -> None:
    expected = ((lively_qwen3, 128), (random_llama, 96 // 6), (random_qwen2, 64 // 4))
    for build, head_dim in expected:
        for absent in (..., None):
            assert parse_config(raw_config(build(checkpoints), head_dim=absent)).head_dim == head_dim


def test_no_gpu_where_one_is_asked_for(checkpoints: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="device='cuda'"):
        load_model(lively_qwen3(checkpoints), device="cuda")


def test_eos_ids_are_those_of_generation_config_or_config(checkpoints: Path, edit: Callable[..., Path]) -> None:
    """K2: Hugging Face does not look into config.json where there is a generation_config.json."""
    path = edit(lively_qwen3(checkpoints), eos_token_id=3)
    assert load_model(path).eos_token_ids == {510, 511}
    for said, expected in (("{}", set()), ('{"eos_token_id": null}', set()), ('{"eos_token_id": 0}', {0})):
        (path / "generation_config.json").write_text(said)
        assert read_eos_token_ids(path) == expected
    (path / "generation_config.json").unlink()
    assert read_eos_token_ids(path) == {3}
    for wrong, shown in ('"<end>"', "'<end>'"), ("[1, true]", r"\[1, True\]"):
        (path / "generation_config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(ValueError, match=rf"generation_config\.json: eos_token_id must be .*{shown}"):
            read_eos_token_ids(path)
