"""The life of the server: bind, load, serve; on SIGTERM finish what runs, refuse what comes, exit with 0."""

import argparse
import asyncio
import gc
import logging
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import uvicorn

from nanovllm.async_llm import AsyncLLM
from nanovllm.server.app import build_app
from nanovllm.server.connections import uvicorn_config
from nanovllm.server.options import AppOptions, engine_options
from nanovllm.stream import EngineDead


class Server(uvicorn.Server):
    """Prints its address once it answers, ends what outlasts the drain, and ends itself when its engine is dead."""

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM, drain_timeout: float) -> None:
        super().__init__(config)
        self.llm, self.drain_timeout = llm, drain_timeout
        self.engine_died = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or []:
            host, port = sock.getsockname()[:2]
            address = f"[{host}]" if ":" in host else host
            scheme = "https" if self.config.is_ssl else "http"
            print(f"nanovllm is serving at {scheme}://{address}:{port}{self.config.root_path}", flush=True)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; True ends the server."""
        try:
            self.llm.check_health()
        except EngineDead:
            self.engine_died = True  # before any order: whoever waits has been told by the engine
        return bool(await super().on_tick(counter)) or self.engine_died

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cut = asyncio.create_task(self._cut_the_drain())
        await super().shutdown(sockets)
        cut.cancel()
        if self.force_exit:  # a second Ctrl-C ends the wait for answers; the step loop must end in order all the same
            await self.lifespan.shutdown()

    async def _cut_the_drain(self) -> None:
        """After `drain_timeout`, abort what is not answered, so that clients are told: uvicorn would cut them off."""
        await asyncio.sleep(self.drain_timeout)
        await self.llm.shutdown(drain=False)


def serve(args: argparse.Namespace) -> None:
    """Run until SIGTERM or Ctrl-C. `args` are checked. Raises ValueError or OSError for what can be known before that,
    and SystemExit with a status that is not 0 when the engine has died."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # also what uvicorn ends with, once it has drained
    logging.getLogger("uvicorn.error").addFilter(is_news)
    with bind(args.host, args.port) as sock:  # a port that is taken shows before a model is loaded
        llm = AsyncLLM(args.model, max_queue=args.max_queue, **engine_options(args))
        assert llm.llm.tokenizer is not None
        name = args.served_model_name or model_name(args.model, llm.llm.path)
        app = build_app(llm, model_name=name, options=AppOptions.chosen(args))
        with suppress(ValueError):  # no chat template; otherwise the first chat need not wait for it to be compiled
            llm.llm.tokenizer.encode_chat([{"role": "user", "content": "?"}])
        server = Server(uvicorn_config(app, args, app.state.refused), llm, args.drain_timeout)
        gc.collect()
        gc.freeze()  # what is loaded stays: a full collection would look at all of it, and no token come meanwhile
        server.run(sockets=[sock])
        if server.engine_died:
            raise SystemExit("nanovllm: the engine has died, see above")


def is_news(record: logging.LogRecord) -> bool:
    """False for the traceback of a request that a shutdown cuts short: uvicorn tells of it in a line of its own."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port") from None
    return sock


def model_name(model: str | None, path: Path) -> str:
    """What clients call the model: the hub id, or of a directory the last part, as the rest is nobody's business."""
    return model if model and not Path(model).exists() else path.resolve().name
