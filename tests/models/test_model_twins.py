"""A twin for every config.json: Hugging Face's fp32 logits, or a refusal by name (CASES K3, K6, L3).

Engine and stages each give the same logits as Hugging Face, or refuse. What must not be refused is said beside it.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from nanovllm.config import EngineConfig
from nanovllm.facts import checkpoint_facts
from nanovllm.llm import LLM, resolve
from nanovllm.models.config import read_config
from nanovllm.models.loader import load_model
from stages.checkpoint import load_model as load_stage_model
from stages.stage_1_naive import attend_to_all
from tests import oracle
from tests.models.plain_attention import DictAttention
from tests.weights import (
    lively_gemma3,
    lively_qwen3,
    random_llama,
    random_mistral,
    random_qwen2,
    random_seed_oss,
    random_smollm3,
)

POSITIONS = 64
SLIDING, FULL = "sliding_attention", "full_attention"
IDS = torch.arange(POSITIONS) * 37 % 500
BUILDERS: dict[str, Callable[..., Path]] = {"llama": random_llama, "qwen2": random_qwen2, "qwen3": lively_qwen3}
OTHERS: dict[str, Callable[..., Path]] = {"mistral": random_mistral, "gemma3_text": lively_gemma3}
OTHERS |= {"smollm3": random_smollm3, "seed_oss": random_seed_oss}
THETA = {"rope_theta": 500.0}  # so small that 64 positions show what becomes of the slow rotations
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **THETA}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **THETA}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, **THETA}


@torch.inference_mode()
def engine_logits(path: Path) -> Tensor:
    loaded = load_model(path)
    return loaded.model.logits(loaded.model(IDS, torch.arange(POSITIONS), DictAttention(loaded.config))).float()


@torch.inference_mode()
def stage_logits(path: Path) -> Tensor:
    model = load_stage_model(path).model
    return model.logits(model(IDS, torch.arange(POSITIONS), attend_to_all))


@torch.inference_mode()
def truth(path: Path) -> Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    logits: Tensor = model.eval()(IDS[None]).logits[0].float()
    return logits


def variant(directory: Path, family: str, config: dict[str, Any], change: Callable[..., Any] | None = None) -> Path:
    """A copy of a small model with other words in config.json (`...` drops a key), and other tensors."""
    source = (BUILDERS | OTHERS)[family](directory, max_position_embeddings=POSITIONS)
    path = Path(shutil.copytree(source, directory / f"variant-{len(list(directory.iterdir()))}"))
    raw = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    if change is not None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def few_are_fast(names: Iterable[Any], *fast: Any) -> list[Any]:
    """All of `names` as parameters, of which only those in `fast` run in the fast tier."""
    return [
        pytest.param(*([n] if isinstance(n, str) else n), marks=() if n in fast else pytest.mark.slow) for n in names
    ]


def check(path: Path, refusal: str | None = None, stages_refuse: bool = False) -> None:
    """`refusal`: what the engine must say, if it must refuse; otherwise its logits must be Hugging Face's."""
    expected = None if refusal is not None else truth(path)
    if expected is None:
        with pytest.raises(ValueError, match=refusal):
            load_model(path)
    else:
        oracle.check_logits(engine_logits(path), expected)
        check_facts(path)
    if expected is None or stages_refuse:
        with pytest.raises(ValueError, match="not supported"):
            load_stage_model(path)
    else:
        oracle.check_logits(stage_logits(path), expected)


def check_facts(path: Path) -> None:
    """`nanovllm info` says what Hugging Face has, and where in config.json it stands."""
    theirs: Any = AutoConfig.from_pretrained(path)
    dtype = theirs.dtype or AutoModelForCausalLM.from_pretrained(path).dtype
    raw = json.loads((path / "config.json").read_text())
    rope = theirs.rope_parameters.get(FULL, theirs.rope_parameters)
    found = {name: (value, source) for name, value, source in checkpoint_facts(path)}
    for name, expected, *places in (
        (
            "architecture",
            theirs.model_type.replace("ministral", raw["model_type"]),
            "model_type",
        ),  # Mistral with layer_types
        ("dtype of the weights", str(dtype).removeprefix("torch."), "dtype", "torch_dtype"),
        ("vocabulary of the model", f"{theirs.vocab_size} rows", "vocab_size"),
        ("RoPE theta", f"{rope['rope_theta']:g}", "rope_parameters", "rope_theta"),
        ("RoPE scaling", SCALING_NAMES[rope["rope_type"]], "rope_parameters", "rope_scaling"),
    ):
        value, source = found[name]
        assert value.split(",")[0] == expected, name
        given = [f"config.json: {place}" for place in places if raw.get(place) is not None]
        assert source in (given or ["the weights" if "dtype" in name else "the default"]), name
    is_tied = load_model(path).config.tie_word_embeddings
    value, source = found["tied embeddings"]
    assert value == ("yes" if is_tied else "no")
    says_tied = raw.get("tie_word_embeddings", theirs.model_type == "gemma3_text")
    assert (source == "the weights: lm_head.weight") == (says_tied and not is_tied)


SCALING_NAMES = {
    "default": "none",
    "linear": "LinearScaling",
    "llama3": "Llama3Scaling",
    "yarn": "YarnScaling",
    "dynamic": "DynamicScaling",
}
SCALINGS: dict[str, tuple[dict[str, Any], str | None]] = {
    "linear": ({"rope_type": "linear", "factor": 2.0, **THETA}, None),
    "llama3": (LLAMA3 | {"original_max_position_embeddings": 32}, None),
    "llama3 that leaves the length out": (LLAMA3, None),
    "yarn": (YARN, None),
    "yarn without truncation": (YARN | {"truncate": False, "beta_fast": 8, "beta_slow": 2}, None),
    "yarn with an attention factor": (YARN | {"attention_factor": 0.7}, None),
    "yarn of DeepSeek": (YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, None),
    "yarn without a factor": (YARN | {"factor": None}, None),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0, **THETA}, None),
    "longrope": (LONGROPE, "'longrope' is not supported"),
}


@pytest.mark.parametrize(
    ("name", "spelling"),
    few_are_fast(
        product(SCALINGS, ["rope_parameters", "rope_scaling"]),
        ("yarn", "rope_parameters"),
        ("llama3 that leaves the length out", "rope_scaling"),
        ("longrope", "rope_scaling"),
    ),
)
def test_scalings(name: str, spelling: str, checkpoints: Path) -> None:
    """L3, in the spelling of transformers 5 and in that of transformers 4."""
    scaling, refusal = SCALINGS[name]
    if spelling == "rope_scaling":
        old = {"type" if key == "rope_type" else key: value for key, value in scaling.items() if key != "rope_theta"}
        config = {"rope_parameters": ..., "rope_scaling": old, **THETA}
    else:
        config = {"rope_parameters": scaling}
    check(variant(checkpoints, "qwen3", config), refusal, stages_refuse=True)


@pytest.mark.slow
def test_a_yarn_of_a_model_card_makes_room_for_longer_texts(checkpoints: Path) -> None:
    """As vLLM has it: max_position_embeddings may still be the length before the scaling."""
    path = variant(checkpoints, "qwen3", {"rope_parameters": YARN, "max_position_embeddings": 16})
    assert read_config(path).max_position_embeddings == 64
    check(path, stages_refuse=True)


def test_dynamic_scaling_ends_where_its_frequencies_would_change(checkpoints: Path) -> None:
    path = variant(checkpoints, "llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **THETA}})
    with pytest.raises(ValueError, match=r"max_model_len=65: RoPE scaling 'dynamic'.*=64.*lower it"):
        LLM(path, device="cpu", max_model_len=65, skip_tokenizer_init=True)
    assert resolve(EngineConfig(max_model_len=64), read_config(path), torch.device("cpu")).max_model_len == 64


def half(tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})


def base(tensors: dict[str, Tensor]) -> None:
    """The names that `LlamaModel` has, without its head."""
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def headless(tensors: dict[str, Tensor]) -> None:
    del tensors["lm_head.weight"]
    base(tensors)


def equal_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def head_alone(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


def changed_below(embedding: Tensor) -> Tensor:
    return torch.cat((embedding[:-1], embedding[-1:] + 1))


HEADS: dict[str, tuple[dict[str, Any], Callable[..., Any] | None]] = {
    "untied": ({}, None),
    "tied and absent": ({"tie_word_embeddings": True}, lambda t: t.pop("lm_head.weight")),
    "tied and absent, without prefix": ({"tie_word_embeddings": True}, headless),
    "tied and another, without prefix": ({"tie_word_embeddings": True}, base),
    "untied, without prefix": ({}, base),
    "no dtype, tied and another": ({"dtype": ..., "tie_word_embeddings": True}, lambda t: half(t, torch.bfloat16)),
    "tied and equal": ({"tie_word_embeddings": True}, equal_head),
    "tied, and no other embedding": ({"tie_word_embeddings": True}, head_alone),
    "K3: tied and another": ({"tie_word_embeddings": True}, None),
    "K3: tied and another in the last row": (
        {"tie_word_embeddings": True},
        lambda t: t.update({"lm_head.weight": changed_below(t["model.embed_tokens.weight"])}),
    ),
    "bf16": ({"dtype": "bfloat16"}, lambda t: half(t, torch.bfloat16)),
    "fp16": ({"dtype": "float16"}, lambda t: half(t, torch.float16)),
    "a dtype that the file does not have": ({"torch_dtype": "float16", "dtype": ...}, None),
    "no dtype": ({"dtype": ...}, lambda t: half(t, torch.bfloat16)),
}


@pytest.mark.parametrize(
    "name",
    few_are_fast(
        HEADS,
        "tied and equal",
        "tied, and no other embedding",
        "K3: tied and another",
        "K3: tied and another in the last row",
    ),
)
def test_heads_and_dtypes(name: str, checkpoints: Path) -> None:
    """K3, L1"""
    config, change = HEADS[name]
    path = variant(checkpoints, "llama", config, change)
    check(path)
    is_tied = name.startswith("tied and absent") or name in ("tied and equal", "tied, and no other embedding")
    assert load_model(path).config.tie_word_embeddings == is_tied


def test_a_head_of_its_own_is_said(checkpoints: Path, caplog: pytest.LogCaptureFixture) -> None:
    """K3"""
    load_model(variant(checkpoints, "llama", {"tie_word_embeddings": True}))
    assert "lm_head.weight differs from the embedding; it is used" in caplog.text


def test_another_name_of_the_activation(checkpoints: Path) -> None:
    check(variant(checkpoints, "qwen3", {"hidden_act": "swish"}), stages_refuse=True)


def test_a_config_may_leave_the_dtype_to_the_weights(checkpoints: Path) -> None:
    """As `from_pretrained` does where there is no dtype; "auto" in config.json is what vLLM makes of it."""
    path = variant(checkpoints, "llama", {"dtype": ...}, lambda t: half(t, torch.bfloat16))
    assert read_config(path).dtype == AutoModelForCausalLM.from_pretrained(path).dtype == torch.bfloat16
    path = variant(checkpoints, "llama", {"dtype": "auto"}, lambda t: half(t, torch.float16))
    assert read_config(path).dtype == torch.float16
    assert ("dtype of the weights", "float16", "the weights") in checkpoint_facts(path)
    (path / "model.safetensors").unlink()
    assert read_config(path).dtype == torch.float32


NOT_EVEN_THERE: dict[str, dict[str, Any]] = {
    r"layer_types names 1 layers, and num_hidden_layers=3": {"layer_types": [FULL]},
    r"layer_types names 5 layers": {"layer_types": [FULL] * 5},
    r"layer_types must be list": {"layer_types": FULL},
    r"layers with nonsense": {"layer_types": [FULL, FULL, "nonsense"]},
    r"'yarn': original_max_position_embeddings must be positive; got 0": {
        "rope_parameters": YARN | {"original_max_position_embeddings": 0}
    },
    r"'yarn': original_max_position_embeddings must be positive; got -5": {
        "rope_parameters": YARN,
        "original_max_position_embeddings": -5,
    },
    r"'yarn' lacks a number for original_max": {"rope_parameters": YARN | {"original_max_position_embeddings": None}},
    r"'yarn': beta_fast and beta_slow": {"rope_parameters": YARN | {"beta_slow": -1}},
    r"rope_theta must be a positive number; got '500'": {
        "rope_parameters": {"rope_type": "default", "rope_theta": "500"}
    },
    r"RoPE scaling None is not supported": {"rope_parameters": {"rope_type": None, **THETA}},
    r"quantization_config.quant_method=None is not supported": {"quantization_config": {}},
    r"tie_word_embeddings must be bool; got None": {"tie_word_embeddings": None},
    r"attention_bias must be bool; got 'no'": {"attention_bias": "no"},
    r"use_sliding_window must be bool": {"use_sliding_window": "yes"},
    r"max_position_embeddings must be int": {"max_position_embeddings": None},
    r"lacks a positive number for head_dim": {"head_dim": 0},
    r"lacks a positive number for num_key_value_heads": {"num_key_value_heads": 0},
}


@pytest.mark.parametrize("told", few_are_fast(NOT_EVEN_THERE, *list(NOT_EVEN_THERE)[::4]))
def test_what_hugging_face_refuses_is_refused_by_name(told: str, checkpoints: Path) -> None:
    path = variant(checkpoints, "qwen3", NOT_EVEN_THERE[told])
    with pytest.raises(ValueError, match=told):
        read_config(path)
    with pytest.raises(Exception):  # noqa: B017 - of many kinds
        truth(path)


@pytest.mark.parametrize(
    "rope",
    [
        LLAMA3 | {"original_max_position_embeddings": 0},
        LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0},
        LLAMA3 | {"low_freq_factor": 4.0},
        {"rope_type": "linear", "factor": 0, **THETA},
        {"rope_type": "default", "rope_theta": 0},
        {"rope_type": "default", "rope_theta": -5.0},
    ],
)
def test_scalings_that_make_no_sense_are_refused(rope: dict[str, Any], checkpoints: Path) -> None:
    """Hugging Face warns at most, and its logits are not finite or mean nothing."""
    with pytest.raises(ValueError, match="positive"):
        read_config(variant(checkpoints, "llama", {"rope_parameters": rope}))


@pytest.mark.slow
def test_shards(checkpoints: Path) -> None:
    check(random_llama(checkpoints, save_in_shards=True, tie_word_embeddings=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", BUILDERS)
def test_what_a_config_leaves_out(family: str, checkpoints: Path) -> None:
    """Keys that Hugging Face has defaults for: the same answer, or a refusal."""
    for key in ("rope_parameters", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "attention_bias"):
        check(variant(checkpoints, family, {key: ...}))
    # As many key/value heads as heads in Llama, and 32 in Qwen: neither fits these weights.
    what = "wrong shape" if family == "llama" else "num_key_value_heads=32"
    with pytest.raises(ValueError, match=what):
        load_model(variant(checkpoints, family, {"num_key_value_heads": ...}))


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(list(BUILDERS)),
    kind=st.sampled_from(["default", "linear", "llama3", "yarn", "dynamic"]),
    rope=st.fixed_dictionaries(
        {"factor": st.sampled_from([1.0, 1.5, 4.0, 40.0]), "rope_theta": st.sampled_from([300.0, 1e4, 1e6])},
        optional={
            "original_max_position_embeddings": st.sampled_from([4, 16, 48, 64]),
            "attention_factor": st.sampled_from([0.5, 1.0, 1.3]),
            "beta_fast": st.sampled_from([2, 4, 32]),
            "beta_slow": st.sampled_from([0.25, 1]),
            "mscale": st.sampled_from([0.0, 0.7, 1.0]),
            "mscale_all_dim": st.sampled_from([0.0, 0.4, 1.0]),
            "truncate": st.booleans(),
        },
    ),
    old=st.booleans(),
    more=st.fixed_dictionaries({}, optional={"sliding_window": st.sampled_from([8, 64, None]),
        "use_sliding_window": st.booleans(), "max_window_layers": st.sampled_from([0, 2, 3]),
        "original_max_position_embeddings": st.sampled_from([8, 32])}),
)  # fmt: skip
def test_any_combination(
    family: str, kind: str, rope: dict[str, Any], old: bool, more: dict[str, Any], tmp_path_factory: Any
) -> None:
    rope = {"rope_type": kind, **rope} | ({"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {})
    config: dict[str, Any] = {"rope_parameters": rope}
    if old:
        config = {"rope_parameters": ..., "rope_scaling": rope, "rope_theta": rope.pop("rope_theta")}
    if "use_sliding_window" in more:
        config["layer_types"] = ...
    directory = tmp_path_factory.getbasetemp() / "any-combination"
    directory.mkdir(exist_ok=True)
    path = variant(directory, family, config | more)
    try:
        expected = truth(path)
        for logits in (engine_logits, stage_logits):
            try:
                found = logits(path)
            except ValueError as error:
                assert "not supported" in str(error) or "sliding" in str(error)
                windows = more.get("use_sliding_window") and family != "llama"
                assert logits is stage_logits and (windows or kind != "default"), error
            else:
                oracle.check_logits(found, expected)
    finally:
        shutil.rmtree(path)
