"""The stages on a GPU: fp32 exactly, bf16 and fp16 by the oracle's rules, with the gather and with the kernel."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lib.workloads import SHAPES
from benchmarks.stages.runners import CompiledEngine
from stages.core import SamplingParams
from stages.model import Transformer
from tests import oracle
from tests.oracle_record import record_alone
from tests.stages.requests import PROMPTS, TIGHT, greedy, random_prompts, story_prompts
from tests.stages.subject import Subject, needs, since
from tests.weights import lively_qwen3

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
ATTENTION = pytest.mark.parametrize("attention", ["gather", "triton"])


def options(dtype: torch.dtype, attention: str | None = None) -> dict[str, Any]:
    geometry = {"block_size": 16, "num_blocks": 256, "max_num_seqs": 8, "max_num_batched_tokens": 100}
    return {**geometry, "device": DEVICE, "dtype": dtype} | ({"attention": attention} if attention else {})


def stories(subject: Subject, path: Path, dtype: torch.dtype, attention: str | None) -> None:
    """20 openings x 64 tokens."""
    prompts = story_prompts(path)
    params = greedy(64, ignore_eos=True)
    engine = subject.engine(path, **options(dtype, attention))
    outputs = engine.generate(prompts, params)
    if dtype == torch.float32:
        oracle.check_greedy(path, prompts, outputs, params)
    else:
        oracle.check_greedy_half(path, prompts, outputs, params, dtype, DEVICE)
    subject.check_idle(engine)


def rms(subject: Subject, path: Path, prompt: list[int], dtype: torch.dtype, attention: str | None) -> None:
    """The RMS rule over 512 positions, most of them prefilled (where the stage can: in chunks), 64 decoded."""
    engine = subject.engine(path, **options(dtype, attention))
    output, recorder = record_alone(engine, prompt[:449], greedy(64, ignore_eos=True))
    known = prompt[:449] + output[:-1]
    ours = recorder.logits_by_position(known)
    oracle.check_rms(torch.stack([ours[p] for p in range(len(known))]), path, known, dtype, DEVICE)


def lively(checkpoints: Path) -> Path:
    return lively_qwen3(checkpoints, head_dim=64)  # the smallest head that the kernel takes


@since(1, 2)
@HALF
def test_stories_in_half_precision(subject: Subject, story_model: Path, dtype: torch.dtype) -> None:
    stories(subject, story_model, dtype, None)


@needs("attention")
@HALF
@ATTENTION
def test_stories_in_half_precision_paged(
    subject: Subject, story_model: Path, dtype: torch.dtype, attention: str
) -> None:
    stories(subject, story_model, dtype, attention)


@since(1, 2)
def test_stories_in_fp32(subject: Subject, story_model: Path) -> None:
    stories(subject, story_model, torch.float32, None)


@needs("attention")
@ATTENTION
def test_stories_in_fp32_paged(subject: Subject, story_model: Path, attention: str) -> None:
    stories(subject, story_model, torch.float32, attention)


@since(1, 2)
@HALF
def test_logits_in_half_precision(subject: Subject, checkpoints: Path, dtype: torch.dtype) -> None:
    rms(subject, lively(checkpoints), random_prompts(449)[0], dtype, None)


@needs("attention")
@HALF
@ATTENTION
def test_logits_in_half_precision_paged(
    subject: Subject, checkpoints: Path, dtype: torch.dtype, attention: str
) -> None:
    rms(subject, lively(checkpoints), random_prompts(449)[0], dtype, attention)


@needs("attention")
@HALF
@ATTENTION
def test_logits_of_the_story_model(subject: Subject, story_model: Path, dtype: torch.dtype, attention: str) -> None:
    rms(subject, story_model, [token for prompt in story_prompts(story_model) for token in prompt], dtype, attention)


def test_greedy_fp32_tokens_in_tight_quarters(subject: Subject, checkpoints: Path) -> None:
    """Chunks, sharing and preemption on the GPU."""
    path = lively_qwen3(checkpoints)
    engine = subject.engine(path, **TIGHT | {"num_blocks": 12, "max_num_seqs": 6}, device=DEVICE, dtype=torch.float32)
    for _ in range(2):
        outputs = engine.generate(PROMPTS, greedy(16, ignore_eos=True))
        oracle.check_greedy(path, PROMPTS, outputs, greedy(16, ignore_eos=True))
        subject.check_idle(engine)


def test_the_checkpoints_dtype_is_the_default(subject: Subject, story_model: Path) -> None:
    engine = subject.engine(story_model, device=DEVICE)
    assert next(engine.model.parameters()).dtype == torch.bfloat16


# --- CUDA graphs: a replay against an eager step, and against Hugging Face (stage 7 builds on stage 5: no graphs) ---


def graphed(subject: Subject, path: Path, dtype: torch.dtype, eager: bool = False, **more: Any) -> Any:
    engine = subject.engine(path, **options(dtype) | {"max_num_batched_tokens": 512} | more)
    if eager:
        engine.bucket_for = lambda plan: None
    return engine


@since(6, 6)
@ATTENTION
def test_replays_are_eager_steps(subject: Subject, checkpoints: Path, attention: str) -> None:
    """fp32, the same tokens: batch 3 after batch 8, long tables then short ones, sampled beside greedy rows."""
    path = lively(checkpoints)
    engine, reference = (graphed(subject, path, torch.float32, eager, attention=attention) for eager in (False, True))
    assert engine.graph_bytes > 0
    calls = [random_prompts(*[100] * 8), random_prompts(2, 3, 1, seed=1), random_prompts(200, 1, seed=2), [[7]]]
    sampled = SamplingParams(1.2, 40, ignore_eos=True, seed=3)
    for prompts in calls:
        params = [sampled if i % 3 == 1 else greedy(40, ignore_eos=True) for i in range(len(prompts))]
        assert engine.generate(prompts, params) == reference.generate(prompts, params)
        outputs = engine.generate(prompts, greedy(40))
        oracle.check_greedy(path, prompts, outputs, greedy(40))
        subject.check_idle(engine)


@since(6, 6)
@HALF
@ATTENTION
def test_logits_of_replays(
    subject: Subject, story_model: Path, dtype: torch.dtype, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The RMS rule at 520 positions, every one of them computed by a replay."""
    given: list[torch.Tensor] = []
    plain = Transformer.logits

    def keep(model: Transformer, hidden: torch.Tensor) -> torch.Tensor:
        given.append(plain(model, hidden))
        return given[-1]

    monkeypatch.setattr(Transformer, "logits", keep)
    engine = graphed(subject, story_model, dtype, attention=attention, max_num_seqs=1)
    static, rows, replay = given[-1], [], engine.replay

    def replay_and_keep(*arguments: Any) -> Any:
        tokens = replay(*arguments)
        rows.append(static[0].cpu())
        return tokens

    engine.replay = replay_and_keep
    prompt = story_prompts(story_model)[0][:1]
    [output] = engine.generate([prompt], greedy(520, ignore_eos=True))
    assert len(rows) == 520 and output == [int(row.argmax()) for row in rows]
    oracle.check_rms(torch.stack(rows), story_model, [*prompt, *output[:-1]], dtype, DEVICE)


def check_batches(
    engine: Any, path: Path, batches: list[list[list[int]]], params: SamplingParams, dtype: torch.dtype
) -> None:
    """Each batch by its own call, and all outputs judged together: one sequence is too short to judge a share by."""
    outputs = [output for prompts in batches for output in engine.generate(prompts, params)]
    oracle.check_greedy_half(path, [prompt for batch in batches for prompt in batch], outputs, params, dtype, DEVICE)


@since(6, 6)
@HALF
def test_replays_of_the_shape_of_qwen3(subject: Subject, checkpoints: Path, dtype: torch.dtype) -> None:
    """Qwen3-0.6B with lively random weights: 28 layers of 16 heads, a vocabulary of 151,936."""
    config = json.loads((SHAPES / "Qwen3-0.6B" / "config.json").read_text(encoding="utf-8"))
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    heads = ("num_attention_heads", "num_key_value_heads")
    path = lively_qwen3(checkpoints, **{key: config[key] for key in (*sizes, *heads)})
    batches = [random_prompts(*range(20, 28)), random_prompts(30, 5, 1, seed=1), random_prompts(12, seed=2)]
    check_batches(graphed(subject, path, dtype), path, batches, greedy(24, ignore_eos=True), dtype)


@since(6, 6)
@HALF
def test_compiled_replays(subject: Subject, story_model: Path, dtype: torch.dtype) -> None:
    prompts = story_prompts(story_model)
    engine = CompiledEngine(str(story_model), **options(dtype) | {"max_num_batched_tokens": 512})
    check_batches(engine, story_model, [prompts[:8], prompts[8:11], prompts[11:12]], greedy(64, ignore_eos=True), dtype)


@since(6, 6)
def test_the_memory_of_graphs_is_shared(subject: Subject, story_model: Path) -> None:
    """Graphs for 1, 2, 4, 8, 16, 24 and 32 sequences take hardly more than the largest of them.

    The first engine of a process also loads libraries and kernels, which the device's free memory shows, too.
    """
    graphed(subject, story_model, torch.float32, max_num_seqs=32)
    several = graphed(subject, story_model, torch.float32, max_num_seqs=32)
    graph = several.graphs
    assert list(graph) == [32, 24, 16, 8, 4, 2, 1]
    assert several.graph_bytes < 400 * 2**20


@since(6, 6)
def test_another_model_is_obeyed(subject: Subject, checkpoints: Path) -> None:
    """The graphs hold the kernels of the model that they recorded, so whoever wraps it gets eager steps."""
    path = lively(checkpoints)
    [prompt] = random_prompts(20)
    output, recorder = record_alone(graphed(subject, path, torch.float32), prompt, greedy(20, ignore_eos=True))
    assert sorted(recorder.logits_by_position(prompt + output[:-1])) == list(range(39))
