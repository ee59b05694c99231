"""A twin for what stands in a folder: Hugging Face's fp32 logits, or a refusal that says what to do (CASES L1, L2)."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanovllm.models.checkpoint import find_checkpoint
from nanovllm.models.loader import load_model
from tests.models.test_model_twins import BUILDERS, OTHERS, POSITIONS, check, few_are_fast, truth, variant
from tests.weights import lively_qwen3

TO_DO = r".*GGUF.* must be converted .* LoRA adapter merged into its base model"
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"


@pytest.mark.parametrize("family", few_are_fast({**BUILDERS, **OTHERS}, "qwen3"))
def test_a_model_whose_tokens_see_later_ones_is_refused(family: str, checkpoints: Path) -> None:
    """As embedding models made of these families are. Nothing in their weights shows it."""
    path = variant(checkpoints, family, {"is_causal": False})
    assert not torch.allclose(truth(path), truth(variant(checkpoints, family, {})), atol=0.1)
    check(path, "is_causal=False is not supported.*trained to continue texts")


@pytest.mark.parametrize("shards_remain", [True, False])
def test_one_file_beside_the_index_of_others_is_the_model(
    shards_remain: bool, checkpoints: Path, tmp_path: Path
) -> None:
    """`save_pretrained` leaves the index of an older model that was saved in shards, and may leave the shards."""
    sharded = lively_qwen3(checkpoints, save_in_shards=True, max_position_embeddings=POSITIONS)
    path = Path(shutil.copytree(sharded, tmp_path / "model"))
    shutil.copy(lively_qwen3(checkpoints, seed=7) / WEIGHTS, path)
    if not shards_remain:
        for shard in path.glob("model-*.safetensors"):
            shard.unlink()
    assert (path / INDEX).is_file()
    check(path)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "model.gguf", "pytorch_model.bin"])
def test_a_folder_without_the_models_weights_says_what_to_do(
    file: str, checkpoints: Path, edit: Callable[..., Path]
) -> None:
    """A LoRA adapter, or another format, with a config.json and without."""
    path = edit(lively_qwen3(checkpoints))
    (path / WEIGHTS).unlink()
    save_file({"base_model.model.model.norm.weight": torch.ones(96)}, path / file)
    with pytest.raises(ValueError, match=r"no \*\.safetensors file" + TO_DO):
        load_model(path)
    (path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config\.json there" + TO_DO):
        find_checkpoint(path)


def test_a_hub_id_without_a_config_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ValueError, match=r"model='a/b-GGUF': no config\.json there" + TO_DO):
        find_checkpoint("a/b-GGUF")


def test_code_of_a_checkpoint_is_never_run_and_named(checkpoints: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As Hugging Face has it: a model_type that it knows is read as such, unless somebody trusts the code."""
    check(variant(checkpoints, "qwen3", {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}))
    assert "names code of its own (auto_map: {'AutoModelForCausalLM': 'modeling_own.Own'}), which is never run" in (
        caplog.text
    )
