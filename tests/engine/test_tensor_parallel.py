"""The engine on several ranks is the engine on one: tokens, log-probabilities, and who fails (CASES T2, T3).

The same tests run with gloo on the CPU (2 ranks; in the slow tier also 4, more than the models have key/value heads)
and with NCCL on as many GPUs. A rank takes seconds to start, so engines are shared where that is possible.
"""

import asyncio
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, AsyncLLM, SamplingParams
from tests import oracle
from tests.engine.ranks import (
    BAD,
    MANY,
    MANY_PROMPTS,
    ROOMY,
    STORY_MODEL,
    TINY,
    Starter,
    check_equal,
    check_idle,
    engine_checkpoints,
    executor_of,
    generate,
    pids_of,
    poisoned_checkpoint,
    start,
    tokens,
)
from tests.stages.ranks import check_gone
from tests.stages.requests import PROMPTS, random_prompts, story_prompts
from tests.weights import random_qwen2

__all__ = ["engine_checkpoints", "start"]  # fixtures
BOTH = pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])


def greedy(max_tokens: int) -> Any:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def poisoned(engine_checkpoints: Path) -> Path:
    return poisoned_checkpoint(engine_checkpoints)


@pytest.fixture(scope="module")
def alone(poisoned: Path) -> Iterator[LLM]:
    """One rank, with room for everybody."""
    with LLM(poisoned, device="cpu", skip_tokenizer_init=True, **ROOMY) as llm:
        yield llm


def test_stories_are_hf_s_with_their_text(start: Starter) -> None:
    """The embedded model: tied embeddings, 4 heads over 2 key/value heads."""
    llm = start.shared(STORY_MODEL, skip_tokenizer_init=False, async_scheduling=True, **ROOMY)
    prompts = story_prompts(STORY_MODEL)[:3]
    outputs = generate(llm, prompts, greedy(24))
    oracle.check_greedy(STORY_MODEL, prompts, tokens(outputs), greedy(24))
    assert llm.tokenizer is not None
    assert [o.outputs[0].text for o in outputs] == [llm.tokenizer.decode(ids) for ids in tokens(outputs)]
    assert len({token for output in tokens(outputs) for token in output}) > 25
    check_idle(llm)


@BOTH
def test_tensor_parallel_t2_t3_awkward_and_in_tight_quarters(start: Starter, poisoned: Path, overlapped: bool) -> None:
    """Chunks, preemption, resumption and a warm prefix cache on a model where padding would win if it could."""
    llm = start.shared(poisoned, async_scheduling=overlapped, **TINY)
    outputs = generate(llm, PROMPTS, greedy(16))
    oracle.check_greedy(poisoned, PROMPTS, tokens(outputs), greedy(16))
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    cold, warm = (generate(llm, PROMPTS[-1:], greedy(16))[0] for _ in range(2))
    assert warm.num_cached_tokens >= 20 and tokens([cold]) == tokens([warm]) == tokens(outputs[-1:])
    check_idle(llm)
    assert len({token for output in tokens(outputs) for token in output}) > 20


@BOTH
def test_draws_and_logprobs_are_those_of_one_rank(start: Starter, poisoned: Path, alone: LLM, overlapped: bool) -> None:
    """With every option, and preempted as they are drawn."""
    llm = start.shared(poisoned, async_scheduling=overlapped, **TINY)
    expected = generate(alone, MANY_PROMPTS, MANY)
    found = generate(llm, MANY_PROMPTS, MANY)
    check_equal(found, expected)
    assert sum(output.metrics.num_preemptions for output in found) > 0
    assert len({tuple(ids) for ids in tokens(found)}) == len(MANY) + 1


@BOTH
def test_a_request_that_is_not_a_number_fails_alone(start: Starter, poisoned: Path, overlapped: bool) -> None:
    llm = start.shared(poisoned, async_scheduling=overlapped, **TINY)
    prompts = [PROMPTS[2], [1, BAD, 2], PROMPTS[3], [BAD]]
    more = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, repetition_penalty=1.0001)
    for params in greedy(6), more:
        outputs = generate(llm, prompts, params)
        assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length", "error"]
        assert [len(o.outputs[0].token_ids) for o in outputs] == [6, 0, 6, 0]
    fine = [tokens(outputs)[0], tokens(outputs)[2]]
    assert fine == tokens(generate(llm, prompts[0::2], greedy(6)))
    check_idle(llm)


@pytest.mark.slow
@BOTH
def test_qwen2_with_an_odd_vocabulary(start: Starter, engine_checkpoints: Path, overlapped: bool) -> None:
    path = random_qwen2(engine_checkpoints, vocab_size=511)
    with start(path, async_scheduling=overlapped, **ROOMY) as llm:
        outputs = generate(llm, PROMPTS[:3], greedy(20))
    oracle.check_greedy(path, PROMPTS[:3], tokens(outputs), greedy(20))


@pytest.mark.slow
@BOTH
def test_tensor_parallel_t2_random_rounds(start: Starter, poisoned: Path, alone: LLM, overlapped: bool) -> None:
    """Call after call on one engine: shared beginnings, evictions, ends of all kinds, aborts; as on one rank."""
    llm = start.shared(poisoned, async_scheduling=overlapped, **TINY)
    rng = random.Random(0)
    beginnings = random_prompts(4, 8, 11)
    for _ in range(40):
        prompts = [
            rng.choice(beginnings) + random_prompts(rng.randint(1, 8), seed=rng.randrange(99))[0] for _ in range(5)
        ]
        params = [
            SamplingParams(
                temperature=rng.choice((0.0, 0.0, 1.0)), max_tokens=rng.randint(1, 16), seed=rng.randint(0, 99),
                ignore_eos=rng.random() < 0.5, top_k=rng.choice((0, 0, 5)), logprobs=rng.choice((None, None, 1)),
            )
            for _ in prompts
        ]  # fmt: skip
        check_equal(generate(llm, prompts, params), generate(alone, prompts, params))
        check_idle(llm)
        if rng.random() < 0.3:  # some of the next ones are still there when all are given up
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
                llm.engine.add_request(f"given up {i}", prompt, p)
            for _ in range(rng.randint(0, 6)):
                llm.engine.step()
            llm.engine.abort_request("given up 1")
            llm.engine.step()
            llm.engine.abort_all()
            check_idle(llm)


def test_async_llm_on_several_ranks(start: Starter, poisoned: Path, alone: LLM) -> None:
    """Its step loop runs in another thread than the one that started the ranks."""
    config: dict[str, Any] = {"device": start.device, "dtype": "float32", "skip_tokenizer_init": True} | TINY

    async def main() -> tuple[list[list[int]], list[int], list[str]]:
        async with AsyncLLM(poisoned, tensor_parallel_size=start.size, **config) as llm:
            pids = pids_of(llm.llm)

            async def read(prompt: list[int], params: SamplingParams) -> list[int]:
                stream = llm.generate({"prompt_token_ids": prompt}, params)
                return [token async for delta in stream for token in delta.outputs[0].token_ids]

            results = await asyncio.gather(*map(read, MANY_PROMPTS[:3], MANY[:3]))
            names = [thread.name for thread in threading.enumerate()]
        return results, pids, names

    results, pids, names = asyncio.run(main())
    assert results == tokens(generate(alone, MANY_PROMPTS[:3], MANY[:3]))
    assert "nanovllm-step-loop" in names and len(pids) == start.size - 1
    check_gone(pids, [])


def test_each_rank_has_its_share(start: Starter, poisoned: Path) -> None:
    """Of the parameters and of the keys and values; and what no rank can cut, whole."""
    llm = start.shared(poisoned, async_scheduling=True, **TINY)
    runner = executor_of(llm).runner
    with LLM(poisoned, device="cpu", skip_tokenizer_init=True, **TINY) as other:
        whole: Any = other.engine.executor
        total = sum(p.numel() for p in whole.runner.target.model.parameters())
        cuttable = sum(p.numel() for name, p in whole.runner.target.model.named_parameters() if "norm" not in name)
        assert (
            runner.target.kv_cache[0].shape == whole.runner.target.kv_cache[0].shape
        )  # the one key/value head, of which each has a copy
    ours = sum(p.numel() for p in runner.target.model.parameters())
    assert ours < total - cuttable * (1 - 1 / start.size) + 0.05 * total


# --- half precision ---


@pytest.mark.parametrize("size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_stories_in_half_precision(dtype: torch.dtype, eager: bool, size: int) -> None:
    """20 openings x 64 tokens in chunks of 100, by the oracle's rule for half precision."""
    prompts, params = story_prompts(STORY_MODEL), greedy(64)
    config: dict[str, Any] = {"num_kv_blocks": 64, "max_num_batched_tokens": 100, "enforce_eager": eager}
    name = str(dtype).removeprefix("torch.")
    with LLM(STORY_MODEL, device="cuda", dtype=name, tensor_parallel_size=size, **config) as llm:
        assert (executor_of(llm).runner.recorded is None) == eager
        outputs = generate(llm, prompts, params)
        check_idle(llm)
    oracle.check_greedy_half(STORY_MODEL, prompts, tokens(outputs), params, dtype, "cuda")
