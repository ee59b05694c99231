"""Sampling parameters and configuration: what is refused, and how it says so."""

import pickle
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.sampling_params import SamplingParams
from tests.engine.shadow import ShadowExecutor


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"n": 10**9},  # all of which would be queued
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e300},
        {"top_k": -2},
        {"top_k": 2**70},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-45},  # logits divided by it are infinite
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"seed": -1},
        {"seed": 2**63},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop_token_ids": [-1]},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"min_tokens": -1},
        {"min_tokens": 65},
        {"logprobs": -1},
        {"prompt_logprobs": -1},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": dict.fromkeys(range(1025), 1)},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [1, -1]},
        {"allowed_token_ids": ["a"]},
        {"bad_words": ["a", ""]},
        {"bad_words": [5]},
    ],
)
def test_parameters_out_of_range_are_named_with_the_remedy(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"^{name} must be .+; got "):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"n": 1.5},
            {"top_k": "5"},
            {"min_tokens": 2.5},
            {"seed": 1.5},
            {"max_tokens": 2.5},
            {"logprobs": True},
            {"prompt_logprobs": 1.0},
        ),
        *({"temperature": "0"}, {"top_p": None}, {"presence_penalty": [0]}),
        *({"stop": 5}, {"stop_token_ids": 5}, {"bad_words": "word"}, {"bad_words": 5}, {"allowed_token_ids": 5}),
        *({"logit_bias": [5]}, {"logit_bias": "5"}),
        *({"ignore_eos": "no"}, {"skip_special_tokens": 0}, {"include_stop_str_in_output": None}),
        {"output_kind": "final"},
    ],
)
def test_parameters_of_the_wrong_kind_are_a_type_error(wrong: dict[str, Any]) -> None:
    """Were one accepted, it would be noticed in the middle of a step that others share."""
    ((name, value),) = wrong.items()
    with pytest.raises(TypeError, match=re.escape(f"got {value!r}")) as caught:
        SamplingParams(**wrong)
    assert str(caught.value).startswith(f"{name} must be ")


def test_parameters_that_do_not_exist_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="best_off"):
        SamplingParams(best_off=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="max_seqs"):
        EngineConfig(max_seqs=2)  # type: ignore[call-arg]


def test_stop_takes_one_string_several_or_none() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()  # type: ignore[arg-type]


def test_so_many_stop_ids_that_min_tokens_has_no_room_for_them_are_refused() -> None:
    assert len(list(SamplingParams(stop_token_ids=range(500)).stop_token_ids)) == 500
    SamplingParams(stop_token_ids=[*range(128), 5, 6], min_tokens=1)
    with pytest.raises(ValueError, match=r"^stop_token_ids must be at most 128 ids where min_tokens .+; got 129$"):
        SamplingParams(stop_token_ids=range(129), min_tokens=1)


def test_lists_of_tokens_and_words_are_copied_and_biases_limited() -> None:
    """To -100 and 100, as OpenAI and vLLM do. Integers of other libraries become Python's."""
    bias: dict[Any, Any] = {np.int64(3): 1e9, 4: np.float32(-1e9), 5: 7}
    params = SamplingParams(logit_bias=bias, allowed_token_ids=np.arange(3), bad_words=["a", "b"])
    bias[6] = 1
    assert params.logit_bias == {3: 100.0, 4: -100.0, 5: 7.0} and type(min(params.logit_bias)) is int
    assert params.allowed_token_ids == (0, 1, 2) and params.bad_words == ("a", "b")
    assert hash(params) == hash(params.changed()) and params == pickle.loads(pickle.dumps(params))
    none = SamplingParams(logit_bias=None, allowed_token_ids=None, bad_words=None)  # type: ignore[arg-type]
    assert none == SamplingParams() and none.bad_words == ()
    with pytest.raises(TypeError, match=r"^logit_bias must be .*; got 'x'$"):
        SamplingParams(logit_bias={5: "x"})  # type: ignore[dict-item]


def test_a_changed_copy_is_what_replace_makes_and_leaves_the_original_alone() -> None:
    params = SamplingParams(temperature=0.5, stop=["a", "b"], stop_token_ids=[3], max_tokens=7)
    assert params.changed(seed=5) == replace(params, seed=5) != params
    assert hash(params.changed(seed=5)) == hash(replace(params, seed=5))
    assert params.seed is None

    class Derived(SamplingParams):
        pass

    assert type(Derived().changed(seed=1)) is Derived


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_batched_tokens": 0},
        {"max_num_seqs": 0},
        {"max_model_len": 1},
        {"kvcache_block_size": 0},
        {"num_kv_blocks": 0},
        {"tensor_parallel_size": 0},
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": 1.5},
        {"kv_cache_gib": 0},
        {"kv_cache_gib": float("inf")},
        {"dtype": "int8"},
        {"attention_backend": "magic"},
        {"load_format": "pickle"},
    ],
)
def test_a_configuration_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name} must be .+; got|^{name} must be at least 2"):
        EngineConfig(**wrong)


NUMBERS = "max_num_seqs", "gpu_memory_utilization", "kv_cache_gib", "seed"
SWITCHES = "enable_prefix_caching", "enable_chunked_prefill", "enforce_eager", "async_scheduling"


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in NUMBERS for value in ("0.9", True)]
    + [(name, value) for name in SWITCHES for value in ("no", 1)],
)
def test_a_configuration_of_the_wrong_kind_is_a_type_error(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be .+; got {value!r}"):
        EngineConfig(**{name: value})


def test_the_configuration_is_completed_from_device_and_model() -> None:
    on_cpu = EngineConfig().resolve(on_gpu=False, model_max_len=512)
    assert (on_cpu.max_model_len, on_cpu.kvcache_block_size, on_cpu.async_scheduling) == (512, 16, False)
    on_gpu = EngineConfig().resolve(on_gpu=True, model_max_len=40960)
    assert (on_gpu.max_model_len, on_gpu.kvcache_block_size, on_gpu.async_scheduling) == (4096, 256, True)
    chosen = EngineConfig(max_model_len=8192, kvcache_block_size=32, async_scheduling=False)
    assert chosen.resolve(on_gpu=True, model_max_len=40960) == chosen
    with pytest.raises(ValueError, match=r"max_model_len=8192 .* 512"):
        chosen.resolve(on_gpu=True, model_max_len=512)
    with pytest.raises(ValueError, match="num_kv_blocks"):
        LLMEngine(ShadowExecutor(replace(on_cpu, num_kv_blocks=4)), on_cpu, vocab_size=8)
