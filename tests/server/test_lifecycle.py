"""AsyncLLM's step loop: idle, it costs nothing and starts at once; and it ends in order, or at once."""

import asyncio
import threading
import time
from typing import Any

import pytest

from nanovllm import RequestOutput
from nanovllm.stream import EngineDead, RequestAborted
from tests.server.harness import STORY, greedy, serving, tokens
from tests.server.shadow import Gate, shadow_llm
from tests.server.waiting import until


def test_an_idle_engine_costs_nothing_and_starts_at_once() -> None:
    """It picks a request up within a millisecond: the best of many tries do, whatever else this machine is doing, and
    would not if the loop looked only now and then."""

    async def main() -> None:
        async with serving() as llm:
            delays = []
            add = llm.llm.engine.add_request

            def timed(*arguments: Any) -> None:
                delays.append(time.perf_counter() - arguments[-2])  # before the matcher
                add(*arguments)

            llm.llm.engine.add_request = timed
            for _ in range(20):
                await tokens(llm.generate([1, 2], greedy(max_tokens=1)))
                await asyncio.sleep(0.01)
            assert sorted(delays)[4] < 0.001
            num_steps, step = [0], llm.llm.engine.step

            def counted() -> list[RequestOutput]:
                num_steps[0] += 1
                return step()

            llm.llm.engine.step = counted
            before = time.process_time()
            await asyncio.sleep(0.3)
            assert num_steps[0] == 0 and time.process_time() - before < 0.15

    asyncio.run(main())


# --- the end ---------------------------------------------------------------------------------------------------------


def test_shutdown_drains() -> None:
    async def main() -> None:
        llm = shadow_llm()
        gate = Gate(llm)
        reading = asyncio.create_task(tokens(llm.generate(STORY, greedy(max_tokens=30))))
        await gate.let(2)
        ending = asyncio.create_task(llm.shutdown())
        await until(lambda: llm._refusal is not None)
        with pytest.raises(EngineDead, match="shut down"):
            llm.generate(STORY)
        await gate.let(5)
        assert not ending.done()
        gate.open()
        await ending
        assert len(await reading) == 30

    threads = set(threading.enumerate())
    asyncio.run(main())
    assert set(threading.enumerate()) <= threads


def test_shutdown_aborts_also_after_a_drain_that_takes_too_long() -> None:
    async def main() -> None:
        llm = shadow_llm()
        gate = Gate(llm)
        reading = asyncio.create_task(tokens(llm.generate(STORY, greedy(max_tokens=200))))
        await gate.let(3)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(llm.shutdown(), 0.05)
        with pytest.raises(EngineDead, match="shut down"):
            llm.check_health()
        gate.open()
        await llm.shutdown(drain=False)
        with pytest.raises(RequestAborted, match="shutdown"):
            await reading
        await llm.shutdown()

    threads = set(threading.enumerate())
    asyncio.run(main())
    assert set(threading.enumerate()) <= threads
