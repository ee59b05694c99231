"""Sliding windows in the engine: Hugging Face's tokens, under all that models without windows are tested with.

The suites are those of such models; only the models in them are others. Windows are of 8 keys, and contexts are longer.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests import oracle
from tests.engine import test_conformance, test_nan, test_speculation_conformance
from tests.engine.adapter import EngineSubject
from tests.engine.other_models import OtherModels, start
from tests.engine.ranks import ROOMY, TINY, Starter, check_idle, engine_checkpoints, generate, tokens
from tests.stages import conformance
from tests.stages.conformance import run
from tests.stages.requests import PROMPTS, TIGHT, greedy, random_prompts
from tests.weights import lively_gemma3, lively_qwen3, random_mistral, random_mixtral, random_qwen2, windowed_qwen3

__all__ = ["engine_checkpoints", "start"]  # fixtures

Build = Callable[..., Path]
ASYNC = {"async_scheduling": True}
NGRAMS = {"speculative": {"method": "ngram", "k": 3, "n": 1}}
LONG = random_prompts(60, 40, 3, 57, 24, seed=2)


def windowed_mixtral(directory: Path | str, **over: Any) -> Path:
    return random_mixtral(directory, **{"sliding_window": 8} | over)


def alternating_qwen2(directory: Path | str, **over: Any) -> Path:
    """Two windows and biases; and a head that is the embedding."""
    kinds = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    return random_qwen2(directory, **{"use_sliding_window": True, "sliding_window": 5} | kinds | over)


def tied_gemma3(directory: Path | str, **over: Any) -> Path:
    """As the real ones are: a tied head, every sixth layer without a window, and a config.json of transformers 4."""
    sizes = {"sliding_window_pattern": 6, "num_hidden_layers": 7}
    return lively_gemma3(directory, **sizes | {"tie_word_embeddings": True, "spelling": "old"} | over)


BUILDS = [random_mistral, windowed_qwen3, lively_gemma3, tied_gemma3, windowed_mixtral, alternating_qwen2]


@pytest.mark.parametrize(
    ("build", "config"),
    [
        (random_mistral, ASYNC),
        *(pytest.param(b, c, marks=pytest.mark.slow) for b in BUILDS for c in (ASYNC, NGRAMS)),
    ],
)
def test_tokens_are_hf_s_in_a_pool_far_too_small(
    engine_checkpoints: Path, build: Build, config: dict[str, Any]
) -> None:
    """In chunks, in company, and some of them preempted."""
    told: list[Any] = []
    options = TIGHT | {"num_blocks": 18, "max_num_seqs": 9, "max_num_batched_tokens": 16, "on_event": told.append}
    subject: Any = EngineSubject(config)
    outputs = run(subject, build(engine_checkpoints), [*PROMPTS, *LONG], greedy(12, ignore_eos=True), **options)
    assert any(event["type"] == "preempted" for event in told)
    assert len({token for output in outputs for token in output}) > (30 if build is not tied_gemma3 else 3)


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False])
def test_texts_that_would_fill_the_pool_twice_fit_into_it(engine_checkpoints: Path, caching: bool) -> None:
    """Three texts of 60 tokens need 45 blocks of 4 without windows, and with windows of 8 about 3 each. So nobody is
    preempted, unless a layer sees all."""
    told: list[Any] = []
    subject: Any = EngineSubject({"enable_prefix_caching": caching})
    options = TIGHT | {"num_blocks": 24, "on_event": told.append}
    path = random_mistral(engine_checkpoints)
    run(subject, path, random_prompts(5, 6, 7), greedy(55, ignore_eos=True), **options)
    assert not any(event["type"] == "preempted" for event in told)
    engine = subject.engine(windowed_qwen3(engine_checkpoints), **options)
    engine.generate(random_prompts(5, 6, 7), greedy(55, ignore_eos=True))
    assert any(event["type"] == "preempted" for event in told)


def test_a_draft_that_sees_all_keeps_all_blocks(engine_checkpoints: Path) -> None:
    path, options = random_mistral(engine_checkpoints), {"kv_cache_gib": 0.01, "skip_tokenizer_init": True}
    draft = random_mistral(engine_checkpoints, num_hidden_layers=1, sliding_window=11)
    for speculative, window in (
        (None, 8),
        ({"model": draft, "k": 2}, 11),
        ({"model": lively_qwen3(engine_checkpoints), "k": 2}, 0),
    ):
        with LLM(path, device="cpu", speculative=speculative, max_model_len=64, **options) as llm:
            assert llm.engine.scheduler.blocks.window == window
    with LLM(path, device="cpu", max_model_len=8, **options) as llm:  # no text is longer than the window
        assert llm.engine.scheduler.blocks.window == 0
        assert llm.engine.executor.runner.target.config.windows == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("build", [random_mistral, lively_gemma3])
def test_a_model_with_windows_guesses_for_another(engine_checkpoints: Path, build: Build) -> None:
    """It is its own draft, so that all guesses are right as long as both caches hold the same."""
    subject: Any = test_speculation_conformance.OwnDraft()
    run(subject, build(engine_checkpoints), LONG, greedy(16, ignore_eos=True), **TIGHT)


@pytest.fixture(params=[random_mistral, lively_gemma3])
def with_windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suites' models are others, with windows."""
    for module in (conformance, test_conformance):
        monkeypatch.setattr(module, "lively_qwen3", request.param)
    monkeypatch.setattr(conformance, "random_llama", windowed_qwen3)


class Suite(OtherModels):
    test_stories_are_hf_s = None  # type: ignore[assignment]  # there is no such model

    @pytest.fixture(autouse=True)
    def models(self, with_windows: None) -> None:
        pass

    @pytest.mark.parametrize("build", BUILDS)
    def test_greedy_tokens_are_hf_s(self, subject: Any, checkpoints: Path, build: Build) -> None:
        super().test_greedy_tokens_are_hf_s(subject, checkpoints, build)


@pytest.mark.slow
class TestAsynchronous(Suite, test_conformance.TestAsynchronous):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_the_blocks_before_a_nan_are_good(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Where a layer sees all. Windows alone do not reach from the end of that text to what is no number."""
    monkeypatch.setattr(test_nan, "lively_qwen3", lively_gemma3)
    test_nan.test_the_blocks_before_a_nan_are_good(tmp_path_factory, asynchronous, 12)


@pytest.mark.slow
@pytest.mark.parametrize(("build", "overlapped"), [(random_mistral, True), (lively_gemma3, False), (tied_gemma3, True)])
def test_several_ranks(start: Starter, engine_checkpoints: Path, build: Build, overlapped: bool) -> None:
    """Chunks, preemption, resumption and a warm prefix cache on several ranks."""
    path = build(engine_checkpoints)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with start(path, async_scheduling=overlapped, **TINY | {"num_kv_blocks": 11}) as llm:
        outputs = generate(llm, PROMPTS, params)
        oracle.check_greedy(path, PROMPTS, tokens(outputs), greedy(16, ignore_eos=True))
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        check_idle(llm)
    with start(path, async_scheduling=overlapped, **ROOMY) as llm:
        first = generate(llm, LONG, params)
        oracle.check_greedy(path, LONG, tokens(first), greedy(16, ignore_eos=True))
        warm = generate(llm, LONG, params)
        assert warm[0].num_cached_tokens == 56 and tokens(warm) == tokens(first)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("build", BUILDS)
def test_tokens_are_hf_s_on_a_gpu(engine_checkpoints: Path, build: Build, eager: bool) -> None:
    """By the kernels, in fp32, in a pool that is too small and with the prefix cache warm."""
    path = build(engine_checkpoints)
    config = {"device": "cuda", "dtype": torch.float32, "attention_backend": "triton", "gpu_memory_utilization": 0.3}
    subject: Any = EngineSubject(config | {"enforce_eager": eager, "async_scheduling": True})
    engine = subject.engine(path, **TIGHT | {"block_size": 16, "num_blocks": 8, "max_num_seqs": 6})
    for _ in range(2):
        outputs = engine.generate(LONG, greedy(16, ignore_eos=True))
        oracle.check_greedy(path, LONG, outputs, greedy(16, ignore_eos=True))
        subject.check_idle(engine)


@pytest.mark.gpu
@pytest.mark.parametrize("build", [random_mistral, lively_gemma3, tied_gemma3])
def test_guesses_on_a_gpu(engine_checkpoints: Path, build: Build) -> None:
    """Several queries of a sequence, whose windows begin at different keys: in recordings and by the prefill kernel."""
    path = build(engine_checkpoints)
    config = {"device": "cuda", "dtype": torch.float32, "attention_backend": "triton", "gpu_memory_utilization": 0.3}
    subject: Any = EngineSubject(config | {"speculative": {"method": "ngram", "k": 4, "n": 1}})
    engine = subject.engine(path, **TIGHT | {"block_size": 16, "num_blocks": 30, "max_num_batched_tokens": 64})
    outputs = engine.generate(LONG, greedy(24, ignore_eos=True))
    oracle.check_greedy(path, LONG, outputs, greedy(24, ignore_eos=True))


@pytest.mark.gpu
@pytest.mark.parametrize("build", [random_mistral, lively_gemma3])
def test_half_precision_on_a_gpu(engine_checkpoints: Path, build: Build) -> None:
    """bf16, so that layers that see all have Hopper's kernels beside the windows of the others."""
    path = build(engine_checkpoints, head_dim=64, hidden_size=256, intermediate_size=512, sliding_window=40)
    prompts = random_prompts(*range(40, 200, 5), seed=4)
    config = {"device": "cuda", "dtype": torch.bfloat16, "attention_backend": "triton", "gpu_memory_utilization": 0.3}
    subject: Any = EngineSubject(config)
    engine = subject.engine(path, block_size=256, num_blocks=64, max_num_seqs=32, max_num_batched_tokens=2048)
    outputs = engine.generate(prompts, greedy(32, ignore_eos=True))
    oracle.check_greedy_half(path, prompts, outputs, greedy(32, ignore_eos=True), torch.bfloat16, "cuda")
