"""CASES V6: connections that say nothing, or half of something, cost nobody else anything (and V9: nor do the last)."""

import asyncio
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from nanovllm.server import logs
from tests.server.harness import Served, server
from tests.server.shadow import Gate
from tests.server.test_disconnects import ENDLESS, begin, complete
from tests.server.test_process import ROOT, started
from tests.server.waiting import until

SOON = 0.2  # seconds for a request to come
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
HALVES = {
    "silent": b"",
    "half a head": HEAD,
    "half a body": HEAD + b'Content-Length: 50\r\n\r\n{"prompt": "a"',
    "half a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n20\r\n{",
    "no end of chunks": HEAD + b'Transfer-Encoding: chunked\r\n\r\nd\r\n{"prompt": "a\r\n',
}


@pytest.fixture(scope="module")
def impatient() -> Iterator[Served]:
    with server(shadow=True, app_options={"receive_timeout": SOON}, http_options={"receive_timeout": SOON}) as served:
        yield served


def refused(served: Served) -> dict[str, int]:
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("http_connections_refused_total")]
    return {line.partition('reason="')[2].partition('"')[0]: int(float(line.split()[-1])) for line in found}


class Ear(asyncio.Protocol):
    """Keeps what was heard, also if a reset follows: a server that closes while a piece is on its way sends one."""

    def __init__(self) -> None:
        self.heard, self.closed = b"", asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.heard += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)


async def conversation(served: Served, piece: bytes) -> tuple[bytes, float]:
    """What a server says to this until it closes the connection, and how many seconds that takes."""
    transport, ear = await asyncio.get_running_loop().create_connection(Ear, "127.0.0.1", served.port)
    began = time.perf_counter()
    transport.write(piece)
    await asyncio.wait_for(ear.closed, 20)
    return ear.heard, time.perf_counter() - began


async def drip(served: Served, pieces: list[bytes]) -> tuple[bytes, int]:
    """What a server answers to pieces, six of them in `SOON` seconds, and how many are sent before it closes."""
    transport, ear = await asyncio.get_running_loop().create_connection(Ear, "127.0.0.1", served.port)
    num_sent = 0
    while num_sent < len(pieces) and not ear.closed.done():
        transport.write(pieces[num_sent])
        num_sent += 1
        await asyncio.sleep(SOON / 6)
    await asyncio.wait_for(ear.closed, 20)
    return ear.heard, num_sent


@pytest.mark.parametrize("kind", HALVES)
def test_a_request_that_does_not_come_is_not_waited_for(impatient: Served, kind: str) -> None:
    said, seconds = asyncio.run(conversation(impatient, HALVES[kind]))
    assert SOON * 0.9 < seconds < SOON * 10
    if kind == "silent":
        assert said == b""
    else:
        head, _, body = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head.lower()
        assert json.loads(body)["error"]["type"] == "timeout_error"
    reason = "body_timeout" if "chunk" in kind or "body" in kind else "head_timeout"
    if reason == "head_timeout":
        assert refused(impatient)[reason] >= 1


def test_a_byte_now_and_then_does_not_stop_the_clock(impatient: Served) -> None:
    drops = [HEAD[i : i + 1] for i in range(30)]
    for pieces in drops, [HALVES["half a body"], *[b" "] * 30]:
        said, num_sent = asyncio.run(drip(impatient, pieces))
        assert said.startswith(b"HTTP/1.1 408 ") and num_sent < len(pieces)


@pytest.mark.parametrize("pause", [SOON * 2, pytest.param(6, marks=pytest.mark.slow)])
def test_between_two_requests_a_client_may_think(impatient: Served, pause: float) -> None:
    """Longer than the time for a request, and longer than `httpx` keeps a connection: 5 seconds."""

    async def main() -> None:
        limits = httpx.Limits(keepalive_expiry=60)
        async with httpx.AsyncClient(base_url=impatient.url, timeout=30, limits=limits) as http:
            connections = []
            for _ in range(3):
                assert (await http.get("/health")).status_code == 200
                connections += http._transport._pool.connections
                await asyncio.sleep(pause)
            assert len(connections) == 3 and len(set(map(id, connections))) == 1

    asyncio.run(main())


def test_a_body_that_nobody_wants_is_thrown_away_for_a_while_only() -> None:
    """A client without a key gets its answer, and may not go on sending for ever."""
    options = {"receive_timeout": SOON}
    with server(shadow=True, app_options=options | {"api_keys": ["sesame"]}, http_options=options) as served:
        chunks = [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"5\r\nabcde\r\n"] * 60]
        said, num_sent = asyncio.run(drip(served, chunks))
        assert said.startswith(b"HTTP/1.1 401 ") and num_sent < len(chunks)


@pytest.mark.parametrize(
    "lengths",
    [
        b"Content-Length: 15\r\nTransfer-Encoding: chunked\r\n\r\nf\r\n" + b'{"prompt": "a"}' + b"\r\n0\r\n\r\n",
        b"Content-Length: 15\r\nContent-Length: 3\r\n\r\n" + b'{"prompt": "a"}',
        b"Content-Length: -5\r\n\r\n{}",
        b"Content-Length: 5, 6\r\n\r\n{}",
        b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
    ],
)
def test_a_body_whose_length_is_in_doubt_is_refused_and_so_is_all_that_follows(
    impatient: Served, lengths: bytes
) -> None:
    smuggled = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
    said, _ = asyncio.run(conversation(impatient, HEAD + lengths + smuggled))
    statuses = [line for line in said.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert len(statuses) == 1 and statuses[0].split()[1] in (b"400", b"501")
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_room_is_made_for_those_who_have_something_to_say() -> None:
    async def main(served: Served) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(3)]
        half = await begin(served, ENDLESS | {"prompt": [1, 2]})
        half[1].write(HALVES["half a body"])  # behind a whole request
        for _ in range(30):
            silent.append(await asyncio.open_connection("127.0.0.1", served.port))
            if len(silent) % 10 == 0:
                async with httpx.AsyncClient(base_url=served.url, timeout=5) as http:
                    assert (await http.get("/health")).status_code == 200
        assert (await complete(served)).status_code == 200
        await until(lambda: len(served.runner.server_state.connections) <= 8)
        assert b"HTTP/1.1 200 " in await half[0].readuntil(b"\r\n\r\n")  # it was being served, and was left alone
        for _, writer in [*silent, half]:
            writer.close()
        assert refused(served)["made_room"] >= 20

    with server(shadow=True, http_options={"max_connections": 8}) as served:
        asyncio.run(main(served))


def test_where_all_are_served_the_next_one_is_told_so() -> None:
    async def main(served: Served) -> None:
        gate = Gate(served.llm)
        serving = [asyncio.create_task(complete(served)) for _ in range(2)]
        await until(lambda: len(served.llm._requests) == 2)
        said, seconds = await conversation(served, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1" in said and seconds < 2
        assert "too many connections" in json.loads(said.partition(b"\r\n\r\n")[2])["error"]["message"]
        gate.open()
        assert [(await answer).status_code for answer in serving] == [200, 200]
        assert refused(served) == {"full": 1}

    with server(shadow=True, http_options={"max_connections": 2}) as served:
        asyncio.run(main(served))


@pytest.mark.parametrize("kind", HALVES)
def test_half_a_request_does_not_hold_up_the_end(kind: str) -> None:
    async def main(served: Served) -> float:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(HALVES[kind])
        await until(lambda: bool(served.runner.server_state.connections))
        await asyncio.sleep(0.05)
        served.stop()
        began = time.perf_counter()
        await until(lambda: not served.llm._thread.is_alive(), 20)
        writer.close()
        return time.perf_counter() - began

    with server(shadow=True) as served:
        assert asyncio.run(main(served)) < 5


# --- the log ---------------------------------------------------------------------------------------------------------


def test_a_message_that_comes_again_and_again_is_counted() -> None:
    now = [0.0]
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(logs.NoStorm(lambda: now[0]))
    noisy, access = logging.getLogger("noisy"), logging.getLogger("nanovllm.access")
    for logger in noisy, access:
        logger.addHandler(handler)
    try:
        for now[0] in 0.0, 61.0:
            for i in range(100):
                noisy.warning("client %d sent nonsense", i)
        noisy.warning("something else")
        for _ in range(20):
            access.error("a line")
    finally:
        for logger in noisy, access:
            logger.removeHandler(handler)
    first = [f"client {i} sent nonsense" for i in range(5)]
    again = [f"{first[0]} (and 95 times more before)", *first[1:]]
    assert said == [*first, *again, "something else", *["a line"] * 20]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no ulimit")
def test_a_server_with_few_file_descriptors_lives_through_more_connections_than_it_may_open() -> None:
    """asyncio would try thousands of times to accept one, and log each time."""
    command = f"ulimit -n 256; exec {sys.executable} -m nanovllm.cli serve --port 0 --kv-cache-gib 0.01"
    with started(["sh", "-c", command]) as process:
        url = process.url()

        async def main() -> None:
            port = int(url.rpartition(":")[2])
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(600)]
            for _ in range(5):
                async with httpx.AsyncClient(timeout=10) as http:
                    assert (await http.get(f"{url}/health")).status_code == 200
            for reader, writer in silent[:300]:
                assert await reader.read() == b""
                writer.close()

        asyncio.run(main())
        assert process.end() == 0
        assert len(process.output) < 3000 and "max_connections" in process.output, process.output


# --- V9: what the end of a drain cuts --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_that_outlasts_the_drain_ends_with_an_error_that_a_client_can_read(stream: bool) -> None:
    command = [sys.executable, "-m", "nanovllm.cli", "serve", "--port", "0", "--kv-cache-gib", "0.05"]
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    with started([*command, "--drain-timeout", "1"]) as process:
        url = process.url()
        content = json.dumps(body)
        head = ["curl", "-sS", "-N", "-i", "-H", "Content-Type: application/json", "-d", content]
        client = subprocess.Popen([*head, f"{url}/v1/completions"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        deadline = time.monotonic() + 30
        while 'num_requests_running{engine="0",model_name="story_model"} 1' not in httpx.get(f"{url}/metrics").text:
            assert time.monotonic() < deadline
        assert process.end() == 0
        said, _ = client.communicate(timeout=30)
        lines = said.splitlines()
        if stream:
            assert " 200 " in lines[0] and lines[-2] == "data: [DONE]"
            error = json.loads(lines[-4].removeprefix("data: "))["error"]
        else:
            assert " 503 " in lines[0]
            error = json.loads(lines[-1])["error"]
        assert error["code"] == "engine_stopped"
        assert "Traceback" not in process.output
