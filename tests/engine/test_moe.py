"""Mixtures of experts in the engine: Hugging Face's tokens, under all that the dense models are tested with.

The suites are those of the dense models; only the models in them are others.
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
from tests.stages.requests import PROMPTS, TIGHT, greedy
from tests.weights import lively_qwen3_moe, random_mixtral, random_qwen2_moe

__all__ = ["engine_checkpoints", "start"]  # fixtures

Build = Callable[..., Path]
ASYNC, SYNC = {"async_scheduling": True}, {"async_scheduling": False}
NGRAMS = {"speculative": {"method": "ngram", "k": 3, "n": 1}}


def mixed(directory: Path | str, **over: Any) -> Path:
    """Layers with and without experts, and weights of the experts that sum to one."""
    return lively_qwen3_moe(
        directory, **{"decoder_sparse_step": 2, "num_hidden_layers": 4, "norm_topk_prob": True} | over
    )


def one_expert(directory: Path | str, **over: Any) -> Path:
    return lively_qwen3_moe(directory, **{"num_experts_per_tok": 1} | over)


def all_experts(directory: Path | str, **over: Any) -> Path:
    return lively_qwen3_moe(directory, **{"num_experts_per_tok": 8, "norm_topk_prob": True} | over)


BUILDS = [lively_qwen3_moe, mixed, one_expert, all_experts, random_qwen2_moe, random_mixtral]


@pytest.mark.parametrize(
    ("build", "config"),
    [
        (random_qwen2_moe, ASYNC),
        *(pytest.param(b, c, marks=pytest.mark.slow) for b in BUILDS for c in (ASYNC, SYNC, NGRAMS)),
    ],
)
def test_tokens_are_hf_s_in_a_pool_far_too_small(
    engine_checkpoints: Path, build: Build, config: dict[str, Any]
) -> None:
    """In chunks, in company, and some of them preempted."""
    told: list[Any] = []
    options = TIGHT | {"num_blocks": 10, "max_num_seqs": 6, "on_event": told.append}
    subject: Any = EngineSubject(config)
    outputs = run(subject, build(engine_checkpoints), PROMPTS, greedy(12, ignore_eos=True), **options)
    assert any(event["type"] == "preempted" for event in told)
    assert len({token for output in outputs for token in output}) > 30


@pytest.mark.slow
def test_a_mixture_of_experts_guesses_for_another(engine_checkpoints: Path) -> None:
    """It is its own draft, so that all guesses are right as long as both caches hold the same."""
    subject: Any = test_speculation_conformance.OwnDraft()
    run(subject, mixed(engine_checkpoints), PROMPTS, greedy(16, ignore_eos=True), **TIGHT)


@pytest.fixture
def with_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suites' dense models become mixtures of experts."""
    for module in (conformance, test_conformance, test_nan):
        monkeypatch.setattr(module, "lively_qwen3", mixed)
    monkeypatch.setattr(conformance, "random_llama", random_qwen2_moe)


class Suite(OtherModels):
    @pytest.fixture
    def story_model(self) -> Path:
        return Path(__file__).parents[2] / "assets" / "story_moe"

    @pytest.mark.parametrize("number", [5])
    def test_stories_are_hf_s(self, subject: Any, story_model: Path, number: int) -> None:
        super().test_stories_are_hf_s(subject, story_model, number)

    @pytest.fixture(autouse=True)
    def models(self, with_experts: None) -> None:
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
    with_experts: None, tmp_path_factory: pytest.TempPathFactory, asynchronous: bool
) -> None:
    """A token that is not a number goes to some experts, and spoils none of their other tokens."""
    test_nan.test_the_blocks_before_a_nan_are_good(tmp_path_factory, asynchronous, 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "overlapped", "whole"),
    [(mixed, True, False), (random_qwen2_moe, False, True), (random_mixtral, True, True)],
)
def test_ranks_have_parts_of_every_expert_or_whole_experts(
    start: Starter, engine_checkpoints: Path, build: Build, overlapped: bool, whole: bool
) -> None:
    """Chunks, preemption, resumption and a warm prefix cache on several ranks."""
    path = build(engine_checkpoints)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with start(path, async_scheduling=overlapped, enable_expert_parallel=whole, **TINY) as llm:
        outputs = generate(llm, PROMPTS, params)
        oracle.check_greedy(path, PROMPTS, tokens(outputs), greedy(16, ignore_eos=True))
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        warm = generate(llm, PROMPTS[-1:], params)
        assert warm[0].num_cached_tokens >= 20 and tokens(warm) == tokens(outputs[-1:])
        check_idle(llm)


@pytest.mark.slow
def test_ranks_draw_what_one_rank_draws(start: Starter, engine_checkpoints: Path) -> None:
    path = random_qwen2_moe(engine_checkpoints)
    params = [SamplingParams(temperature=t, max_tokens=12, seed=7, ignore_eos=True) for t in (0.7, 1.0, 1.3)]
    with LLM(path, device="cpu", skip_tokenizer_init=True, **ROOMY) as llm:
        expected = tokens(generate(llm, PROMPTS[:3], params))
    with start(path, enable_expert_parallel=True, **ROOMY) as llm:
        assert tokens(generate(llm, PROMPTS[:3], params)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("build", BUILDS)
def test_tokens_are_hf_s_on_a_gpu(engine_checkpoints: Path, build: Build, eager: bool) -> None:
    """By the kernels, in fp32, in a pool that is too small and with the prefix cache warm."""
    path = build(engine_checkpoints)
    config = {"device": "cuda", "dtype": torch.float32, "attention_backend": "triton", "gpu_memory_utilization": 0.3}
    subject: Any = EngineSubject(config | {"enforce_eager": eager, "async_scheduling": True})
    options = TIGHT | {"block_size": 16, "num_blocks": 5, "max_num_seqs": 6}
    engine = subject.engine(path, **options)
    for _ in range(2):
        outputs = engine.generate(PROMPTS, greedy(16, ignore_eos=True))
        oracle.check_greedy(path, PROMPTS, outputs, greedy(16, ignore_eos=True))
        subject.check_idle(engine)
