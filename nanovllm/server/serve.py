"""The life of the server: one process for the engine and some for HTTP, started, watched and ended by their parent."""

import argparse
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import zmq

from nanovllm.server import messages
from nanovllm.server.engine_process import ServedLLM, make_llm, run_engine
from nanovllm.server.messages import EngineInfo, Gone, Quit
from nanovllm.server.options import engine_options
from nanovllm.server.wires import DEAD, DRAIN, NOW, PULSE, SIGNALS, Wires, wires

logger = logging.getLogger(__name__)

GRACE = 5  # seconds in which a process that was told to end must have ended
MOST_RESTARTS = 3  # of API processes, within RESTART_PERIOD; more are no accident
RESTART_PERIOD = 60  # seconds
MOST_MISSED = 30  # pulses of an API process; whoever misses more is stopped or hangs, and not only busy


def serve(args: argparse.Namespace) -> None:
    """Run the server until SIGTERM or Ctrl-C. `args` are checked already.

    Raises ValueError or OSError if the server cannot start, ChildProcessError if a process ended without being told,
    and KeyboardInterrupt after Ctrl-C.
    """
    with bind(args.host, args.port, num_api_servers(args.api_servers)) as sockets, wires() as used:
        Family(used, sockets, args).run(make_llm, (args.model, engine_options(args)))


def num_api_servers(wanted: int | None) -> int:
    """The number of API processes. Raises ValueError for several if the system cannot spread connections over them."""
    if sys.platform != "linux":
        if (wanted or 1) > 1:
            raise ValueError(f"--api-servers {wanted} needs Linux, which spreads connections over processes; use 1")
        return 1
    return wanted or max(1, min(4, len(os.sched_getaffinity(0)) // 4))


@contextmanager
def bind(host: str, port: int, num: int) -> Iterator[list[socket.socket]]:
    """Bind `num` sockets to one port, which nobody else can use then. A taken port shows before a model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:

        def bound(*options: int, port: int) -> socket.socket:
            # asyncio sets TCP_NODELAY only where the protocol is named. Without it a chunk waits until the client has
            # confirmed the one before, which takes some clients 40 ms.
            sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
            for option in options:
                sock.setsockopt(socket.SOL_SOCKET, option, 1)
            sock.bind((host, port))
            return sock

        try:
            alone = bound(socket.SO_REUSEADDR, port=port)
            if sys.platform != "linux":
                sockets = [alone]
            else:
                # Our sockets share the port (SO_REUSEPORT), and the system spreads connections over them. They get
                # SO_REUSEADDR only when they begin to listen (`api_process`). So the socket `alone` of a second server
                # finds the port taken, even before that.
                port = alone.getsockname()[1]
                alone.close()
                sockets = [bound(socket.SO_REUSEPORT, port=port) for _ in range(num)]
        except OSError as error:
            raise OSError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port"
            ) from None
        yield sockets


@dataclass(eq=False)
class Api:
    """An API process."""

    place: int  # the index of its socket
    sender: int
    process: BaseProcess
    control: Connection
    ready: bool = False
    missed: int = 0  # pulses

    def tell(self, order: bytes) -> None:
        with suppress(OSError):  # the process is gone, which its sentinel tells
            self.control.send_bytes(order)


class Family:
    """The processes of a server, as their parent sees them. Only the parent decides when a process ends."""

    def __init__(self, wires: Wires, sockets: Sequence[socket.socket], options: argparse.Namespace) -> None:
        self.wires = wires
        self.sockets = sockets
        self.options = argparse.Namespace(**{k: v for k, v in vars(options).items() if not callable(v)})
        self.context = get_context("spawn")
        self.apis: list[Api] = []
        self.engine: BaseProcess
        self.engine_is_over = False
        self._processes: list[BaseProcess] = []  # all that were ever started
        self.info: bytes | None = None
        self.first_signal: int | None = None
        self.failure: str | None = None
        self.ending = False
        self.deadline = float("inf")
        self.announced = False
        self._num_started = 0
        self._restarts: list[float] = []
        self._next_pulse = 0.0
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._signals, self._signal_writer = self.context.Pipe(duplex=False)

    def run(self, make: Callable[..., ServedLLM], arguments: tuple[Any, ...]) -> None:
        """Start all processes and watch them to the end. The engine's process calls `make(*arguments)`."""
        previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            self.report, theirs = self.context.Pipe(duplex=False)
            self.engine = self._start("engine", run_engine, (self.wires, make, arguments, self.options, theirs))
            theirs.close()
            for place in range(len(self.sockets)):
                self._start_api(place)
            while not self.ending or self.apis:
                self._wait()
            self._end_engine()
        finally:
            self._end_all()
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self.failure is not None:
            raise ChildProcessError(self.failure)
        if self.first_signal == signal.SIGINT:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal_writer.send_bytes(bytes([number]))

    # --- starting ---

    def _start(self, name: str, target: Any, arguments: tuple[Any, ...]) -> BaseProcess:
        process = self.context.Process(target=target, args=arguments, name=name)
        if hasattr(signal, "pthread_sigmask"):  # a signal waits until the new process can handle it
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process.start()
        finally:
            if hasattr(signal, "pthread_sigmask"):
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self._processes.append(process)
        return process

    def _start_api(self, place: int) -> None:
        ours, theirs = self.context.Pipe()
        self._num_started += 1
        sender = self._num_started
        arguments = self.wires, sender, self.sockets[place], self.options, theirs
        process = self._start(f"API process {place}", run_api, arguments)
        theirs.close()
        self.apis.append(api := Api(place, sender, process, ours))
        if self.info is not None:
            api.tell(self.info)

    # --- watching ---

    def _wait(self) -> None:
        """Wait until something happens, and handle it."""
        by_pipe = {api.control: api for api in self.apis}
        by_sentinel = {api.process.sentinel: api for api in self.apis}
        waited: list[Any] = [self._signals, *by_pipe, *by_sentinel]
        if not self.engine_is_over:
            waited += [self.engine.sentinel] if self.info else [self.engine.sentinel, self.report]
        timeout = max(0.0, min(self.deadline, self._next_pulse) - time.monotonic())
        ready = connection.wait(waited, timeout)
        if time.monotonic() >= self.deadline:
            for api in self.apis:
                api.process.kill()
            self.deadline = float("inf")
        for found in ready:
            if found is self._signals:
                self._on_signal(self._signals.recv_bytes()[0])
            elif found == self.engine.sentinel:
                self._on_engine_death()
            elif found is self.report:
                self._on_report()
            elif found in by_pipe:
                self._hear(by_pipe[found])
            elif found in by_sentinel:
                self._on_api_death(by_sentinel[found])
        self._feel_the_pulse()

    def _feel_the_pulse(self) -> None:
        """Kill API processes that are stopped or hang, so that others take their places.

        Missed pulses are counted one by one, so nobody is killed where the whole server was stopped and goes on.
        """
        if time.monotonic() < self._next_pulse:
            return
        self._next_pulse = time.monotonic() + PULSE
        for api in self.apis:
            api.missed += 1
            if api.ready and not self.ending and api.missed > MOST_MISSED:
                logger.warning("an API process has not been heard of for %d seconds", MOST_MISSED * PULSE)
                api.process.kill()

    def _on_report(self) -> None:
        """The engine is ready, or has failed to start."""
        try:
            raw = self.report.recv_bytes()
        except EOFError:  # the engine's process died
            self._on_engine_death()
            return
        found = messages.decode_start(raw)
        if not isinstance(found, EngineInfo):
            raise {"TypeError": TypeError, "ValueError": ValueError}.get(found.kind, OSError)(found.message)
        self.info = raw
        self.to_engine = self.wires.connect(self._zmq, found.address)
        for api in self.apis:
            api.tell(raw)

    def _hear(self, api: Api) -> None:
        try:
            api.control.recv_bytes()  # READY first, then ALIVE
            api.ready, api.missed = True, 0
        except (EOFError, OSError):
            api.process.join(GRACE)
            self._on_api_death(api)
        if not (self.announced or self.ending) and all(api.ready for api in self.apis):
            self.announced = True
            host, port = self.sockets[0].getsockname()[:2]
            address = f"[{host}]" if ":" in host else host
            scheme = "https" if self.options.ssl_certfile else "http"
            print(f"nanovllm is serving at {scheme}://{address}:{port}{self.options.root_path}", flush=True)

    def _on_api_death(self, api: Api) -> None:
        """Replace an API process, whose clients and requests are lost. The new process takes over its socket, where
        connections wait meanwhile."""
        if api not in self.apis:
            return
        self.apis.remove(api)
        api.process.join()
        api.control.close()
        if self.info is not None:
            self.to_engine.send(messages.encode(Gone(api.sender)), zmq.NOBLOCK)
        if self.ending:
            return
        now = time.monotonic()
        self._restarts = [then for then in self._restarts if now - then < RESTART_PERIOD]
        if not api.ready or len(self._restarts) >= MOST_RESTARTS:
            self._end(f"an API process {how_it_ended(api.process)}" + ("" if api.ready else " before it was ready"))
            return
        logger.warning("an API process %s; another one takes its place", how_it_ended(api.process))
        self._restarts.append(now)
        self._start_api(api.place)

    def _on_engine_death(self) -> None:
        if self.engine_is_over:
            return
        self.engine_is_over = True
        if self.report.poll():
            self._on_report()  # why it could not start
        self.engine.join()
        launched = self.info is None and self.engine.exitcode == 0  # a rank that torchrun started has done its work
        reason = None if launched else f"the engine's process {how_it_ended(self.engine)}"
        for api in self.apis:
            api.tell(DEAD + (reason or "").encode())
        self._end(reason)

    def _on_signal(self, number: int) -> None:
        if not self.ending:
            self.first_signal = number
            self._end(None)
        elif number == signal.SIGINT:  # a second time: nobody wants to wait for answers
            self.deadline = time.monotonic() + GRACE
            for api in self.apis:
                api.tell(NOW)

    # --- ending ---

    def _end(self, failure: str | None) -> None:
        """Begin to end: let the API processes finish their answers, if there can be any."""
        self.failure = self.failure or failure
        if self.ending:
            return
        self.ending = True
        for sock in self.sockets:  # of ours: once the API processes close theirs, new connections are refused
            sock.close()
        self.deadline = time.monotonic() + 2 * GRACE + (self.options.drain_timeout if failure is None else 0)
        for api in self.apis:
            if self.info is None:
                api.process.kill()
            else:
                api.tell(DRAIN)

    def _end_engine(self) -> None:
        """End the engine's process, once no API process is left."""
        if self.info is not None and not self.engine_is_over:
            self.to_engine.send(messages.encode(Quit()), zmq.NOBLOCK)
            self.engine.join(2 * GRACE)

    def _end_all(self) -> None:
        """Kill all processes that are left, whatever happened."""
        for process in self._processes:
            process.kill()
            process.join()
        self._zmq.destroy(linger=0)


def run_api(*arguments: Any) -> None:
    """The life of an API process. It alone imports FastAPI: the parent starts the engine without waiting for that."""
    from nanovllm.server import api_process

    api_process.run_api(*arguments)


def how_it_ended(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with status {code}"
