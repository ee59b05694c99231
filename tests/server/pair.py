"""Both sides of the process border in one process: the engine's loop in a thread, API processes' clients in a loop."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nanovllm.outputs import CompletionOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.client import EngineClient, RemoteStream
from nanovllm.server.engine_process import EngineServer, ServedLLM
from nanovllm.server.messages import Quit
from nanovllm.server.wires import Wires, wires


@asynccontextmanager
async def pair(
    llm: ServedLLM, num_clients: int = 1, max_queue: int | None = None, used: Wires | None = None
) -> AsyncIterator[tuple[EngineServer, list[EngineClient]]]:
    """`llm` is closed in the end; until then everything must be over and counted."""
    with wires() as made:
        server = EngineServer(llm, used or made, "story", max_queue)
        thread = threading.Thread(target=server.run)
        thread.start()
        clients = [EngineClient(server.info, used or made, sender) for sender in range(1, num_clients + 1)]
        try:
            yield server, clients
            await clients[-1].scrape()  # behind all that was said before
            assert not server._served and not any(client._requests or client._choices for client in clients)
            scheduler = llm.engine.scheduler
            assert scheduler.blocks.num_free == scheduler.num_kv_blocks and not scheduler.sequences
        finally:
            clients[0]._send(Quit())
            await asyncio.to_thread(thread.join, 20)
            for client in clients:
                await client.shutdown()
        assert not thread.is_alive()


def slow(client: EngineClient, seconds: float) -> None:
    """From now on it takes so long until the client says that it has taken an update."""
    say = client._say_taken
    client._say_taken = lambda n: client._loop.call_later(seconds, say, n)  # type: ignore[method-assign,assignment]


async def one(client: EngineClient, prompt: dict[str, Any], params: SamplingParams, priority: int = 0) -> RemoteStream:
    [stream] = await several(client, [prompt], params, priority)
    return stream


async def several(
    client: EngineClient, prompts: list[dict[str, Any]], params: SamplingParams, priority: int = 0
) -> list[RemoteStream]:
    streams = client.submit([client.check(prompt, params) for prompt in prompts], priority=priority)
    for stream in streams:
        await stream.accepted()
    return streams


async def whole(stream: RemoteStream) -> tuple[list[CompletionOutput], int]:
    """All deltas joined, and how many there were."""
    found: dict[int, CompletionOutput] = {}
    num_deltas = 0
    async for delta in stream:
        num_deltas += 1
        for choice in delta.outputs:
            so_far = found.setdefault(choice.index, choice)
            if so_far is choice:
                continue
            assert so_far.finish_reason is None, "a choice went on after its end"
            so_far.text += choice.text
            so_far.token_ids += choice.token_ids
            if choice.logprobs is not None and so_far.logprobs is not None:
                so_far.logprobs = [*so_far.logprobs, *choice.logprobs]
            so_far.cumulative_logprob = choice.cumulative_logprob
            so_far.finish_reason, so_far.stop_reason = choice.finish_reason, choice.stop_reason
    return [found[i] for i in sorted(found)], num_deltas


def figures(text: bytes) -> dict[str, float]:
    """Without the labels that all of them have."""
    pairs = (line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#"))
    common = re.compile(r',?(engine="0"|model_name="[^"]*")')
    return {common.sub("", name).replace("{,", "{").replace("{}", ""): float(value) for name, value in pairs}
