"""Sliding windows and Gemma: for every config.json Hugging Face's fp32 logits, or a refusal by name (CASES K6, L3)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm.models.config import read_config
from nanovllm.models.loader import load_model
from tests.models.plain_attention import DictAttention
from tests.models.test_model_twins import FULL, IDS, OTHERS, SLIDING, THETA, check, few_are_fast, truth, variant
from tests.weights import lively_gemma3

WINDOW = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ...}
LISTED = {"layer_types": [FULL, SLIDING, FULL]}
# The family, what its config.json says, and the windows that the engine finds there; or how it refuses
WINDOWS: dict[str, tuple[str, dict[str, Any], tuple[int, ...] | str]] = {
    "K6: no layer beyond the first": ("qwen3", WINDOW | {"max_window_layers": 3}, (0, 0, 0)),
    "no layer beyond the default": ("qwen2", WINDOW | {"max_window_layers": ...}, (0, 0, 0)),
    "one layer": ("qwen2", WINDOW | {"max_window_layers": 2}, (0, 0, 8)),
    "all layers": ("qwen3", WINDOW | {"max_window_layers": 0}, (8, 8, 8)),
    "switched off": ("qwen3", WINDOW | {"use_sliding_window": False, "max_window_layers": 0}, (0, 0, 0)),
    "no number": ("qwen3", WINDOW | {"sliding_window": None, "max_window_layers": 0}, (0, 0, 0)),
    "the default number": ("qwen3", WINDOW | {"sliding_window": ..., "max_window_layers": 0}, (0, 0, 0)),
    "as wide as the model": ("qwen2", WINDOW | {"sliding_window": 64, "max_window_layers": 0}, (0, 0, 0)),
    "a little narrower": ("qwen2", WINDOW | {"sliding_window": 63, "max_window_layers": 0}, (63, 63, 63)),
    "one key": ("qwen2", WINDOW | {"sliding_window": 1, "max_window_layers": 0}, (1, 1, 1)),
    "all layers listed as full": ("qwen3", WINDOW | {"layer_types": [FULL] * 3, "max_window_layers": 0}, (0, 0, 0)),
    "one layer listed": ("qwen3", WINDOW | LISTED, (0, 8, 0)),
    "one layer listed and switched off": ("qwen3", WINDOW | LISTED | {"use_sliding_window": False}, "positive"),
    "Llama has none": ("llama", WINDOW | {"max_window_layers": 0}, (0, 0, 0)),
    "Mistral": ("mistral", {}, (8, 8, 8)),
    "Mistral without": ("mistral", {"sliding_window": None}, (0, 0, 0)),
    "Mistral's default": ("mistral", {"sliding_window": ...}, (0, 0, 0)),
    "Mistral with a list": ("mistral", LISTED, (0, 8, 0)),
    "Mistral knows no switch": ("mistral", {"use_sliding_window": False}, (8, 8, 8)),
    "Ministral": ("mistral", {"model_type": "ministral"} | LISTED, (0, 8, 0)),
    "Ministral without a list": ("mistral", {"model_type": "ministral"}, (8, 8, 8)),
    "Gemma": ("gemma3_text", {}, (8, 0, 8)),
    "Gemma's list": ("gemma3_text", {"layer_types": [FULL, FULL, SLIDING]}, (0, 0, 8)),
    "Gemma's pattern": ("gemma3_text", {"layer_types": ..., "sliding_window_pattern": 3}, (8, 8, 0)),
    "Gemma's default": ("gemma3_text", {"layer_types": ..., "sliding_window_pattern": ...}, (8, 8, 8)),
    "Gemma with no limit in effect": ("gemma3_text", {"sliding_window": 64}, (0, 0, 0)),
    "Gemma without": ("gemma3_text", {"sliding_window": None}, "need a positive sliding_window; got None"),
}


@pytest.mark.parametrize(
    "name", few_are_fast(WINDOWS, "K6: no layer beyond the first", "one layer", "Mistral", "Ministral", "Gemma")
)
def test_windows(name: str, checkpoints: Path) -> None:
    """K6. The stages have none."""
    family, config, found = WINDOWS[name]
    path = variant(checkpoints, family, config)
    if isinstance(found, str):
        check(path, found)
        return
    assert read_config(path).windows == found
    sees_less = any(found) or name in ("as wide as the model", "the default number") or family in OTHERS
    check(path, stages_refuse=sees_less)


GEMMA_ROPE: dict[str, tuple[dict[str, Any], tuple[float, float] | str]] = {
    "as in real files": (
        {"rope_parameters": ..., "rope_theta": 5e3, "rope_scaling": None, "rope_local_base_freq": 300.0}, (5e3, 300.0)
    ),
    "the defaults": ({"rope_parameters": ...}, (1e6, 1e4)),
    "one of two": ({"rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 400.0}}}, (1e6, 400.0)),
    "scaled, as the larger ones are": (
        {"rope_parameters": ..., "rope_theta": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, (5e3, 1e4)
    ),
    "local scaled as well": (
        {"rope_parameters": {kind: {"rope_type": "linear", "factor": 2.0, **THETA} for kind in (FULL, SLIDING)}},
        (500.0, 500.0),
    ),
    "not by kind": ({"rope_parameters": {"rope_type": "default", **THETA}}, "must have one dict for full_attention"),
}  # fmt: skip


@pytest.mark.parametrize("name", few_are_fast(GEMMA_ROPE, "as in real files"))
def test_gemma_turns_heads_by_the_kind_of_layer(name: str, checkpoints: Path) -> None:
    config, found = GEMMA_ROPE[name]
    path = variant(checkpoints, "gemma3_text", config)
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            load_model(path)
        return
    parsed = read_config(path)
    assert parsed.gemma is not None and (parsed.rope_theta, parsed.gemma.local_rope_theta) == found
    check(path, stages_refuse=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [{"query_pre_attn_scalar": 40}, {"query_pre_attn_scalar": ...}, {"tie_word_embeddings": ...}, {"hidden_act": "x"},
     {"attn_logit_softcapping": None, "final_logit_softcapping": None, "use_bidirectional_attention": False}],
)  # fmt: skip
def test_other_words_of_gemma(config: dict[str, Any], checkpoints: Path) -> None:
    check(variant(checkpoints, "gemma3_text", config), stages_refuse=True)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ({"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported; supported is 'gelu_pytorch_tanh'"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number; got 0"),
        ({"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern must be a positive number"),
        ({"rope_local_base_freq": 0}, "rope_local_base_freq must be a positive number; got 0"),
        ({"sliding_window": 0}, "need a positive sliding_window; got 0"),
        ({"sliding_window": True}, "sliding_window must be int; got True"),
        ({"model_type": "gemma2"}, "model_type='gemma2' is not supported"),
    ],
)
def test_what_gemma_3_has_not_is_refused_by_name(config: dict[str, Any], told: str, checkpoints: Path) -> None:
    with pytest.raises(ValueError, match=told):
        read_config(variant(checkpoints, "gemma3_text", config))


def test_gemma_in_float16_is_refused(checkpoints: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype='float16': Gemma's activations exceed .* use 'bfloat16' or 'float32'"):
        load_model(lively_gemma3(checkpoints), dtype=torch.float16)


@pytest.mark.slow
@torch.inference_mode()
def test_gemma_in_half_precision_is_as_close_to_the_truth_as_hugging_face(checkpoints: Path) -> None:
    """Norms are 1 + what the checkpoint has, which bf16 cannot hold; and the embedding's factor is rounded."""
    path = lively_gemma3(checkpoints, hidden_size=96)
    expected, ids = truth(path), IDS[None]
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)(ids).logits[0].float()
    loaded = load_model(path, dtype=torch.bfloat16)
    ours = loaded.model.logits(loaded.model(IDS, torch.arange(len(IDS)), DictAttention(loaded.config))).float()
    assert loaded.model.embed_tokens.scale == 9.8125  # of 9.798
    errors = [(logits - expected).square().mean().sqrt() for logits in (ours, theirs)]
    assert 0 < errors[0] <= 1.5 * errors[1]
