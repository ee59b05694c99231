"""`examples/ray_serve.py`: two replicas on CPUs behind one address."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from nanovllm import cli
from tests.ports import free_port
from tests.server.test_process import ROOT, Process, started

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'nanovllm[ray]'"),
]


@contextmanager
def replicas(home: Path, *options: str) -> Iterator[tuple[Process, str]]:
    """Two replicas, and their address. In the end they are told to stop, and must."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "examples/ray_serve.py", "--port", str(free_port()), *options]
    for _ in range(3):  # Ray gives its processes half a minute to start, which is not enough on a busy machine
        with started(command, PYTHONPATH=path, HOME=str(home)) as process:
            try:
                url = process.url()
            except AssertionError:
                assert "timed out during startup" in process.output, process.output
                continue
            yield process, url
            assert process.end() == 0
            return
    raise TimeoutError("Ray did not start")


def test_two_replicas_answer_as_one_server_also_when_one_of_them_is_killed(tmp_path: Path) -> None:
    with replicas(tmp_path, "--replicas", "2") as (process, url):
        assert httpx.get(f"{url}/health").status_code == 200
        expected = set(asyncio.run(ask(f"{url}/v1", 16)))
        assert len(expected) == 1 and len(expected.pop()) > 10  # greedy: whichever replica answers
        assert len(process_starts(url, 2)) == 2
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": -1}).status_code == 400

        answers = asyncio.run(ask(f"{url}/v1", 32, lambda: os.kill(replica_pids(process)[0], signal.SIGKILL)))
        assert len(set(answers)) == 1 and len(answers[0]) > 10
        assert len(process_starts(url, 3)) >= 2  # another one has taken its place


def test_a_session_stays_with_its_replica(tmp_path: Path) -> None:
    """As a simulation has it: number of replicas, router, limits and the engine's options are from its file."""
    simulation = str(tmp_path / "simulation.json")
    clients = ["--rate", "1", "--seconds", "2", "--json", simulation]
    fleet = "--card h200 --replicas 2 --router sessions --max-num-seqs 32 --kvcache-block-size 16".split()
    assert cli.main(["simulate", "Qwen3-0.6B", *fleet, *clients]) == 0
    with replicas(tmp_path, "--from", simulation) as (_, url):
        homes = {session: process_starts(url, 2, 8, {"x-session-id": session}) for session in map(str, range(12))}
        assert all(len(found) == 1 for found in homes.values())
        assert len(set.union(*homes.values())) == 2


def test_a_router_that_ray_cannot_apply_is_refused(tmp_path: Path) -> None:
    simulation = tmp_path / "simulation.json"
    simulation.write_text(json.dumps({"scenario": {"router": "prefix"}}))
    for file, words in (simulation, "its router 'prefix' cannot be applied"), (tmp_path / "none", "no file that"):
        command = [sys.executable, "examples/ray_serve.py", "--from", str(file)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr


async def ask(url: str, num: int, meanwhile: Any = lambda: None) -> list[str]:
    """The same question, many times at once, whole and streamed. Who is cut off asks again, as OpenAI's client does."""
    params: Any = {"model": "story_model", "prompt": "Nell the fox", "max_tokens": 12, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=8, timeout=60) as client:

        async def one(i: int) -> str:
            if i % 2:
                return (await client.completions.create(**params)).choices[0].text
            while True:
                try:
                    stream = await client.completions.create(**params, stream=True)
                    return "".join([chunk.choices[0].text async for chunk in stream])
                except (httpx.HTTPError, openai.APIError):
                    await asyncio.sleep(0.2)

        asked = [asyncio.create_task(one(i)) for i in range(num)]
        await asyncio.sleep(0.05)
        meanwhile()
        return await asyncio.gather(*asked)


def replica_pids(process: Process) -> list[int]:
    """The processes of the replicas: Ray gives them a title, and they are grandchildren of ours."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        title = path.read_bytes() if path.exists() else b""
        if title.startswith(b"ray::ServeReplica") and in_session(int(path.parent.name), process):
            found.append(int(path.parent.name))
    return found


def in_session(pid: int, process: Process) -> bool:
    parents = pid
    while parents > 1:
        if parents == process.popen.pid:
            return True
        status = Path(f"/proc/{parents}/status")
        parents = int(re.findall(r"^PPid:\s+(\d+)", status.read_text(), re.MULTILINE)[0]) if status.exists() else 0
    return False


def process_starts(url: str, enough: int, most: int = 1000, headers: dict[str, str] | None = None) -> set[str]:
    """When the processes began that answer, until `enough` were seen: each made its counters at a time of its own."""
    seen: set[str] = set()
    deadline = time.monotonic() + 60  # a replica's process imports all of Ray and torch first: half a minute at worst
    for _ in range(most):
        if len(seen) >= enough or time.monotonic() > deadline:
            break
        metrics = httpx.get(f"{url}/metrics", headers={"connection": "close", **(headers or {})}).text
        seen |= set(re.findall(r"^vllm:generation_tokens_created{.*} (\S+)", metrics, flags=re.MULTILINE))
    return seen
