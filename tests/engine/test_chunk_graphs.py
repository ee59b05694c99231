"""Recorded steps with prompts. On a CPU through the same code, with a stand-in that runs the step anew."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.plan import Scheduled
from nanovllm.graphs import sizes
from nanovllm.graphs.prompt_steps import PromptSteps, RecordedSteps
from nanovllm.graphs.sizes import PROMPT_SIZES, prompt_sizes
from nanovllm.models.config import read_config
from nanovllm.runner import batch, model_runner
from nanovllm.runner.batch import Batch
from nanovllm.runner.rows import Rows
from nanovllm.runner.warm_up import launch_unrecorded
from tests.engine.test_cuda_graphs import DEFAULTS, DEVICES, make_llm, mixed_params, runner_of, tokens_of
from tests.stages.requests import PROMPTS
from tests.weights import lively_qwen3

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"


@pytest.fixture
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "graph-checkpoints"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """Tokens and sequences of every step that is no decode, and whether it was replayed. None goes another way."""
    monkeypatch.setattr(sizes, "MAX_REPLAYED", 0)
    found, replay = [], PromptSteps.replay

    def counting(self: PromptSteps, scheduled: Any) -> Any:
        replayed = replay(self, scheduled)
        found.append((sum(s.num_tokens for s in scheduled), len(scheduled), replayed is not None))
        return replayed

    monkeypatch.setattr(PromptSteps, "replay", counting)
    return found


def test_a_large_model_is_recorded_for_fewer_tokens() -> None:
    config = EngineConfig(max_model_len=4096, max_num_batched_tokens=8192)
    assert prompt_sizes(config, read_config(SHAPES / "Qwen3-0.6B")) == [*PROMPT_SIZES]
    large = prompt_sizes(config, read_config(SHAPES / "Qwen3-8B"))
    assert large == [s for s in PROMPT_SIZES if s <= large[-1]] and 256 <= large[-1] < 1024
    for length, budget in ((300, 8192), (4096, 300)):
        config = EngineConfig(max_model_len=length, max_num_batched_tokens=budget)
        assert prompt_sizes(config, read_config(SHAPES / "Qwen3-0.6B")) == [64, 128, 256]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", [24, 64, 100])
def test_chunks_beside_decodes(
    device: str, budget: int, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, seen: list[Any]
) -> None:
    """Prompts of all lengths, cut at any place, some of them beside decodes: the tokens of the plain loop."""
    path = lively_qwen3(checkpoints)
    prompts = [[(7 * i + j) % 200 + 1 for j in range(9 * i + 1)] for i in range(9)]
    config = {"max_num_batched_tokens": budget}
    plain = LLM(path, device=device, dtype="float32", enforce_eager=True, **DEFAULTS | config)
    expected = tokens_of(plain, prompts, mixed_params(9))
    assert len({t for tokens in expected for t in tokens}) > 20
    recorded = make_llm(path, device, monkeypatch, **config)
    assert tokens_of(recorded, prompts, mixed_params(9)) == expected
    steps = runner_of(recorded).recorded
    assert steps is not None
    largest = max(steps.prompts.sizes, default=0)
    assert largest == {24: 0, 64: 64, 100: 64}[budget]
    assert seen and all(replayed == (n <= largest) for n, _, replayed in seen)
    if largest:
        assert any(n > sequences > 1 and replayed for n, sequences, replayed in seen)


@pytest.mark.parametrize("device", DEVICES)
def test_guesses_beside_a_prompt(
    device: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, seen: list[Any]
) -> None:
    """Everything is a chunk then: prompts, guesses that are verified, and single tokens."""
    recorded, plain = guessing({"method": "ngram", "k": 3, "n": 1}, 0.0, device, checkpoints, monkeypatch)
    assert recorded.engine.scheduler.speculation == plain.engine.scheduler.speculation
    assert len(seen) > 8 and all(replayed for _, _, replayed in seen)


@pytest.mark.parametrize("device", DEVICES)
def test_guesses_of_a_draft_beside_a_prompt_of_decodes(
    device: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step then samples after more tokens than were asked for, and the guesses that were drawn belong to these."""
    guessing({"model": lively_qwen3(checkpoints), "k": 3}, 1.0, device, checkpoints, monkeypatch)


def guessing(
    speculative: dict[str, Any], temperature: float, device: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[LLM, LLM]:
    """An engine with recordings and the plain loop, both of which have given the same tokens."""
    path = lively_qwen3(checkpoints)
    config: dict[str, Any] = {"speculative": speculative, "max_num_batched_tokens": 64}
    prompts = [[*p[:20], i] for i, p in enumerate((PROMPTS * 2)[:7])]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=24 - 3 * i, ignore_eos=True) for i in range(7)]
    plain = LLM(path, device=device, dtype="float32", enforce_eager=True, **DEFAULTS | config)
    recorded = make_llm(path, device, monkeypatch, **config)
    assert tokens_of(recorded, prompts, params) == tokens_of(plain, prompts, params)
    return recorded, plain


def test_chunks_behind_long_contexts(checkpoints: Path, monkeypatch: pytest.MonkeyPatch, seen: list[Any]) -> None:
    """Attention is told of them, in steps that are launched and in recorded ones, but not of a decode behind a long
    context, nor in a step of too many tokens."""
    device = "cpu"  # where a replay runs the step anew
    path, config = lively_qwen3(checkpoints), {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
    prompts = [[(7 * i + j) % 200 + 1 for j in range(n)] for i, n in enumerate((30, 90, 120))]
    plain = LLM(path, device=device, dtype="float32", enforce_eager=True, **DEFAULTS | config)
    expected = tokens_of(plain, prompts, mixed_params(3))
    monkeypatch.setattr(sizes, "LONG_CONTEXT", 30)
    monkeypatch.setattr(batch, "MOST_CUT_TOKENS", 63)  # of a step that is launched
    recorded, look_up = make_llm(path, device, monkeypatch, **config), batch.look_up
    known: list[tuple[int, bool]] = []

    def noting(parts: Any, rows: Any, num_decodes: int, *others: Any) -> Any:
        if num_decodes < parts[2].shape[0]:
            known.append((len(parts[0]), others[-1]))
        return look_up(parts, rows, num_decodes, *others)

    for module in batch, model_runner:
        monkeypatch.setattr(module, "look_up", noting)
    for llm in plain, recorded:
        assert tokens_of(llm, prompts, mixed_params(3)) == expected
    launched, replayed = [(64, False), (64, False), (64, False), (53, True)], [False, True, False, True]
    assert known == launched + [(64, long) for long in replayed]


@pytest.mark.parametrize(("max_model_len", "budget", "longest"), [(4097, 8192, 0), (4102, 8192, 17), (9000, 16, 16)])
def test_a_start_launches_what_is_cut(max_model_len: int, budget: int, longest: int) -> None:
    """By the prefill kernel, which is for more than a few queries: also where a context is hardly longer than that, or
    a step is small."""
    launched: list[Batch] = []
    launch_unrecorded(launched.append, Rows(8, max_model_len, 16, 10, torch.device("cpu")), budget)
    long = [made.attention for made in launched if made.attention.long_context]
    assert max((meta.max_query_len for meta in long), default=0) == longest


@pytest.mark.parametrize("device", DEVICES)
def test_a_prompt_beside_many_decodes(
    device: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, seen: list[Any]
) -> None:
    """As on a busy server: every step is replayed however many sequences run, with the tokens of the plain loop."""
    monkeypatch.setattr(sizes, "FEW_PLACES", 24)
    path, config = lively_qwen3(checkpoints), {"max_num_seqs": 33, "max_num_batched_tokens": 128}
    prompts = [[(7 * i + j) % 200 + 1 for j in range(5 + i % 9)] for i in range(60)]
    params = [SamplingParams(temperature=0, max_tokens=3 + i % 11, ignore_eos=True) for i in range(60)]
    plain = LLM(path, device=device, dtype="float32", enforce_eager=True, **DEFAULTS | config)
    expected = tokens_of(plain, prompts, params)
    recorded = make_llm(path, device, monkeypatch, **config)
    assert tokens_of(recorded, prompts, params) == expected
    assert all(replayed for _, _, replayed in seen)
    numbers = {n for _, n, _ in seen}
    assert min(numbers) < 24 and max(numbers) == 33, "the workload does not show it"


def test_places_for_every_sequence_that_may_run() -> None:
    def made(**config: Any) -> sizes.StepSizes:
        whole = EngineConfig(**{"max_model_len": 4096, "max_num_batched_tokens": 8192} | config)
        return sizes.step_sizes(whole, read_config(SHAPES / "Qwen3-0.6B"))

    assert made(max_num_seqs=256).places == [64, 272] and made(max_num_seqs=256).num_logits == 272
    assert made(max_num_seqs=63).places == [64] and made(max_num_seqs=64).places == [64, 80]
    assert made(max_num_seqs=256).with_prompts == [(t, s) for s in (64, 272) for t in PROMPT_SIZES]
    assert made(max_num_seqs=256, max_num_batched_tokens=32).with_prompts == []


def test_which_recordings_have_a_twin() -> None:
    model = read_config(SHAPES / "Qwen3-0.6B")
    for length, most in ((4096, 0), (4097, 512)):
        made = sizes.step_sizes(EngineConfig(max_model_len=length, max_num_batched_tokens=8192), model)
        assert made.for_long_contexts == [(tokens, 64) for tokens in PROMPT_SIZES if tokens <= most]

    def is_long(start: int, num_tokens: int, *guesses: int) -> bool:
        decode = Scheduled(7, 1, 9000, 1, True, ())
        return sizes.has_long_context([decode, Scheduled(8, 2, start, num_tokens, True, (), guesses)])

    assert is_long(4096, 2) and not is_long(4095, 300) and not is_long(4096, 1)
    assert is_long(4096, 4, 1, 2) and not is_long(4096, 3, 1, 2)


def test_chunks_behind_long_contexts_are_no_decodes() -> None:
    """As decodes each token would read the whole context. Beside decodes, or with few tokens, it is as ever."""
    steps, asked = RecordedSteps.__new__(RecordedSteps), list[str]()

    def replay(name: str, scheduled: Any, alone: bool = False) -> None:
        if not alone:
            asked.append(name)

    for name in "decodes", "prompts":
        setattr(steps, name, SimpleNamespace(replay=partial(replay, name)))
    chunk, decode = Scheduled(7, 1, 4096, 17, True, ()), Scheduled(8, 2, 9000, 1, True, ())
    for work in [chunk], [chunk._replace(start=4095)], [chunk._replace(num_tokens=16)], [decode, chunk], [decode]:
        steps.replay(work)
    assert asked == ["prompts", "decodes", *["decodes", "prompts"] * 4]


@pytest.mark.parametrize("device", DEVICES)
def test_more_samples_than_a_recording_has_room_for_are_launched(
    device: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, seen: list[Any]
) -> None:
    monkeypatch.setattr(sizes, "prompt_places", lambda config: [4])
    llm = make_llm(lively_qwen3(checkpoints), device, monkeypatch)
    prompts = [list(range(i, i + 5)) for i in range(1, 5)]
    for n, replayed in ((3, True), (4, False)):  # one is kept for padding
        seen.clear()
        tokens_of(llm, prompts[:n], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        assert seen[0] == (5 * n, n, replayed)
        prompts = [[i, *p] for i, p in enumerate(prompts, 9)]
        prompts = [p[:5] for p in prompts]
