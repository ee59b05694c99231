"""`examples/ray_serve.py`: two replicas on CPUs behind one address."""

import asyncio
import os
import re
import socket
import sys
import time
from importlib.util import find_spec
from typing import Any

import httpx
import openai
import pytest

from tests.server.test_process import ROOT, started


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'nanovllm[ray]'")
def test_two_replicas_answer_as_one_server() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "examples/ray_serve.py", "--replicas", "2", "--port", str(port)]
    with started(command, PYTHONPATH=path) as process:
        url = process.url()
        assert httpx.get(f"{url}/health").status_code == 200
        answers = asyncio.run(ask(f"{url}/v1"))
        assert len(set(answers)) == 1 and len(answers[0]) > 10  # greedy: whichever replica answers
        assert process_starts(url) == 2
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 0}).status_code == 400
        assert process.end() == 0


async def ask(url: str) -> list[str]:
    """The same question, many times at once, whole and streamed."""
    params: Any = {"model": "story_model", "prompt": "Nell the fox", "max_tokens": 12, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as client:

        async def one(i: int) -> str:
            if i % 2:
                return (await client.completions.create(**params)).choices[0].text
            stream = await client.completions.create(**params, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        return await asyncio.gather(*map(one, range(16)))


def process_starts(url: str) -> int:
    """How many different processes answer: each made its counters at a time of its own."""
    seen: set[str] = set()
    deadline = time.monotonic() + 20
    while len(seen) < 2 and time.monotonic() < deadline:
        metrics = httpx.get(f"{url}/metrics", headers={"connection": "close"}).text
        seen |= set(re.findall(r"^vllm:generation_tokens_created{.*} (\S+)", metrics, flags=re.MULTILINE))
    return len(seen)
