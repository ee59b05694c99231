"""CASES A1: clients that leave, before the first token and in mid-stream, and what the server makes of it."""

import asyncio
import json
import random
import re
import socket
from typing import Any

import httpx
import pytest

from tests.engine.helpers import BOTH
from tests.server.harness import Served, idle, server
from tests.server.shadow import Gate
from tests.server.waiting import until

ENDLESS = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}


async def begin(served: Served, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request over a bare socket, which can be dropped at any moment."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    writer.write(head.encode() + b"\r\n\r\n" + content)
    await writer.drain()
    return reader, writer


def drop(writer: asyncio.StreamWriter) -> None:
    """Not a word of farewell: the other side gets a reset."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


async def ended(served: Served, reason: str) -> int:
    async with httpx.AsyncClient(base_url=served.url) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    name, label = "vllm:request_success_total{", f'finished_reason="{reason}"'
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name) and label in line)


@BOTH
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("steps", [0, 5], ids=["before the first token", "in the middle"])
def test_a_client_that_leaves_is_forgotten_within_a_few_steps(stream: bool, steps: int, asynchronous: bool) -> None:
    async def main(served: Served) -> None:
        llm = served.llm
        gate = Gate(llm)
        # The first leaves, the second stays; the third leaves and had two prompts with two choices each.
        leaving = await begin(served, ENDLESS | {"prompt": [1, 2], "stream": stream})
        staying = asyncio.create_task(complete(served))
        several = await begin(served, ENDLESS | {"prompt": [[5, 6], [7, 8]], "n": 2, "stream": stream})
        await until(lambda: len(llm._requests) == 4)
        await gate.let(steps)
        if stream and steps:
            assert b'"text"' in await leaving[0].readuntil(b"\n\n")
        for _, writer in leaving, several:
            drop(writer)
        await until(lambda: len(llm._requests) == 1)
        await gate.let(3)
        assert len(llm._added) == 1 and len(llm.llm.engine.scheduler.sequences) == 1
        gate.open()
        assert (await staying).status_code == 200
        await idle(llm)
        await until(lambda: not llm._requests)
        assert await ended(served, "abort") == 3 and await ended(served, "length") == 1

    with server(async_scheduling=asynchronous) as served:
        asyncio.run(main(served))


async def complete(served: Served) -> httpx.Response:
    async with httpx.AsyncClient(base_url=served.url, timeout=30) as http:
        return await http.post("/v1/completions", json=ENDLESS | {"prompt": [3, 4], "max_tokens": 20})


@pytest.mark.slow
def test_a_client_that_does_not_read_holds_up_nobody_and_costs_little() -> None:
    """What it does not take is not piled up: the engine is done long before, and keeps one output for it."""

    async def main(served: Served) -> None:
        _, writer = await begin(served, ENDLESS | {"prompt": [1, 2], "stream": True, "logprobs": 20})
        await until(lambda: bool(served.llm._requests))
        assert (await complete(served)).status_code == 200
        await idle(served.llm, seconds=60)
        writer.close()

    with server() as served:
        asyncio.run(main(served))


@pytest.mark.slow
def test_a_storm_of_five_hundred_clients_of_which_three_in_ten_leave() -> None:
    """The others get the answers that they would get alone, and nothing is left of anybody."""
    draw = random.Random(1)

    async def one(served: Served, i: int, patience: float) -> str | None:
        body = {"prompt": [i % 50 + 1, 9], "max_tokens": 1 + i % 12, "n": 1 + (i % 10 == 3), "stream": i % 2 == 0}
        await asyncio.sleep(i / 500)
        reader, writer = await begin(served, ENDLESS | body)
        if i % 10 in (0, 1, 4):
            await asyncio.sleep(patience)
            drop(writer)
            return None
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head
        length = re.search(rb"content-length: (\d+)", head)
        answer = await (reader.readexactly(int(length[1])) if length else reader.readuntil(b"data: [DONE]\n\n"))
        writer.close()
        return "".join(json.loads(f'"{text}"') for text in re.findall(r'"text":"((?:[^"\\]|\\.)*)"', answer.decode()))

    async def main(served: Served) -> None:
        answers = await asyncio.gather(*(one(served, i, draw.random()) for i in range(500)))
        assert sum(answer is None for answer in answers) == 150
        assert answers[:200] == answers[300:]  # those 300 apart ask for the same
        await idle(served.llm, seconds=60)
        await until(lambda: not served.runner.server_state.tasks)

    with server(max_num_seqs=64, num_kv_blocks=200) as served:
        asyncio.run(main(served))


def test_half_a_request_is_no_request() -> None:
    async def main(served: Served) -> None:
        for sent in b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{":
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(sent)
            await writer.drain()
            drop(writer)
        assert (await complete(served)).status_code == 200

    with server() as served:
        asyncio.run(main(served))


def test_a_shutdown_waits_for_answers() -> None:
    """What SIGTERM does, in one process: no new connection, but those that are open are served to their end."""

    async def main(served: Served) -> None:
        gate = Gate(served.llm)
        staying = asyncio.create_task(complete(served))
        await until(lambda: bool(served.llm._requests))
        served.stop()
        await until(lambda: refused(served))
        gate.open()
        assert len((await staying).json()["choices"][0]["text"]) > 0

    with server() as served:
        asyncio.run(main(served))


def refused(served: Served) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", served.port)) != 0
