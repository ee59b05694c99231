"""Recorded tails of decode steps with masks: every token is that of the path without recordings."""

import random
from collections.abc import Iterator
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
from nanovllm.sampling.masks import masks_of_rows, masks_of_tokens
from nanovllm.sampling.noise import add_noise, choose
from nanovllm.sampling.sampler import Sampled, Sampler
from nanovllm.sampling.state import Needs, SamplingState, packed
from nanovllm.workers import executor
from tests.engine.structured import KINDS, STORIES, ids, model

__all__ = ["model"]  # a fixture

Asked = list[tuple[str, SamplingParams]]
ROWS: dict[str, Any] = {
    "max_num_seqs": 7, "max_model_len": 160, "max_num_batched_tokens": 64, "kvcache_block_size": 4,
    "enable_prefix_caching": False,  # so that a history has the same steps when it runs again
}  # fmt: skip
ROOMY = ROWS | {"num_kv_blocks": 300}
TIGHT = ROWS | {"num_kv_blocks": 20}


def edit_logits(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState) -> tuple[Tensor, SamplingState]:
    raw = logits.clone()
    logits.fill_(torch.nan)  # nothing but `restore_logits` brings them back
    return raw, state


def restore_logits(logits: Tensor, edits: tuple[Tensor, SamplingState]) -> None:
    logits.copy_(edits[0])


def largest(rows: Tensor, numbers: Tensor) -> int:
    return int(numbers[rows].max())


def sample_rows(
    logits: Tensor, rows: Tensor, positions: Tensor, *_: Tensor, edits: tuple[Tensor, SamplingState], **options: Any
) -> Tensor:
    """All that the plain tail does on a GPU, by the reference."""
    raw, state = edits
    metadata, longest = state.metadata(rows, positions), partial(largest, rows)
    needs = Needs(
        mask=True, penalties=True, min_p=True, num_candidates=state.vocab_size, num_biased=longest(state.num_biased),
        num_stop_ids=longest(state.num_stop_ids), num_bad_words=longest(state.num_bad_words),
        longest_bad_word=longest(state.bad_ends),
    )  # fmt: skip
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

    def noting(num_tokens: int, rows: list[int], fill: Any) -> Sampled:
        noted.append((num_tokens, len(rows)))
        return replay(num_tokens, rows, fill)

    tails.replay = noting  # type: ignore[method-assign, assignment]
    return noted


def history(seed: int) -> Asked:
    """Masked and plain requests of all kinds and lengths."""
    draw = random.Random(seed)
    asked: Asked = []
    for i in range(11):
        options: dict[str, Any] = {"seed": i, "max_tokens": draw.randrange(1, 40)}
        options |= draw.choice([{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.7}])
        options |= draw.choice([{}, {}, {"presence_penalty": 0.7, "top_k": 30}, {"logprobs": draw.randrange(3)}])
        options |= draw.choice([{}, {}, {"logit_bias": {i: draw.uniform(-9, 9) for i in range(0, 4000, 7)}}])
        options |= draw.choice([{}, {}, {"bad_words": ["the", "a", "Tom", "and the"]}])
        options["allowed_token_ids"] = draw.choice([None, None, [0, *range(20, 4000, 2)]])
        if draw.random() < 0.6:
            options["structured_outputs"] = KINDS[draw.choice(["json", "regex", "choice"])]
        if options["allowed_token_ids"] is not None and options.get("structured_outputs") is not None:
            options["structured_outputs"] = StructuredOutputsParams(regex="[A-Za-z ]{9,30}")
        if options.get("structured_outputs") is None:
            options |= draw.choice(
                [{}, {"min_tokens": options["max_tokens"] // 2, "stop_token_ids": range(0, 4000, 50)}]
            )
        prompt = STORIES[i][: draw.randrange(1, 50)]
        asked.append((prompt, SamplingParams(**options)))
    return asked


def generate(llm: LLM, asked: Asked) -> list[RequestOutput]:
    return llm.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)


def answers(found: list[RequestOutput]) -> list[Any]:
    """Tokens, why they end, and log-probabilities bit for bit."""
    choices = [choice for output in found for choice in output.outputs]
    return [(c.token_ids, c.finish_reason, c.stop_reason, c.logprobs) for c in choices]


def same_with_and_without_tails(path: Path, seeds: range, **options: Any) -> list[list[RequestOutput]]:
    """Run histories with recorded tails. Without these, but with all else recorded, they give the same to the bit."""
    with LLM(path, **options) as llm:
        runner: ModelRunner = llm.engine.executor.runner
        assert runner.recorded is not None
        noted = note_tails(llm)
        # Whatever the scratch row has been left with: nobody else notices, and in the end its mask does not count.
        runner.state.mask[-1], runner.state.masked[-1], runner.state.temperature[-1] = 0, 1, torch.nan
        found = [generate(llm, history(seed)) for seed in seeds]
        assert runner.state.masked[-1] == 0
        runner.recorded.tails = None
        assert [answers(generate(llm, history(seed))) for seed in seeds] == list(map(answers, found))
    assert {n for n, _ in noted} >= {3, 5, 7}, "sizes of the ladder, and between them"
    assert any(masked < n for n, masked in noted)
    return found


def num_preemptions(found: list[list[RequestOutput]]) -> int:
    return sum(output.metrics.num_preemptions for outputs in found for output in outputs)


def test_tokens_are_those_of_launched_tails(model: Path) -> None:
    """Requests come and go, are preempted, and stop in steps that are drawn already, so that batches of every size have
    rows with masks, rows without, and rows whose grammar is gone."""
    with kernels(IN_PYTORCH, recorded=True):
        assert num_preemptions(same_with_and_without_tails(model, range(1), **TIGHT, async_scheduling=True)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("config", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
def test_tokens_are_those_of_the_path_without_recordings(model: Path, config: dict[str, Any], overlapped: bool) -> None:
    options, seeds = config | {"async_scheduling": overlapped}, range(1, 4)
    with kernels(IN_PYTORCH, recorded=True):
        found = same_with_and_without_tails(model, seeds, **options)
    assert (num_preemptions(found) > 0) == (config is TIGHT)
    with LLM(model, **options) as plain:  # without these kernels: nothing of the stand-in is its own judge
        assert plain.engine.executor.runner.recorded is None
        assert [ids(generate(plain, history(seed))) for seed in seeds] == list(map(ids, found))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
def test_tokens_on_a_gpu(model: Path, config: dict[str, Any], overlapped: bool) -> None:
    """In CUDA graphs; and all of it launched kernel by kernel."""
    options = config | {"async_scheduling": overlapped, "device": "cuda", "dtype": "float32", "kvcache_block_size": 16}
    options["num_kv_blocks"] //= 2
    found = same_with_and_without_tails(model, range(6), **options)
    with LLM(model, **options, enforce_eager=True) as plain:
        assert [ids(generate(plain, history(seed))) for seed in range(6)] == list(map(ids, found))


@pytest.mark.gpu
def test_a_tail_on_a_gpu_is_one_launch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the copies of masks and tokens."""
    calls: list[dict[str, int]] = []
    draw = ModelRunner.draw

    def traced(self: ModelRunner, computed: Any, masks: StepMasks | None = None) -> Any:
        if computed.tails is None or masks is None or len(masks.keys) < 5:
            return draw(self, computed, masks)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            output = draw(self, computed, masks)
        calls.append({event.key: event.count for event in profiler.key_averages()})
        return output

    structure = KINDS["regex"]
    params = [SamplingParams(structured_outputs=structure, seed=i, max_tokens=20) for i in range(5)]
    with LLM(model, device="cuda", dtype="bfloat16", num_kv_blocks=60, max_num_seqs=7, max_model_len=160) as llm:
        llm.generate(STORIES[:5], params, use_tqdm=False)
        monkeypatch.setattr(ModelRunner, "draw", traced)
        llm.generate(STORIES[:5], params, use_tqdm=False)
    assert calls
    for found in calls:
        compute = {key for key in found if key.startswith("aten::")}
        assert compute <= {
            "aten::" + name
            for name in ("copy_", "slice", "as_strided", "to", "_to_copy", "empty_strided", "view", "reshape", "detach",
                         "select", "narrow", "alias", "resolve_conj", "resolve_neg", "lift_fresh")
        }  # fmt: skip


def test_each_mask_is_with_its_row_and_the_rest_is_scratch() -> None:
    """However a step before has filled the buffers."""
    token_ids, width = torch.zeros(7, 10, dtype=torch.int32), 3
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def step(numbers: Tensor) -> Sampled:
        size = numbers.shape[1]
        return Sampled(numbers[0], numbers[2] + 1, torch.zeros(size, dtype=torch.int64), torch.zeros(size, 1), None)

    def tail(numbers: Tensor, rows: Tensor, masks: Tensor) -> Sampled:
        seen.append((numbers.clone(), rows.clone(), masks.clone()))
        return step(numbers)

    decodes = DecodeSteps(StepSizes([1, 2, 4, 6, 12], [], 12, 99, []), token_ids, step, record_nothing, copies=3)
    tails = MaskedTails(decodes, tail, width, record_nothing)
    assert tails.sizes == [1, 2, 4, 6], "a step with masks has no two tokens of a sequence"
    for i, (order, masked) in enumerate([([5, 2, 0, 3, 1, 4], [5, 0, 3]), ([3, 0, 5], [3, 0, 5]), ([2, 4], [4])] * 2):
        work = [Scheduled(7, row, 2 * row + i, 1, sample=True, new_blocks=()) for row in order]
        assert tails.fit(work) and decodes.replay(work) is not None
        masks = np.arange(i, i + width * len(masked), dtype=np.int32).reshape(-1, width)
        drawn = tails.replay(len(order), masked, partial(np.copyto, src=masks))
        assert drawn.rows.tolist() == order and drawn.positions.tolist() == [s.start + 1 for s in work]
        numbers, rows, given = seen[-1]
        assert numbers[0, : len(order)].tolist() == order
        assert rows.tolist() == masked + [6] * ({6: 6, 3: 4, 2: 2}[len(order)] - len(masked))
        assert np.array_equal(given[: len(masked)], masks)
    for other in (Scheduled(7, 0, 0, 2, True, ()), Scheduled(7, 0, 0, 1, False, ())):
        assert not tails.fit([*work, other])


def test_masks_are_told_by_key() -> None:
    """A sequence that is over has none; another has `allowed_token_ids`, too."""
    state = SamplingState(torch.zeros(5, 8, dtype=torch.int32), 40, ())
    words = StructuredOutputsParams(regex="a")
    state.install([3], [SamplingParams(allowed_token_ids=[1, 39], structured_outputs=words, seed=0)], [1])
    sampling = [Scheduled(key, row, 1, 1, True, ()) for key, row in ((10, 3), (11, 0), (12, 2), (13, 1))]
    masks = np.array([packed(ids, 40) for ids in ([1, 2], [39, 38])])
    told = StepMasks([10, 13], 2, partial(np.copyto, src=masks))
    every = masks_of_tokens(told, sampling, np.array([True, False, True, True]), state)
    assert np.array_equal(every, [packed([1], 40), packed(range(64), 64), packed([38, 39], 40)])
    rows, fill = masks_of_rows(told, sampling, state)
    assert rows == [3, 1]
    fill(found := np.empty_like(masks))
    assert np.array_equal(found, [packed([1], 40), packed([38, 39], 40)])


@pytest.mark.slow
def test_the_kernels_of_a_gpu_draw_the_same_with_padding() -> None:
    """In Triton's interpreter: rows with and without masks, some of them filtered or edited, behind them padding whose
    logits are NaN, in each dtype. The launched path for the masked rows alone is the judge."""
    pytest.importorskip("triton")
    from nanovllm.kernels.fused import edits, sample

    fused = FusedKernels(
        sample_rows=sample.sample_rows, edit_logits=edits.edit_logits, restore_logits=edits.restore_logits
    )
    vocab, size, structure = 1200, 8, StructuredOutputsParams(regex="a")
    draw = random.Random(5)
    for dtype in (torch.float32, torch.bfloat16):
        order, masked = draw.sample(range(7), 6), sorted(draw.sample(range(6), 3))
        params = [
            SamplingParams(
                temperature=draw.choice([0.0, 1.0]), top_p=draw.choice([1.0, 0.8]), seed=i,
                presence_penalty=draw.choice([0.0, 2.0]), logit_bias=draw.choice([None, {5: 3.0}]),
                structured_outputs=structure if i in [order[n] for n in masked] else None,
            )
            for i in range(7)
        ]  # fmt: skip
        logits = torch.randn(size, vocab, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
        logits[6:] = torch.nan
        rows, positions = torch.tensor([*order, 7, 7]), torch.tensor([4, 6, 3, 5, 4, 4, 1, 1])
        words = [packed(draw.sample(range(vocab), draw.choice([1, 30, 600])), vocab) for _ in masked]
        sampling = [Scheduled(n, row, 3, 1, True, ()) for n, row in enumerate(order)]
        masks = StepMasks([*masked], len(words), partial(np.copyto, src=np.array(words)))
        found = []
        with kernels(fused, recorded=False):
            for replayed in (False, True):
                known = torch.arange(64, dtype=torch.int32).reshape(8, 8) % 50
                state = SamplingState(known, vocab, (), in_kernels=True)
                state.install(range(7), params, [2] * 7)
                tails, own = Sampler(state, Group(0, 1, torch.device("cpu"))), logits.clone()
                plain = tails.sample(own, rows, positions)
                if replayed:
                    targets, fill = masks_of_rows(masks, sampling, state)
                    padded = np.full((size, len(words[0])), 3, np.int32)
                    fill(padded[: len(targets)])
                    places = torch.tensor(targets + [7] * (size - len(targets)))
                    tokens = tails.sample_masked(own, rows, positions, places, torch.from_numpy(padded))[:6]
                else:
                    step = Sampled(rows, positions, plain, own, None).at(slice(6))
                    tokens, _ = tails.finish(step, sampling, state.needs(order), None, masks)
                assert torch.equal(own.nan_to_num(7), logits.nan_to_num(7)), "raw logits for log-probabilities"
                found.append((tokens.tolist(), known[:7].tolist(), plain.tolist()))
        assert found[0] == found[1]
        for n, own_words in zip(masked, words, strict=True):
            assert found[0][0][n] in np.flatnonzero(np.unpackbits(own_words.view(np.uint8), bitorder="little"))
