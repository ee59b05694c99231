"""Hundreds of requests at once, many of which are given up: in the end nothing is left of any of them."""

import asyncio
import random
import threading
from typing import Any

import pytest

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.stream import RequestAborted
from tests.server.harness import idle, read
from tests.server.shadow import SMALL, shadow_llm

NUM_REQUESTS = 500


def params_of(i: int, max_tokens: int) -> SamplingParams:
    n = 2 if i % 10 == 3 else 1
    return SamplingParams(temperature=1.0, seed=i, n=n, max_tokens=1 + i * 7 % max_tokens, ignore_eos=True)


def prompt_of(i: int) -> list[int]:
    """Many share a beginning."""
    return [i % 5] * (i % 40) + [i % 7, i % 8]


async def storm(llm: AsyncLLM, seed: int, max_tokens: int) -> dict[int, list[list[int]]]:
    """The tokens of each choice of each request that was not given up: 30% are, at some moment, in some way."""
    draw = random.Random(seed)

    async def request(i: int, wait: float, how: str) -> list[list[int]] | None:
        await asyncio.sleep(wait)
        priority = i % 3
        stream = llm.generate(
            prompt_of(i), params_of(i, max_tokens), f"request {i % 400}-{i // 400}", priority=priority
        )
        if how == "read":
            return [choice.token_ids for choice in await read(stream)]
        if how == "abort":
            asyncio.get_running_loop().call_later(wait / 2, llm.abort, stream.request_id)
            try:
                return [choice.token_ids for choice in await read(stream)]
            except RequestAborted:
                return None
        if how == "cancel":
            try:
                async with asyncio.timeout(wait / 2):
                    return [choice.token_ids for choice in await read(stream)]
            except TimeoutError:
                return None
        async for _ in stream:
            break
        return None

    ways = ["read"] * 7 + ["abort", "cancel", "leave"]
    jobs = [request(i, draw.random() * 0.3, draw.choice(ways)) for i in range(NUM_REQUESTS)]
    outputs = await asyncio.gather(*jobs)
    return {i: output for i, output in enumerate(outputs) if output is not None}


def check_storm(make: Any, max_tokens: int, sample: int) -> None:
    async def main() -> None:
        async with make() as llm:
            outputs = await storm(llm, seed=1, max_tokens=max_tokens)
            await idle(llm, seconds=60)
            assert NUM_REQUESTS * 0.6 < len(outputs) < NUM_REQUESTS
            for i in random.Random(2).sample(sorted(outputs), sample):  # the storm changed nobody's tokens
                alone = await read(llm.generate(prompt_of(i), params_of(i, max_tokens)))
                assert [choice.token_ids for choice in alone] == outputs[i]
            await idle(llm)
            assert len(asyncio.all_tasks()) == 1

    threads = set(threading.enumerate())
    asyncio.run(main())
    assert set(threading.enumerate()) <= threads, "a thread is left over"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_storm_on_the_shadow_engine(asynchronous: bool) -> None:
    """On a pool so small that sequences are preempted all the time."""
    check_storm(lambda: shadow_llm(async_scheduling=asynchronous, num_kv_blocks=16), max_tokens=40, sample=100)


@pytest.mark.slow
def test_a_storm_on_the_embedded_model() -> None:
    check_storm(lambda: AsyncLLM(**(SMALL | {"max_num_seqs": 32})), max_tokens=12, sample=20)
