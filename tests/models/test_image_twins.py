"""A twin for models that also read images: their text model has Hugging Face's logits (CASES L1, L3)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from nanovllm.facts import checkpoint_facts
from nanovllm.models.checkpoint import read_eos_token_ids
from nanovllm.models.config import read_config
from nanovllm.models.loader import load_model
from tests import oracle
from tests.models.test_model_twins import IDS, POSITIONS, engine_logits
from tests.weights import enliven

TEXT: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": POSITIONS}
TEXT |= {"sliding_window": 8}
IMAGES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGES |= {"image_size": 28, "patch_size": 14}
# `text_config` of google/gemma-3-4b-it, which leaves out what Hugging Face's class has as its default
GEMMA_3_4B: dict[str, Any] = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"}
GEMMA_3_4B |= {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}


def write_with_images(path: Path, kind: str, *, old_names: bool) -> Path:
    """A random model. old_names: those of files before transformers 5, in which the text model is whole."""
    model: Any
    if kind == "gemma3":
        text = TEXT | {"query_pre_attn_scalar": 24, "sliding_window_pattern": 2}
        of_gemma = {"mm_tokens_per_image": 4, "image_token_index": 511}
        model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=IMAGES, **of_gemma))
    else:
        text, vision = TEXT | {"model_type": "mistral"}, IMAGES | {"model_type": "pixtral", "head_dim": 16}
        of_mistral = {"image_token_index": 511, "tie_word_embeddings": False}
        model = Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision, **of_mistral))
    enliven(model.float(), seed=0)
    model.save_pretrained(path, save_original_format=old_names)
    return path


@torch.inference_mode()
def truth(path: Path) -> Tensor:
    model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    logits: Tensor = model.eval()(input_ids=IDS[None]).logits[0]
    return logits


@pytest.mark.parametrize("old_names", [True, False])
@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_the_text_model_has_the_logits_of_hugging_face(kind: str, old_names: bool, tmp_path: Path) -> None:
    path = write_with_images(tmp_path / "model", kind, old_names=old_names)
    names = load_file(path / "model.safetensors")
    assert any(name.startswith("language_model." if old_names else "model.language_model.") for name in names)
    assert any("vision_tower." in name for name in names) and any("multi_modal_projector." in name for name in names)
    oracle.check_logits(engine_logits(path), truth(path))
    assert ("vocabulary of the model", "512 rows", "config.json: text_config.vocab_size") in checkpoint_facts(path)


def test_a_head_that_config_json_does_not_mention_is_the_embedding(tmp_path: Path) -> None:
    path = write_with_images(tmp_path / "model", "mistral3", old_names=False)
    said, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    del said["tie_word_embeddings"], tensors["lm_head.weight"]
    (path / "config.json").write_text(json.dumps(said))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    oracle.check_logits(engine_logits(path), truth(path))


def test_what_a_text_config_leaves_out(tmp_path: Path) -> None:
    said = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": GEMMA_3_4B, "vision_config": IMAGES}
    (tmp_path / "config.json").write_text(json.dumps(said))
    ours, theirs = read_config(tmp_path), AutoConfig.from_pretrained(tmp_path).text_config
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        assert getattr(ours, key) == getattr(theirs, key), key
    assert (ours.head_dim, ours.max_position_embeddings) == (theirs.head_dim, theirs.max_position_embeddings)
    for whole, part, expected in ((None, 7, {7}), ([1, 106], 7, {1, 106}), (None, None, set())):
        text = GEMMA_3_4B | {"eos_token_id": part}
        (tmp_path / "config.json").write_text(json.dumps(said | {"eos_token_id": whole, "text_config": text}))
        assert read_eos_token_ids(tmp_path) == expected
    assert ours.dtype == torch.bfloat16 and ours.tie_word_embeddings
    assert [not window for window in ours.windows] == [kind == "full_attention" for kind in theirs.layer_types]


def test_info_names_the_text_config_where_the_value_stands_there(tmp_path: Path) -> None:
    text = GEMMA_3_4B | {"rope_theta": 1e5, "tie_word_embeddings": False, "torch_dtype": "float16", "eos_token_id": 7}
    said = {"model_type": "gemma3", "text_config": text}
    path = tmp_path / "config.json"

    def sources() -> dict[str, str]:
        return {name: source for name, _, source in checkpoint_facts(tmp_path)}

    path.write_text(json.dumps(said))
    found = sources()
    assert found["architecture"] == "config.json: text_config.model_type"
    assert found["dtype of the weights"] == "config.json: text_config.torch_dtype"
    assert found["RoPE theta"] == "config.json: text_config.rope_theta"
    assert found["RoPE scaling"] == "config.json: text_config.rope_scaling"
    assert found["sliding window"] == "config.json: text_config.sliding_window"
    assert found["EOS ids of the model"] == "config.json: text_config.eos_token_id"
    assert found["vocabulary of the model"] == found["tied embeddings"] == "the default"
    path.write_text(json.dumps(said | {"torch_dtype": "bfloat16", "eos_token_id": 1, "tie_word_embeddings": True}))
    found = sources()
    assert found["dtype of the weights"] == "config.json: torch_dtype"
    assert found["EOS ids of the model"] == "config.json: eos_token_id"
    assert found["tied embeddings"] == "config.json: tie_word_embeddings"


def test_other_parts_are_refused_by_name(tmp_path: Path) -> None:
    """A part that is not known, and a text model that is not supported."""
    path = write_with_images(tmp_path / "model", "mistral3", old_names=True)
    said = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"audio_tower.weight": torch.ones(3)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected: model\.audio_tower\.weight"):
        load_model(path)
    for text, told in (
        (said["text_config"] | {"model_type": "ministral3"}, "model_type='ministral3' is not supported"),
        (said["text_config"] | {"is_causal": False}, "is_causal=False is not supported"),
        (None, "model_type='mistral3' needs a text_config"),
    ):
        (path / "config.json").write_text(json.dumps(said | {"text_config": text}))
        with pytest.raises(ValueError, match=told):
            load_model(path)
