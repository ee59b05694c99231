"""Weights in FP8 in the engine: Hugging Face's tokens of the same weights in float32, however a request is computed.

On a CPU the weights are widened while they are loaded. That they can stay in FP8 there as well, by plain PyTorch, is
for these tests. On a GPU they do stay. How exact few tokens are, and how exact many, is judged in bf16.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.layers.experts import Fp8Experts
from nanovllm.layers.fp8_linear import Fp8Linear, widen
from nanovllm.models import loader
from nanovllm.models.loader import load_model
from nanovllm.text.tokenizer import Tokenizer
from tests import oracle
from tests.engine import test_conformance, test_speculation_conformance
from tests.engine.adapter import EngineSubject
from tests.engine.ranks import STORY_MODEL, TINY, Starter, check_idle, engine_checkpoints, generate, tokens
from tests.fp8_checkpoints import Layout, in_fp8, wide_qwen3, wide_qwen3_moe
from tests.models.plain_attention import DictAttention
from tests.oracle_record import record_alone
from tests.stages.requests import PROMPTS, TIGHT, greedy, story_prompts
from training.corpus import story_text

__all__ = ["engine_checkpoints"]  # a fixture

LAYOUTS: list[Layout] = ["block", "channel"]
ASYNC, SYNC = {"async_scheduling": True}, {"async_scheduling": False}
NGRAMS = {"speculative": {"method": "ngram", "k": 3, "n": 1}}
COMBINATIONS = [parameters.values for parameters in test_conformance.combinations() if not parameters.marks]


@pytest.fixture(params=["widened", "kept"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    is_kept = request.param == "kept"
    monkeypatch.setattr(loader, "has_fp8", lambda device: is_kept)
    return is_kept


def check(engine: Any, widened: Path, prompts: list[list[int]], length: int, times: int = 2) -> None:
    """The second time the prefix cache is warm."""
    for _ in range(times):
        outputs = engine.generate(prompts, greedy(length, ignore_eos=True))
        oracle.check_greedy(widened, prompts, outputs, greedy(length, ignore_eos=True))
    assert len({token for output in outputs for token in output}) > 30


def num_kept(engine: Any) -> int:
    return sum(isinstance(module, Fp8Linear | Fp8Experts) for module in engine.model.modules())


@pytest.mark.parametrize(
    ("layout", "config"),
    [
        ("block", ASYNC),
        *(pytest.param(layout, c, marks=pytest.mark.slow) for layout in LAYOUTS for c in (ASYNC, SYNC, NGRAMS)),
    ],
)
def test_tokens_are_hf_s_in_a_pool_far_too_small(
    engine_checkpoints: Path, layout: Layout, config: dict[str, Any], kept: bool
) -> None:
    """In chunks, in company, and some of them preempted."""
    path, widened = in_fp8(wide_qwen3(engine_checkpoints), layout)
    told: list[Any] = []
    options = TIGHT | {"num_blocks": 10, "max_num_seqs": 6, "on_event": told.append}
    subject = EngineSubject(config)
    engine = subject.engine(path, **options)
    assert num_kept(engine) == (12 if kept else 0)
    check(engine, widened, PROMPTS, 12)
    subject.check_idle(engine)
    assert any(event["type"] == "preempted" for event in told)


@pytest.mark.slow
def test_a_model_in_fp8_guesses_for_itself(engine_checkpoints: Path, kept: bool) -> None:
    """Target and draft are one, so that all guesses are right as long as both caches hold the same."""
    path, widened = in_fp8(wide_qwen3(engine_checkpoints), "channel")
    engine = test_speculation_conformance.OwnDraft().engine(path, **TIGHT)
    check(engine, widened, PROMPTS, 16)


def test_a_draft_is_not_quantised(kept: bool) -> None:
    """Its weights stay as its own checkpoint has them."""
    draft = STORY_MODEL.parent / "story_draft"
    options: dict[str, Any] = {"quantization": "fp8", "kv_cache_gib": 0.01, "skip_tokenizer_init": True}
    with LLM(STORY_MODEL, device="cpu", speculative={"model": draft, "k": 2}, **options) as llm:
        guesses = llm.engine.executor.runner.guesses
        stored = load_model(draft).model.state_dict()
        assert all(weight.equal(stored[name]) for name, weight in guesses.model.model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "caching", "chunked", "overlapped", "tight"), COMBINATIONS)
def test_every_combination(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    block_size: int,
    caching: bool,
    chunked: bool,
    overlapped: bool,
    tight: bool,
) -> None:
    """The dense suite's, over weights that stay in FP8. Hugging Face is given the widened ones."""
    monkeypatch.setattr(loader, "has_fp8", lambda device: True)
    truth = oracle.truth

    def widened(path: Path, *how: Any) -> oracle.Truth:
        return truth(path.with_name(path.name.replace("-fp8", "-widened")), *how)

    monkeypatch.setattr(oracle, "truth", widened)
    monkeypatch.setattr(test_conformance, "lively_qwen3", lambda directory: in_fp8(wide_qwen3(directory), "block")[0])
    test_conformance.test_every_combination(tmp_path_factory, block_size, caching, chunked, overlapped, tight)


@pytest.fixture(params=[pytest.param("cpu", id="2-gloo"), pytest.param("cuda", id="2-nccl", marks=pytest.mark.gpu(2))])
def start(request: pytest.FixtureRequest) -> Starter:
    return Starter(2, request.param)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "layout"), [(wide_qwen3, "block"), (wide_qwen3, "channel"), (wide_qwen3_moe, "block")]
)
def test_ranks_have_parts_of_blocks(
    start: Starter, engine_checkpoints: Path, build: Callable[..., Path], layout: Layout
) -> None:
    """Chunks, preemption, resumption and a warm prefix cache on two ranks; of experts each has whole ones."""
    path, widened = in_fp8(build(engine_checkpoints), layout)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with start(path, enable_expert_parallel=build is wide_qwen3_moe, **TINY) as llm:
        outputs = generate(llm, PROMPTS, params)
        oracle.check_greedy(widened, PROMPTS, tokens(outputs), greedy(16, ignore_eos=True))
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        warm = generate(llm, PROMPTS[-1:], params)
        assert warm[0].num_cached_tokens >= 20 and tokens(warm) == tokens(outputs[-1:])
        check_idle(llm)


@pytest.mark.slow
@torch.inference_mode()
def test_stories_lose_little() -> None:
    """The loss of the story model on 200 stories that it has not seen changes by less than 1%."""
    tokenizer = Tokenizer(STORY_MODEL)
    texts = [tokenizer.encode(story_text(1, i, held_out=True))[:96] for i in range(200)]

    def loss(**options: Any) -> float:
        model, total = load_model(STORY_MODEL, **options).model, 0.0
        for ids in texts:
            hidden = model(torch.tensor(ids), torch.arange(len(ids)), DictAttention())
            scores = model.logits(hidden[:-1]).float().log_softmax(-1)
            total -= scores.gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
        return total / sum(len(ids) - 1 for ids in texts)

    exact, rounded = loss(), loss(quantization="fp8")
    assert 1e-6 < abs(rounded / exact - 1) < 0.01, (exact, rounded)


def test_the_option_is_checked() -> None:
    with pytest.raises(ValueError, match="quantization must be one of None, fp8; got 'int4'"):
        LLM(STORY_MODEL, device="cpu", quantization="int4")


# --- on a GPU ---


def on_gpu(path: Path, dtype: torch.dtype, **config: Any) -> Any:
    options = {"device": "cuda", "gpu_memory_utilization": 0.3, "attention_backend": "triton"}
    return EngineSubject(options | config).engine(path, num_blocks=64, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("build", "kept"), [(wide_qwen3, 12), (wide_qwen3_moe, 9)])
def test_tokens_are_hf_s_on_a_gpu(
    engine_checkpoints: Path, build: Callable[..., Path], kept: int, layout: Layout, eager: bool
) -> None:
    """In fp32, in a pool that is too small and with the prefix cache warm. Linear layers are the library's there,
    experts our kernels'."""
    path, widened = in_fp8(build(engine_checkpoints), layout)
    config = {"device": "cuda", "dtype": torch.float32, "attention_backend": "triton", "gpu_memory_utilization": 0.3}
    subject = EngineSubject(config | {"enforce_eager": eager, "async_scheduling": True})
    engine = subject.engine(path, **TIGHT | {"block_size": 16, "num_blocks": 5, "max_num_seqs": 6})
    assert num_kept(engine) == kept
    check(engine, widened, PROMPTS, 16)
    subject.check_idle(engine)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [32, 450], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_of_experts_in_bf16(engine_checkpoints: Path, layout: Layout, chunk: int) -> None:
    """Against float32 with the same weights. By the median of the tokens' errors: a token that changes an expert is far
    from the truth, in theirs and ours. In steps of many tokens the input of attention is rounded to four bits, too."""
    path, widened = in_fp8(wide_qwen3_moe(engine_checkpoints), layout)
    prompt = [token for prompt in PROMPTS for token in prompt]
    prompt = (prompt * (449 // len(prompt) + 1))[:449]
    engine = on_gpu(path, torch.bfloat16, enforce_eager=True, max_num_batched_tokens=chunk)
    assert num_kept(engine) == 9
    output, recorder = record_alone(engine, prompt, greedy(16, ignore_eos=True))
    known = prompt + output[:-1]
    found = recorder.logits_by_position(known)
    ours = torch.stack([found[p] for p in range(len(known))])
    exact, theirs = (oracle.truth(widened, dtype, "cuda").logits(known) for dtype in (torch.float32, torch.bfloat16))
    error, hf = ((logits - exact).square().mean(-1).sqrt().median().item() for logits in (ours, theirs))
    print(f"median error of the logits: {error:.4f}, Hugging Face's {hf:.4f}, their spread {exact.std().item():.4f}")
    assert 0 < error <= (2 * hf if chunk <= 64 else 0.1 * exact.std().item())


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [60, 100], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_in_bf16(engine_checkpoints: Path, layout: Layout, chunk: int) -> None:
    """Against float32 with the same weights. In steps of few tokens the error is that of bf16, by the oracle's rule. In
    those of many the input is rounded to four bits too; here that may move a logit by a tenth of their spread."""
    path, widened = in_fp8(STORY_MODEL, layout, engine_checkpoints)
    prompt = [token for prompt in story_prompts(STORY_MODEL) for token in prompt][:449]
    engine = on_gpu(path, torch.bfloat16, enforce_eager=True, max_num_batched_tokens=chunk)
    assert num_kept(engine) == 8 * 4
    output, recorder = record_alone(engine, prompt, greedy(64, ignore_eos=True))
    known = prompt + output[:-1]
    found = recorder.logits_by_position(known)
    ours = torch.stack([found[p] for p in range(len(known))])
    if chunk <= 64:
        oracle.check_rms(ours, widened, known, torch.bfloat16, "cuda")
    else:
        exact = oracle.truth(widened, torch.float32, "cuda").logits(known)
        error = oracle.rms(ours - exact) / exact.std().item()
        print(f"RMS error of the logits, by their spread: {error:.4f}")
        assert error < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("config", [{}, {"enforce_eager": True}, NGRAMS], ids=["graphs", "eager", "ngrams"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stories_in_bf16(engine_checkpoints: Path, layout: Layout, config: dict[str, Any]) -> None:
    """20 openings x 64 tokens in steps of few tokens, by the oracle's rule for bf16."""
    path, widened = in_fp8(STORY_MODEL, layout, engine_checkpoints)
    prompts, params = story_prompts(STORY_MODEL), greedy(64, ignore_eos=True)
    engine = on_gpu(path, torch.bfloat16, max_num_batched_tokens=64, **config)
    oracle.check_greedy_half(widened, prompts, engine.generate(prompts, params), params, torch.bfloat16, "cuda")


@pytest.mark.gpu
def test_quantised_while_it_is_loaded_on_a_gpu(engine_checkpoints: Path) -> None:
    """The same weights as on a CPU, and much less memory than in bf16."""
    with torch.inference_mode():
        on_cpu = load_model(STORY_MODEL, quantization="fp8").model
        model = load_model(STORY_MODEL, quantization="fp8", device="cuda").model
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Fp8Linear)]
    assert len(layers) == 8 * 4
    for name, module in layers:
        assert torch.equal(widen(module.weight, module.scale).cpu(), on_cpu.get_parameter(f"{name}.weight"))
