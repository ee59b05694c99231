"""What the tests of serving stand on: readers that check what they read, and servers on a port of loopback."""

import argparse
import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import openai
import uvicorn

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.cli import parser
from nanovllm.llm import EMBEDDED_MODEL
from nanovllm.outputs import CompletionOutput
from nanovllm.server.app import build_app
from nanovllm.server.connections import uvicorn_config
from nanovllm.server.options import AppOptions
from nanovllm.stream import Stream
from nanovllm.text.tokenizer import Tokenizer
from tests.server.shadow import SMALL, open_gates, shadow_llm
from tests.server.waiting import until

STORY = "Nell the fox had a red kite."
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    "{{ message.content }}\n{% endfor %}"
)


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 8, **more})


@asynccontextmanager
async def serving(**config: Any) -> AsyncIterator[AsyncLLM]:
    """A shadow engine that must have nothing left in the end."""
    async with shadow_llm(**config) as llm:
        try:
            yield llm
        finally:
            open_gates()
        await idle(llm)


async def idle(llm: AsyncLLM, seconds: float = 10) -> None:
    """Wait until nothing is left to do; then nothing may be left over."""
    await until(lambda: not (llm._requests or llm._added or llm.llm.engine.has_unfinished()), seconds)
    check_nothing_left(llm)


def check_nothing_left(llm: AsyncLLM) -> None:
    scheduler = llm.llm.engine.scheduler
    assert scheduler.blocks.num_free == scheduler.num_kv_blocks, "idle, but blocks are not free"
    assert not any(scheduler.blocks.ref_counts) and not scheduler.sequences and not scheduler.running
    assert not len(scheduler.waiting) and not llm._requests and not llm._added


async def read(stream: Stream) -> list[CompletionOutput]:
    """All of a stream, its deltas joined: one whole output for each choice."""
    whole: dict[int, CompletionOutput] = {}
    finished = False
    async for delta in stream:
        assert not finished and delta.request_id == stream.request_id and delta.outputs
        finished = delta.finished
        for choice in delta.outputs:
            so_far = whole.setdefault(choice.index, choice)
            if so_far is choice:
                continue
            assert not so_far.finished(), "a choice went on after its end"
            so_far.text += choice.text
            so_far.token_ids += choice.token_ids
            if so_far.logprobs is not None and choice.logprobs is not None:
                so_far.logprobs = [*so_far.logprobs, *choice.logprobs]
            so_far.finish_reason, so_far.stop_reason = choice.finish_reason, choice.stop_reason
    assert finished
    return [whole[i] for i in sorted(whole)]


async def tokens(stream: Stream) -> list[int]:
    (choice,) = await read(stream)
    return choice.token_ids


# --- servers ---------------------------------------------------------------------------------------------------------


def settled(**chosen: Any) -> argparse.Namespace:
    """The options of `nanovllm serve`: these, and otherwise the defaults."""
    args = parser().parse_args(["serve"])
    vars(args).update(chosen)
    args.settle(args)
    return args


@cache
def story_tokenizer() -> Tokenizer:
    return Tokenizer(EMBEDDED_MODEL)


@dataclass
class Served:
    llm: AsyncLLM
    port: int
    runner: uvicorn.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, api_key: str = "any") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=30)

    def stop(self) -> None:
        """What SIGTERM does to a server."""
        self.runner.should_exit = True

    def wait_idle(self) -> None:
        asyncio.run(idle(self.llm))


@contextmanager
def server(
    model: Path | None = None,
    app_options: dict[str, Any] | None = None,
    http_options: dict[str, Any] | None = None,
    shadow: bool = False,
    **config: Any,
) -> Iterator[Served]:
    """A real server in a thread of its own. Its engine must be idle in the end, and its threads gone.

    shadow: with the shadow engine, which starts at once and has no text, for what has nothing to do with the model.
    """
    if shadow:
        llm = shadow_llm(**config)
        llm.llm.tokenizer = story_tokenizer()
    else:
        llm = AsyncLLM(model, **(SMALL | config))
    app = build_app(llm, model_name="story", options=AppOptions(**(app_options or {})))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        runner = uvicorn.Server(uvicorn_config(app, settled(**(http_options or {})), app.state.refused))
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [sock]}, name="test-server")
        thread.start()
        try:
            while not runner.started:
                assert thread.is_alive()
                time.sleep(0.005)
            yield Served(llm, sock.getsockname()[1], runner)
        finally:
            open_gates()
            runner.should_exit = True
            thread.join(20)
    assert not thread.is_alive() and not llm._thread.is_alive()
    check_nothing_left(llm)


def chat_model(directory: Path) -> Path:
    """The embedded model with a chat template."""
    shutil.copytree(EMBEDDED_MODEL, directory, dirs_exist_ok=True)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    return directory
