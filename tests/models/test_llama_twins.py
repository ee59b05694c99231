"""Models that are nearly Llama: Hugging Face's fp32 logits and greedy tokens, or a refusal by name (CASES L3)."""

from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.models.config import read_config
from nanovllm.models.loader import load_model
from tests import oracle
from tests.models.test_model_twins import FULL, SLIDING, YARN, check, few_are_fast, variant
from tests.weights import random_seed_oss, random_smollm3

# What config.json says, and the layers without RoPE
SMOLLM3: dict[str, tuple[dict[str, Any], set[int]]] = {
    "as written by transformers": ({}, {1}),
    "by the interval": ({"no_rope_layers": None}, {1}),
    "by the default interval": ({"no_rope_layers": ..., "no_rope_layer_interval": ...}, set()),
    "a longer list": ({"no_rope_layers": [0, 1, 0, 0, 1]}, {0, 2}),
    "every layer": ({"no_rope_layers": [0, 0, 0]}, {0, 1, 2}),
    "yarn, in layers with RoPE alone": ({"rope_parameters": YARN}, {1}),
    "the default theta": ({"rope_parameters": ...}, {1}),
}


@pytest.mark.parametrize("name", few_are_fast(SMOLLM3, "as written by transformers", "a longer list"))
def test_some_layers_of_smollm3_have_no_rope(name: str, checkpoints: Path) -> None:
    config, without_rope = SMOLLM3[name]
    path = variant(checkpoints, "smollm3", config)
    assert read_config(path).without_rope == without_rope
    check(path, stages_refuse=True)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"no_rope_layers": [1, 1]}, "no_rope_layers must be a list with 0 or 1 for each layer"),
        ({"no_rope_layers": [1, True, 1]}, "no_rope_layers must be a list"),
        ({"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval must be a positive number"),
        ({"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window=True is not supported"),
        ({"layer_types": [FULL, SLIDING, FULL]}, "need a positive sliding_window"),
    ],
)
def test_what_smollm3_cannot_mean_is_refused_by_name(config: dict[str, Any], told: str, checkpoints: Path) -> None:
    with pytest.raises(ValueError, match=told):
        read_config(variant(checkpoints, "smollm3", config))


@pytest.mark.parametrize("config", [{}, {"rope_parameters": ...}], ids=str)
def test_seed_oss_has_the_logits_of_hugging_face(config: dict[str, Any], checkpoints: Path) -> None:
    check(variant(checkpoints, "seed_oss", config), stages_refuse=True)


def test_other_biases_of_seed_oss(checkpoints: Path) -> None:
    biases = {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}
    check(random_seed_oss(checkpoints, max_position_embeddings=64, **biases), stages_refuse=True)
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.0\.self_attn\.k_proj\.bias"):
        load_model(variant(checkpoints, "seed_oss", {"attention_bias": ...}))


@pytest.mark.parametrize("build", [random_smollm3, random_seed_oss])
def test_greedy_tokens_in_chunks_and_in_a_batch(build: Any, checkpoints: Path) -> None:
    path, greedy = build(checkpoints), SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompts = [[i * 37 % 500 for i in range(start, start + n)] for start, n in ((0, 40), (7, 3), (99, 17))]
    with LLM(
        path, skip_tokenizer_init=True, num_kv_blocks=64, max_model_len=128, max_num_batched_tokens=24, device="cpu"
    ) as llm:
        ids = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy, use_tqdm=False)]
    assert all(len(set(output)) >= 10 for output in ids)
    oracle.check_greedy(path, prompts, ids, [greedy] * len(ids))
