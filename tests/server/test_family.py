"""The processes of a server: any of them may be killed, and nothing is left over. With fake tokens, so that they start
at once; all else is what `nanovllm serve` runs."""

import asyncio
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.mock import FakeLLM
from nanovllm.server import api_process, engine_process, messages
from nanovllm.server.serve import bind, num_api_servers
from nanovllm.server.wires import LONGEST_PATH, wires
from tests.server.harness import settled
from tests.server.pair import figures
from tests.server.test_process import Process, children, started

SERVER = [sys.executable, "-m", "benchmarks.serving.mock", "--server", "--rate", "300"]
LONG = {"prompt": "Once", "max_tokens": 3000, "ignore_eos": True, "stream": True}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several API processes, and /proc")


@contextmanager
def family(tmp_path: Path, num_api_servers: int) -> Iterator[tuple[Process, str, list[int]]]:
    """A running server, its address and its processes. In the end nothing may be left."""
    with started([*SERVER, "--api-servers", str(num_api_servers)], TMPDIR=str(tmp_path)) as process:
        url = process.url()
        assert [path.stat().st_mode & 0o777 for path in tmp_path.glob("nanovllm-*")] == [0o700]
        yield process, url, children(process.popen.pid)


def gone(pids: list[int], tmp_path: Path, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids) or any(tmp_path.iterdir()):
        assert time.monotonic() < deadline, (pids, list(tmp_path.iterdir()))
        time.sleep(0.02)


@contextmanager
def streaming(url: str) -> Iterator[Iterator[str]]:
    """Events of a long answer, the first of them read."""
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=90) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


@pytest.mark.slow
def test_when_the_engine_is_killed_who_waits_is_told_and_the_status_says_so(tmp_path: Path) -> None:
    with family(tmp_path, 2) as (process, url, pids), streaming(url) as lines, streaming(url) as others:
        os.kill(pids[0], signal.SIGKILL)
        killed = time.monotonic()
        for *_, error, last in (lines, others):
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_stopped"
            assert last == "data: [DONE]"
        assert time.monotonic() - killed < 5  # a fraction of a second, on a machine that is not busy
        assert process.popen.wait(10) == 1
        gone(pids, tmp_path)
        process._reader.join(10)
        assert "the engine's process was ended by SIGKILL" in process.output


@pytest.mark.slow
def test_an_api_process_that_is_killed_is_replaced_and_counters_do_not_fall(tmp_path: Path) -> None:
    with family(tmp_path, 2) as (process, url, pids):
        with streaming(url) as lines:
            next(lines)
            before = figures(httpx.get(f"{url}/metrics").content)
            for pid in pids[1:]:
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                list(lines)
        found = figures(httpx.get(f"{url}/metrics", timeout=90).content)  # the connection waits for the new process
        assert found['vllm:request_success_total{finished_reason="abort"}'] == 1
        assert found["vllm:num_requests_running"] == 0
        counters = [name for name in before if "_total" in name or "_bucket" in name]
        assert all(found[name] >= before[name] for name in counters) and len(counters) > 50
        assert len(children(process.popen.pid)) == 3 and process.output.count("another one takes its place") == 2
        assert process.end() == 0
        gone(pids, tmp_path)


@pytest.mark.slow
def test_an_api_process_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    with family(tmp_path, 2) as (process, url, pids):
        os.kill(pids[1], signal.SIGSTOP)
        deadline = time.monotonic() + 120
        while "another one takes its place" not in process.output and time.monotonic() < deadline:
            time.sleep(0.1)
        short = LONG | {"max_tokens": 2, "stream": False}
        answers = [httpx.post(f"{url}/v1/completions", json=short, timeout=30) for _ in range(20)]
        assert [answer.status_code for answer in answers] == [200] * 20
        assert pids[1] not in children(process.popen.pid)
        assert process.end() == 0
        gone(pids, tmp_path)
        assert "an API process has not been heard of for 30 seconds" in process.output


@pytest.mark.slow
def test_api_processes_that_die_again_and_again_end_the_server(tmp_path: Path) -> None:
    with family(tmp_path, 1) as (process, url, _):
        while process.popen.poll() is None:
            with suppress(httpx.HTTPError, FileNotFoundError, IndexError):  # in the moment of its end
                if httpx.get(f"{url}/health", timeout=90).status_code == 200:
                    os.kill(children(process.popen.pid)[1], signal.SIGKILL)
        assert process.popen.wait(10) == 1 and process.output.count("another one takes its place") == 3


@pytest.mark.slow
def test_when_the_parent_is_killed_nothing_is_left(tmp_path: Path) -> None:
    with family(tmp_path, 2) as (process, url, pids), streaming(url) as lines:
        process.popen.kill()
        with pytest.raises(httpx.HTTPError):
            list(lines)
        gone(pids, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_to_all_processes_is_the_parents_alone(tmp_path: Path, number: int, status: int) -> None:
    """As Ctrl-C in a terminal, and systemd."""
    with family(tmp_path, 2) as (process, url, pids), streaming(url) as lines:
        for pid in pids:
            os.kill(pid, number)
        time.sleep(0.3)
        assert next(lines)
        assert len(children(process.popen.pid)) == 3, "without the parent's word nothing happens"
        for pid in [process.popen.pid, *pids]:
            os.kill(pid, number)
        rest = list(lines)  # --drain-timeout is 1 s here
        assert "engine_stopped" in rest[-2] and rest[-1] == "data: [DONE]"
        assert process.popen.wait(20) == status
        gone(pids, tmp_path)


@pytest.mark.slow
def test_an_end_in_the_middle_of_the_start_leaves_nothing(tmp_path: Path) -> None:
    for seconds in 0.5, 1.0, 1.5:
        with started([*SERVER, "--api-servers", "2"], TMPDIR=str(tmp_path)) as process:
            time.sleep(seconds)
            process.popen.send_signal(signal.SIGTERM)
            assert process.popen.wait(10) in (0, -signal.SIGTERM)  # the latter before the server is imported
            assert "Traceback" not in process.output
            gone([], tmp_path)


@pytest.mark.slow
def test_an_api_process_that_cannot_start_ends_the_server_and_nothing_is_said_to_be_served(tmp_path: Path) -> None:
    broken, folder = tmp_path / "broken" / "fastapi.py", tmp_path / "wires"
    for path in broken.parent, folder:
        path.mkdir()
    broken.write_text("raise RuntimeError('a broken installation')")
    command = [*SERVER, "--api-servers", "2"]
    with started(command, TMPDIR=str(folder), PYTHONPATH=str(broken.parent)) as process:
        assert process.popen.wait(60) == 1
        process._reader.join(10)
        assert "a broken installation" in process.output and "before it was ready" in process.output
        assert "is serving" not in process.output
        gone([], folder)


def num_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.slow
def test_api_processes_are_light_and_share_the_work(tmp_path: Path) -> None:
    with family(tmp_path, 2) as (process, url, pids):
        for pid in pids[1:]:
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
        before = [num_files(pid) for pid in pids[1:]]
        host, _, port = url.removeprefix("http://").rpartition(":")
        opened = [socket.create_connection((host, int(port))) for _ in range(64)]
        httpx.get(f"{url}/health")
        deadline = time.monotonic() + 30
        new = [0, 0]
        while sum(new) < 64:
            assert time.monotonic() < deadline, new
            new = [num_files(pid) - number for pid, number in zip(pids[1:], before, strict=True)]
            time.sleep(0.05)
        assert min(new) > 12
        for sock in opened:
            sock.close()
        assert process.end() == 0


# --- the port --------------------------------------------------------------------------------------------------------


def test_a_port_is_shared_with_nobody_else() -> None:
    """Not even with a server that has not begun to listen."""
    with bind("127.0.0.1", 0, 3) as sockets:
        [port] = {sock.getsockname()[1] for sock in sockets}
        assert len(sockets) == 3
        for num in 1, 2:
            with pytest.raises(OSError, match="cannot listen"), bind("127.0.0.1", port, num):
                pass
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as an API process does
            sock.listen()
        with socket.create_connection(sockets[0].getsockname()) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\0" * 8)
        with pytest.raises(OSError, match="cannot listen"), bind("127.0.0.1", port, 2):
            pass
    with bind("127.0.0.1", port, 2):  # and it is free again at once
        pass


def test_no_chunk_waits_for_the_acknowledgement_of_the_chunk_before() -> None:
    """Nagle's algorithm makes chunks wait. With a client that delays acknowledgements that takes 40 ms."""
    accepted: asyncio.Queue[int] = asyncio.Queue()

    class Door(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            connection = transport.get_extra_info("socket")
            accepted.put_nowait(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    async def option(sock: socket.socket) -> int:
        async with await asyncio.get_running_loop().create_server(Door, sock=sock):
            with socket.create_connection(sock.getsockname()):
                return await accepted.get()

    with bind("127.0.0.1", 0, 1) as [sock]:
        assert asyncio.run(option(sock))


def test_several_api_processes_need_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_api_servers(3) == 3 and 1 <= num_api_servers(None) <= 4
    monkeypatch.setattr(sys, "platform", "darwin")
    assert num_api_servers(None) == num_api_servers(1) == 1
    with pytest.raises(ValueError, match="--api-servers 2 needs Linux"):
        num_api_servers(2)


def test_where_a_path_is_too_long_for_a_socket_the_wires_are_tcp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * LONGEST_PATH)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with wires() as used:
        assert used.directory is None and len(used.secret_key) == 40 and repr(used.secret_key) not in repr(used)
    assert not list(long.iterdir())


# --- garbage collection ----------------------------------------------------------------------------------------------


def frozen_engine(arguments: Any, answer: Connection) -> None:
    engine_process.EngineServer.run = lambda self: answer.send((gc.get_freeze_count(), len(gc.get_objects())))  # type: ignore[method-assign]
    engine_process.run_engine(*arguments)


def frozen_api(arguments: Any, answer: Connection) -> None:
    async def tell(self: Any, sockets: Any) -> None:
        assert "anyio._backends._asyncio" in sys.modules, "the first answer would wait for this import"
        answer.send((gc.get_freeze_count(), len(gc.get_objects())))

    api_process.Server.serve = tell  # type: ignore[method-assign,assignment]
    api_process.run_api(*arguments)


@pytest.mark.slow
def test_collections_leave_out_what_was_loaded() -> None:
    """Python's garbage collector would stop all streams for the time that it takes to look at every object."""
    context = get_context("spawn")
    options = settled()
    vars(options).pop("settle"), vars(options).pop("run")
    with wires() as used, bind("127.0.0.1", 0, 1) as [sock]:
        ours, theirs = context.Pipe()
        answer, tell = context.Pipe()
        engine = context.Process(target=frozen_engine, args=((used, FakeLLM, (1e3,), options, theirs), tell))
        engine.start()
        info = ours.recv_bytes()
        assert isinstance(messages.decode_start(info), messages.EngineInfo)
        api = context.Process(target=frozen_api, args=((used, 1, sock, options, theirs), tell))
        api.start()
        ours.send_bytes(info)
        for process in engine, api:
            assert answer.poll(60)
            frozen, others = answer.recv()
            assert frozen > 100 * others
            process.join(20)
            process.kill()
