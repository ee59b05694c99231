"""An API process: HTTP, JSON and text, without torch. Several of them may listen at one port, before one engine."""

import argparse
import asyncio
import gc
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

import uvicorn
from anyio import create_task_group

from nanovllm.server import messages
from nanovllm.server.app import build_app
from nanovllm.server.client import EngineClient
from nanovllm.server.connections import uvicorn_config
from nanovllm.server.messages import EngineInfo
from nanovllm.server.options import AppOptions
from nanovllm.server.wires import ALIVE, DEAD, NOW, PULSE, READY, Wires, obey_the_parent

FAREWELL = 1  # seconds in which clients are told that they will get no more
ENDED = "the server was shut down"


class Server(uvicorn.Server):
    """Tells the parent when it answers, and ends when the parent says so."""

    def __init__(self, config: uvicorn.Config, client: EngineClient, control: Connection, drain_timeout: float) -> None:
        super().__init__(config)
        self._client, self._control, self._drain_timeout = client, control, drain_timeout
        self._ordered = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are the parent's

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        threading.Thread(target=self._listen, args=(asyncio.get_running_loop(),), daemon=True).start()
        self._control.send_bytes(READY)

    async def main_loop(self) -> None:
        """uvicorn's looks ten times a second whether it should end; this one is told, and keeps the date."""
        self._pulse(asyncio.get_running_loop())
        while not self.should_exit:
            await self.on_tick(0)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ordered.wait(), PULSE)

    def _pulse(self, loop: asyncio.AbstractEventLoop) -> None:
        """A sign of life, in one turn of the event loop however busy that is, and the next one a second later."""
        if not self.should_exit:
            with suppress(OSError):  # no parent any more
                self._control.send_bytes(ALIVE)
            loop.call_later(PULSE, self._pulse, loop)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cut = asyncio.create_task(self._cut_the_drain())
        await super().shutdown(sockets)
        cut.cancel()
        if self.force_exit:  # then uvicorn leaves this out
            await self.lifespan.shutdown()

    async def _cut_the_drain(self) -> None:
        """After the time for it, abort what is not answered, so that clients are told: uvicorn would cut them off."""
        await asyncio.sleep(self._drain_timeout)
        self._client.give_up(ENDED)

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(EOFError, OSError, RuntimeError):  # no parent, or no event loop any more
            while True:
                loop.call_soon_threadsafe(self._obey, self._control.recv_bytes())

    def _obey(self, order: bytes) -> None:
        self.should_exit = True
        self._ordered.set()
        if order == NOW:  # clients are told; after a while, those that do not read are cut off
            self._client.give_up(ENDED)
            asyncio.get_running_loop().call_later(FAREWELL, setattr, self, "force_exit", True)
        elif order.startswith(DEAD):
            self._client.fail(order.removeprefix(DEAD).decode())
            self._drain_timeout = self.config.timeout_graceful_shutdown = FAREWELL


def run_api(wires: Wires, sender: int, sock: socket.socket, options: argparse.Namespace, control: Connection) -> None:
    """The life of the process."""
    obey_the_parent(wires, options.log_level)
    logging.getLogger("uvicorn.error").addFilter(is_news)
    from transformers import PreTrainedTokenizerFast  # noqa: F401  # takes a second: now, while the engine starts

    try:
        info = messages.decode_start(control.recv_bytes())
    except EOFError:  # the engine could not start
        sys.exit(1)
    assert isinstance(info, EngineInfo)
    sys.set_int_max_str_digits(640)  # a body full of longer ones would take Python a while to read
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:  # on Windows, too: it reads from ZeroMQ
        runner.run(serve(info, wires, sender, sock, options, control))


async def serve(
    info: EngineInfo,
    wires: Wires,
    sender: int,
    sock: socket.socket,
    options: argparse.Namespace,
    control: Connection,
) -> None:
    client = EngineClient(info, wires, sender)
    app = build_app(client, model_name=info.model_name, options=AppOptions.chosen(options), meters=client)
    with suppress(ValueError):  # no chat template; otherwise the first chat need not wait for it to be compiled
        client.tokenizer.encode_chat([{"role": "user", "content": "?"}])
    async with create_task_group():  # imports much of anyio; otherwise the first answer would wait for that
        pass
    config = uvicorn_config(app, options, app.state.refused)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # now that the port is ours: see `serve.bind`
    gc.collect()
    gc.freeze()  # what is loaded stays: a full collection would look at all of it, and no token come meanwhile
    await Server(config, client, control, options.drain_timeout).serve(sockets=[sock])


def is_news(record: logging.LogRecord) -> bool:
    """False for the traceback of a request that a shutdown cuts short: uvicorn tells of it in a line of its own."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
