"""CASES B3 through the step loop: aborted in whatever state, nothing follows, nothing leaks, others do not notice."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from nanovllm import AsyncLLM, RequestOutput
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.stream import RequestAborted, Stream
from tests.engine.helpers import BOTH
from tests.server.harness import greedy, serving, tokens
from tests.server.shadow import Gate
from tests.server.waiting import until

PROMPT = [i % 7 for i in range(48)]  # three blocks
BESIDE = [7, 6, 5]
Reached = Callable[[list[Sequence]], bool]

# state: when it is reached, and the engine and parameters that it takes
STATES: dict[str, tuple[Reached, dict[str, Any], dict[str, Any]]] = {
    "not looked at yet": (lambda seqs: True, {}, {}),
    "waiting": (lambda seqs: bool(seqs) and seqs[0].status is SequenceStatus.WAITING, {"max_num_seqs": 1}, {}),
    "between chunks": (
        lambda seqs: bool(seqs) and 0 < seqs[0].num_computed < len(PROMPT),
        {"max_num_batched_tokens": 16},
        {},
    ),
    "decoding": (lambda seqs: bool(seqs) and seqs[0].num_output_tokens > 2, {}, {}),
    "n=2": (lambda seqs: len(seqs) == 2 and all(seq.num_output_tokens > 2 for seq in seqs), {}, {"n": 2}),
    # Its second choice waits for the first to compute the prompt, and is nowhere in the scheduler yet.
    "n=2, one held": (
        lambda seqs: len(seqs) == 1 and 0 < seqs[0].num_computed < len(PROMPT),
        {"max_num_batched_tokens": 16},
        {"n": 2},
    ),
    "preempted": (
        lambda seqs: bool(seqs) and seqs[0].num_preemptions > 0 and seqs[0].status is SequenceStatus.WAITING,
        {"num_kv_blocks": 6},
        {"max_tokens": 40},
    ),
    # The abort lies in the inbox while the step runs that finishes the request.
    "in its last step": (lambda seqs: bool(seqs) and seqs[0].num_output_tokens == 19, {}, {}),
}


async def by_id(llm: AsyncLLM, stream: Stream) -> None:
    for request_id in (stream.request_id, stream.request_id, "nobody"):
        llm.abort(request_id)


async def by_closing(llm: AsyncLLM, stream: Stream) -> None:
    await stream.aclose()
    await stream.aclose()


async def by_cancelling(llm: AsyncLLM, stream: Stream) -> None:
    async def read_on() -> None:
        async for _ in stream:
            pass

    reading = asyncio.create_task(read_on())
    await until(lambda: not stream._request.newest and not stream._request.news.is_set())
    await asyncio.sleep(0.005)
    reading.cancel()
    (ended,) = await asyncio.gather(reading, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError)


@BOTH
@pytest.mark.parametrize("abort", [by_id, by_closing, by_cancelling], ids=lambda way: way.__name__)
@pytest.mark.parametrize("state", STATES)
def test_aborted_in_any_state(
    state: str, abort: Callable[[AsyncLLM, Stream], Awaitable[None]], asynchronous: bool
) -> None:
    reached, config, params = STATES[state]

    async def main() -> None:
        async with serving(async_scheduling=asynchronous, **config) as llm:
            expected = await tokens(llm.generate(BESIDE, greedy(max_tokens=60)))
            gate = Gate(llm)
            beside = asyncio.create_task(tokens(llm.generate(BESIDE, greedy(max_tokens=60))))
            await until(lambda: len(llm._added) == 1)
            stream = llm.generate(PROMPT, greedy(**({"max_tokens": 20} | params)))
            key = stream._request.key
            seqs = llm.llm.engine.scheduler.sequences
            await gate.go(lambda: reached([seq for seq in seqs.values() if seq.request_id == key]))
            await abort(llm, stream)
            await gate.let(3)  # a step that was about to run, one in flight, and one more
            assert key not in llm._added and all(seq.request_id != key for seq in seqs.values())
            await check_over(stream, told=abort is by_id and state != "in its last step")
            assert not beside.done()
            gate.open()
            assert await beside == expected

    asyncio.run(main())


async def check_over(stream: Stream, told: bool) -> None:
    """Nothing follows but what was there already; a reader who did not leave himself is told."""
    left: list[RequestOutput] = []
    try:
        left += [delta async for delta in stream]
    except RequestAborted:
        assert told or stream._request.error is not None
    else:
        assert not told and (not left or left[-1].finished)


@BOTH
def test_aborted_after_the_end(asynchronous: bool) -> None:
    async def main() -> None:
        async with serving(async_scheduling=asynchronous) as llm:
            stream = llm.generate(PROMPT, greedy(), request_id="a")
            await until(lambda: not llm._requests)
            llm.abort("a")
            assert len(await tokens(stream)) == 8
            llm.abort("a")
            await stream.aclose()
            assert len(await tokens(llm.generate(PROMPT, greedy(), request_id="a"))) == 8

    asyncio.run(main())
