"""What HTTP, Ray Serve, or a caller of `AsyncLLM` adds to the engine's own time, measured without a model.

The fields of `nanovllm.simulate.costs.ServerTime` are measured with the fake executor of mock.py in place of a model.
So a machine without a GPU can measure them too, each in some seconds.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import time
from typing import Any

from benchmarks.serving import mock
from benchmarks.serving.started import started
from nanovllm.sampling_params import SamplingParams

# The loads at which the costs of a step and of a token are measured. Steps of the server take 1.8 and 4.2 ms then, as
# on a busy GPU.
STREAMS, RATE = (8, 32), 10_000  # of the server, and tokens per second
CALLERS = 4, 24  # of `AsyncLLM`
STEP, PAUSE = 0.001, 0.03  # seconds of a step, and between the requests whose first tokens are measured
PROMPT = list(range(1, 201))  # as long as those of speed.py on average


async def first_tokens(port: int, number: int, step_seconds: float, pause: float = 0.0) -> float:
    """Median of the seconds from a request to its first token, less those of its step. Before each request there is a
    pause of this length on average. Connections are opened before the clock starts."""
    content = json.dumps({"prompt": PROMPT, "max_tokens": 2, "stream": True, "ignore_eos": True}).encode()
    found = []
    for _ in range(number):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        start, read = time.perf_counter(), b""
        writer.write(f"{mock.HEAD}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        while b'"text":' not in read:
            read += await reader.read(2**16)
        found.append(time.perf_counter() - start - step_seconds)
        while b"[DONE]" not in read:
            read += await reader.read(2**16)
        writer.close()
    return statistics.median(found)


async def first_tokens_in_traffic(port: int, number: int) -> float:
    """As `first_tokens`, beside a stream, less the time that the engine takes with asynchronous scheduling: half of a
    step on average until the request is taken in, a step that is submitted by then, and its own."""
    reader = mock.Reader(1000)
    await asyncio.get_running_loop().create_connection(lambda: reader, "127.0.0.1", port)
    await asyncio.sleep(10 * PAUSE)
    late = []  # the fake sleeps for its steps, and wakes late; a GPU is waited for awake
    for _ in range(number):
        start = time.perf_counter()
        time.sleep(STEP)
        late.append(time.perf_counter() - start - STEP)
    steps = 1.5 * (STEP + 1 / RATE) + STEP + 2 / RATE
    found = await first_tokens(port, number, steps + statistics.median(late), PAUSE)
    reader.transport.abort()
    return found


def server_time(seconds: float) -> dict[str, float]:
    """What HTTP adds: to a request, until it has its first token, in seconds of the clock; to a step and to a token, in
    seconds of the CPU, at two loads that leave the server time to spare. Nearly all that the engine's process does for
    a step takes as long for few tokens as for many. The API processes of a server share its tokens."""
    from nanovllm.server.serve import num_api_servers

    with mock.serving(RATE, step=STEP) as (popen, port):
        pids = mock.children(popen.pid)
        request = min(asyncio.run(first_tokens_in_traffic(port, 20)) for _ in range(3))  # others may want the processor
        loads = [(streams, added(port, pids, streams, seconds)) for streams in STREAMS]
    engine_step, engine_token = line(*((streams, engine) for streams, (engine, _) in loads))
    api_step, api_token = line(*((streams, api) for streams, (_, api) in loads))
    return {
        "request": max(0.0, request - api_step - api_token),
        "engine_token": engine_token,
        "api_token": api_token / num_api_servers(None),
        "engine_step": engine_step,
        "api_step": api_step,
    }


def ray_time(port: int, seconds: float) -> dict[str, float]:
    """What Ray Serve and HTTP add, by the names of `server_time`. The application and the step loop are threads of one
    process, the replica: what the application does for a token keeps the step loop waiting. The proxy has the place of
    the API process. There is one stream, about as fast as the story model. Several streams would share some of the
    time."""
    rate = 100
    with started([*mock.SERVER, "--rate", str(rate), "--ray", str(port)], stderr=subprocess.STDOUT) as (popen, _):
        request = asyncio.run(first_tokens(port, 20, 1 / rate))
        engine, api = added(port, mock.ray_processes(popen.pid), 1, seconds)
    return {"request": max(0.0, request), "engine_token": max(0.0, engine), "api_token": api}


def added(port: int, pids: list[int], streams: int, seconds: float) -> tuple[float, float]:
    """Seconds of the CPU per step, in which each stream has a token: of the engine's process without the engine itself,
    and of the processes between it and the clients. pids: the engine's process first."""
    asked = argparse.Namespace(streams=streams, max_tokens=1000, seconds=seconds)
    long = asyncio.run(mock.measure(port, pids, asked))
    engine, api = (1e-6 * streams * sum(long[f"{who}_us_per_token"]) for who in ("engine", "api"))
    return engine - mock.engine_alone(streams), api


def line(few: tuple[int, float], many: tuple[int, float]) -> tuple[float, float]:
    """Seconds per step and per token, none below 0. few, many: tokens of a step, and the seconds that it takes."""
    token = max(0.0, (many[1] - few[1]) / (many[0] - few[0]))
    return max(0.0, few[1] - few[0] * token), token


async def async_time(number: int = 30, num_tokens: int = 400) -> dict[str, float]:
    """What `AsyncLLM` adds, by the names of `server_time`. Its callers and the step loop are threads of one process, of
    which one runs at a time. So what callers do for a token keeps the step loop waiting, too. In each step Python's
    lock goes from one thread to the other and back. Where the device takes no time, the two threads alone set the pace.
    The engine's own share is taken off. What a request adds is measured as in traffic: beside streams, after a pause,
    before its step and after it. Each time is measured with few callers and with many: the line through the two has a
    part per step and a part per token."""
    from nanovllm import AsyncLLM

    async def answer(num_tokens: int, prompt: list[int]) -> tuple[float, float]:
        """Seconds until the request is queued, and from the end of its first step until it has the token."""
        start, late = time.perf_counter(), 0.0
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        stream = llm.generate({"prompt_token_ids": prompt}, params)
        queued = time.perf_counter() - start
        async for _ in stream:
            late = late or time.perf_counter() - engine.executor.last_end
        return queued, late

    async def in_traffic(streams: int) -> tuple[float, float]:
        engine.executor = mock.FakeExecutor(1e12, STEP)
        running = [asyncio.create_task(answer(2000, [1] * 16)) for _ in range(streams)]
        found = []
        for _ in range(number):
            await asyncio.sleep(PAUSE * random.uniform(0.5, 1.5))
            found.append(await answer(2, PROMPT))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        queued, late = map(statistics.median, zip(*found, strict=True))
        return queued, late

    async def step_seconds(streams: int) -> float:
        engine.executor = mock.FakeExecutor(1e12)
        found = []
        for _ in range(5):
            start = time.perf_counter()
            await asyncio.gather(*[answer(num_tokens, [1] * 16) for _ in range(streams)])
            found.append((time.perf_counter() - start) / num_tokens)
        return min(found) - mock.engine_alone(streams)

    options: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 1024, "async_scheduling": True}
    async with AsyncLLM(mock.EMBEDDED_MODEL, skip_tokenizer_init=True, **options) as llm:
        engine: Any = llm.llm.engine
        real = engine.executor
        few, many = [(n, *await in_traffic(n)) for n in CALLERS]
        step, token = line(*[(n, await step_seconds(n)) for n in CALLERS])
        engine.executor = real
    api_step, api_token = line((few[0], few[2]), (many[0], many[2]))
    # A simulated first token waits for half of the tokens of its step.
    late = {"api_step": api_step, "api_token": 2 * api_token}
    return {"request": few[1], "engine_token": token, "engine_step": step, **late}
