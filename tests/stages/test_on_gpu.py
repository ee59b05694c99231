"""The stages on a GPU: fp32 exactly, bf16 and fp16 by the oracle's rules, with the gather and with the kernel."""

from pathlib import Path
from typing import Any

import pytest
import torch

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
