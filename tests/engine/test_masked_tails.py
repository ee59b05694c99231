"""Recorded tails of decode steps with masks: every token is that of the path without recordings."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from nanovllm.distributed.group import Group
from nanovllm.engine.plan import Scheduled, StepMasks
from nanovllm.graphs.cuda_graph import record_nothing
from nanovllm.graphs.decode_steps import DecodeSteps
from nanovllm.graphs.masked_tails import MaskedTails
from nanovllm.graphs.sizes import StepSizes
from nanovllm.kernels import FusedKernels
from nanovllm.runner import model_runner
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.sampling import sampler
from nanovllm.sampling.filters import constrain
from nanovllm.sampling.noise import add_noise, choose
from nanovllm.sampling.sampler import Sampled, Sampler
from nanovllm.sampling.state import Needs, SamplingState, packed
from nanovllm.workers import executor
from tests.engine.structured import KINDS, STORIES, ids, model

__all__ = ["model"]  # a fixture

Asked = list[tuple[str, SamplingParams]]
ROWS: dict[str, Any] = {
    "max_num_seqs": 7, "max_model_len": 160, "max_num_batched_tokens": 24, "kvcache_block_size": 4,
    "enable_prefix_caching": False,  # so that a history has the same steps when it runs again
}  # fmt: skip
ROOMY = ROWS | {"num_kv_blocks": 300}
TIGHT = ROWS | {"num_kv_blocks": 42}


def edit_logits(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState) -> tuple[Tensor, SamplingState]:
    raw = logits.clone()
    logits.fill_(torch.nan)  # nothing but `restore_logits` brings them back
    return raw, state


def restore_logits(logits: Tensor, edits: tuple[Tensor, SamplingState]) -> None:
    logits.copy_(edits[0])


def sample_rows(
    logits: Tensor, rows: Tensor, positions: Tensor, *_: Tensor, edits: tuple[Tensor, SamplingState], **options: Any
) -> Tensor:
    """All that the plain tail does on a GPU, by the reference."""
    raw, state = edits
    needs = Needs(mask=True, penalties=True, min_p=True, num_candidates=state.vocab_size)
    metadata = state.metadata(rows, positions)
    scores = constrain(raw.float(), metadata, rows, state, needs)
    token_ids = torch.where(raw.amax(-1).isfinite(), choose(add_noise(scores, metadata)), -1)
    state.write(rows, positions, token_ids)
    return token_ids


IN_PYTORCH = FusedKernels(sample_rows=sample_rows, edit_logits=edit_logits, restore_logits=restore_logits)


@contextmanager
def kernels(fused: FusedKernels, recorded: bool) -> Iterator[None]:
    """Engines that start in here sample by these kernels, on a CPU; `recorded`: and replay their steps."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (sampler, model_runner):
            patch.setattr(module, "fused_kernels", lambda device: fused)
        if recorded:
            patch.setattr(executor, "ModelRunner", partial(ModelRunner, recorder=record_nothing))
        yield


def note_tails(llm: LLM) -> list[tuple[int, int]]:
    """Of each tail that is replayed from now on: how many tokens it draws, and how many have a mask."""
    noted: list[tuple[int, int]] = []
    tails: MaskedTails = llm.engine.executor.runner.recorded.tails
    replay = tails.replay

    def noting(num_tokens: int, rows: list[int], masks: Any) -> Sampled:
        noted.append((num_tokens, len(rows)))
        return replay(num_tokens, rows, masks)

    tails.replay = noting  # type: ignore[method-assign, assignment]
    return noted


def history(seed: int) -> Asked:
    """Masked and plain requests of all kinds and lengths."""
    draw = random.Random(seed)
    asked: Asked = []
    for i in range(11):
        options: dict[str, Any] = {"seed": i, "max_tokens": draw.randrange(1, 24)}
        options |= draw.choice([{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.7}])
        options |= draw.choice([{}, {}, {"presence_penalty": 0.7, "top_k": 30}, {"logprobs": draw.randrange(3)}])
        options["allowed_token_ids"] = draw.choice([None, None, [0, *range(20, 4000, 2)]])
        if draw.random() < 0.6:
            options["structured_outputs"] = KINDS[draw.choice(["grammar", "regex", "choice"])]
        if options["allowed_token_ids"] is not None and options.get("structured_outputs") is not None:
            options["structured_outputs"] = StructuredOutputsParams(regex="[A-Za-z ]{3,9}")
        prompt = STORIES[i][: draw.randrange(1, 50)]
        asked.append((prompt, SamplingParams(**options)))
    return asked


def generate(llm: LLM, asked: Asked) -> list[RequestOutput]:
    return llm.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)


def answers(found: list[RequestOutput]) -> list[Any]:
    """Tokens, why they end, and log-probabilities bit for bit."""
    choices = [choice for output in found for choice in output.outputs]
    return [(c.token_ids, c.finish_reason, c.stop_reason, c.logprobs) for c in choices]


@pytest.mark.parametrize("config", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
def test_tokens_are_those_of_the_path_without_recordings(model: Path, config: dict[str, Any], overlapped: bool) -> None:
    """Requests come and go, are preempted, and stop in steps that are drawn already, so that batches of every size have
    rows with masks, rows without, and rows whose grammar is gone."""
    options = config | {"async_scheduling": overlapped}
    with kernels(IN_PYTORCH, recorded=True), LLM(model, **options) as llm:
        noted = note_tails(llm)
        found = [generate(llm, history(seed)) for seed in range(2)]
        llm.engine.executor.runner.recorded.tails = None
        assert [answers(generate(llm, history(seed))) for seed in range(2)] == list(map(answers, found))
    with kernels(IN_PYTORCH, recorded=False), LLM(model, **options) as plain:
        assert plain.engine.executor.runner.recorded is None
        assert [ids(generate(plain, history(seed))) for seed in range(2)] == list(map(ids, found))
    assert {n for n, _ in noted} >= {1, 2, 3, 5, 6, 7}, "sizes of the ladder, and between them"
    assert any(masked < n for n, masked in noted) and any(masked == n for n, masked in noted)
    preemptions = sum(output.metrics.num_preemptions for outputs in found for output in outputs)
    assert (preemptions > 0) == (config is TIGHT)
