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
from nanovllm.server.options import ENGINE, check


class Server(uvicorn.Server):
    """Prints its address once it answers."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or []:
            host, port = sock.getsockname()[:2]
            print(f"nanovllm is serving at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # a second Ctrl-C ends the wait for answers; the step loop must end in order all the same
            await self.lifespan.shutdown()


def serve(args: argparse.Namespace) -> None:
    """Run until SIGTERM or Ctrl-C. Raises ValueError or OSError for what can be known before that."""
    check(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # also what uvicorn ends with, once it has drained
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").addFilter(is_news)
    with bind(args.host, args.port) as sock:  # a port that is taken shows before a model is loaded
        names = "device", "dtype", "attention_backend", *ENGINE
        chosen = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
        llm = AsyncLLM(args.model, max_queue=args.max_queue, **chosen)
        assert llm.llm.tokenizer is not None
        with suppress(ValueError):  # no chat template; otherwise the first chat need not wait for it to be compiled
            llm.llm.tokenizer.encode_chat([{"role": "user", "content": "?"}])
        app = build_app(
            llm,
            model_name=args.served_model_name or model_name(args.model, llm.llm.path),
            api_key=args.api_key,
            max_body_bytes=int(args.max_body_mib * 2**20),
        )
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",  # nothing about single requests
            access_log=False,
            timeout_graceful_shutdown=args.drain_timeout,
        )
        gc.collect()
        gc.freeze()  # what is loaded stays: a full collection would look at all of it, and no token come meanwhile
        Server(config).run(sockets=[sock])


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
