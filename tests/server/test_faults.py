"""CASES A2: an exception in the loop reaches everyone who waits, and health says so; a bad row fails alone."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from nanovllm import AsyncLLM, RequestOutput
from nanovllm.engine.plan import StepPlan
from nanovllm.stream import EngineDead
from tests.engine.helpers import BOTH
from tests.server.harness import check_nothing_left, greedy, read, serving, tokens
from tests.server.shadow import Gate, executor, shadow_llm
from tests.server.waiting import until


def break_step(llm: AsyncLLM, after: int) -> None:
    """The step that follows `after` more raises, once."""
    step, left = llm.llm.engine.step, [after]

    def broken() -> list[RequestOutput]:
        left[0] -= 1
        if left[0] == -1:
            raise RuntimeError("out of luck")
        return step()

    llm.llm.engine.step = broken


def break_submit(llm: AsyncLLM, after: int) -> None:
    """The same inside a step, when the plan is made and the queues have moved on."""
    submit, left = executor(llm).submit, [after]

    def broken(plan: StepPlan) -> Any:
        left[0] -= 1
        if left[0] == -1:
            raise RuntimeError("out of luck")
        return submit(plan)

    setattr(executor(llm), "submit", broken)  # noqa: B010


@BOTH
@pytest.mark.parametrize("plant", [break_step, break_submit])
def test_everyone_who_waits_is_told_and_so_is_whoever_comes_later(
    plant: Callable[[AsyncLLM, int], None], asynchronous: bool
) -> None:
    async def main() -> None:
        llm = shadow_llm(async_scheduling=asynchronous, max_num_seqs=2)
        plant(llm, 4)
        gate = Gate(llm)
        readers = [asyncio.create_task(tokens(llm.generate([i, 1], greedy(max_tokens=100)))) for i in range(3)]
        await gate.let(3)
        llm.check_health()
        start = time.monotonic()
        gate.open()
        for ended in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(ended, EngineDead) and isinstance(ended.__cause__, RuntimeError)
            assert "out of luck" in str(ended)
        assert time.monotonic() - start < 5
        with pytest.raises(EngineDead, match="out of luck"):
            llm.check_health()
        with pytest.raises(EngineDead, match="out of luck"):
            llm.generate([1, 2], greedy())
        await until(lambda: not llm._thread.is_alive())
        check_nothing_left(llm)
        assert executor(llm).closed
        await llm.shutdown()
        with pytest.raises(EngineDead, match="out of luck"):
            llm.check_health()

    asyncio.run(main())


def test_what_was_finished_before_the_fault_is_delivered() -> None:
    async def main() -> None:
        llm = shadow_llm()
        gate = Gate(llm)
        short, long = (llm.generate([1, 2], greedy(max_tokens=n)) for n in (2, 50))
        await gate.let(3)
        break_step(llm, 0)
        gate.open()
        await until(lambda: not llm._thread.is_alive())
        assert len(await tokens(short)) == 2
        with pytest.raises(EngineDead):
            await read(long)

    asyncio.run(main())


@BOTH
def test_a_bad_row_fails_alone(asynchronous: bool) -> None:
    async def main() -> None:
        async with serving(async_scheduling=asynchronous) as llm:
            prompts = [[i, 1, 2] for i in range(3)]
            expected = [await tokens(llm.generate(prompt, greedy(max_tokens=20))) for prompt in prompts]
            gate = Gate(llm)  # until the row is spoilt
            streams = [llm.generate(prompt, greedy(max_tokens=20)) for prompt in prompts]
            spoil(llm, streams[1]._request.key, at_output=5)
            gate.open()
            first, bad, last = await asyncio.gather(*map(read, streams))
            assert bad[0].finish_reason == "error" and bad[0].token_ids == expected[1][:5]
            assert [first[0].token_ids, last[0].token_ids] == [expected[0], expected[2]]
            llm.check_health()
            assert await tokens(llm.generate(prompts[1], greedy(max_tokens=20))) == expected[1]

    asyncio.run(main())


def spoil(llm: AsyncLLM, request_id: str, at_output: int) -> None:
    """Make the logits of a request not finite for one of its outputs."""
    submit = executor(llm).submit

    def spoiled(plan: StepPlan) -> Any:
        handle = submit(plan)
        for key in handle.tokens:
            seq = llm.llm.engine.scheduler.sequences.get(key)
            known = len(executor(llm).tokens.get(key, [])) - 1  # without the token that was just sampled
            if seq is not None and seq.request_id == request_id and known - seq.num_prompt_tokens == at_output:
                handle.tokens[key] = [-1], None
        return handle

    setattr(executor(llm), "submit", spoiled)  # noqa: B010
