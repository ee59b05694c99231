"""What joins the processes of one server: sockets that no other server and no other user of the machine can reach.

All processes do what the parent says, and end when the parent ends.
"""

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection, parent_process

import zmq

from nanovllm.server.logs import set_up

LONGEST_PATH = 107  # bytes of the path of a Unix socket; Linux allows this many, and macOS 103
LONGEST_NAME = len("/4294967295")
SIGNALS = signal.SIGINT, signal.SIGTERM
PULSE = 1  # seconds between two signs of life of an API process
# What the parent may say to an API process (the engine's EngineInfo comes first), and what it is told.
DRAIN, NOW, DEAD = b"drain", b"now", b"dead"
READY, ALIVE = b"ready", b"alive"
LINGER = 500  # ms in which the last messages may still leave a process that ends


@dataclass(frozen=True)
class Wires:
    """Unix sockets in a fresh directory of mode 0700. If they cannot be used (Windows, too long a path): TCP on
    loopback, encrypted with keys of this run (CurveZMQ), so that nobody without the keys can read or send.

    Every process listens at one socket, and has one more socket for each process that it sends to. So a full queue to
    one process does not delay what the others get. All sockets are non-blocking, and their queues have no limit: the
    senders bound what is in them (see `Outbox`).
    """

    directory: str | None
    public_key: bytes = b""
    secret_key: bytes = field(default=b"", repr=False)

    def listen(self, context: zmq.Context[zmq.Socket[bytes]], name: str) -> tuple[zmq.Socket[bytes], str]:
        """Open the socket that this process receives from. Returns the socket, and the address for the senders."""
        socket = self._socket(context, zmq.PULL)
        if self.directory is not None:
            socket.bind(f"ipc://{self.directory}/{name}")
        else:
            socket.curve_server = True
            socket.bind("tcp://127.0.0.1:*")
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
        socket = self._socket(context, zmq.PUSH)
        if self.directory is None:
            socket.curve_serverkey = self.public_key
        socket.connect(address)
        return socket

    def _socket(self, context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        socket.linger = LINGER
        socket.sndhwm = socket.rcvhwm = 0
        if self.directory is None:
            socket.curve_publickey, socket.curve_secretkey = self.public_key, self.secret_key
        return socket

    def clear(self) -> None:
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def wires() -> Iterator[Wires]:
    """Make the wires for one run of a server. Raises ValueError if ZeroMQ has neither Unix sockets nor CURVE."""
    if zmq.has("ipc"):
        directory = tempfile.mkdtemp(prefix="nanovllm-")
        if len(os.fsencode(directory)) + LONGEST_NAME <= LONGEST_PATH - 4 * (os.uname().sysname == "Darwin"):
            made = Wires(directory)
            try:
                yield made
            finally:
                made.clear()
            return
        os.rmdir(directory)
    if not zmq.has("curve"):
        raise ValueError("this build of pyzmq has no CURVE, which keeps others out; install pyzmq's own wheel")
    public, secret = zmq.curve_keypair()
    yield Wires(None, public, secret)


def obey_the_parent(wires: Wires, log_level: str) -> None:
    """Make this process ignore signals, and end when the parent ends.

    Ctrl-C and some service managers signal every process of a server. Only the parent decides, and it tells the others
    what to do in which order. When the parent is gone, this process removes the directory of the sockets, and ends.
    """
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs started from here would inherit
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the parent blocks them for the start of a process
    set_up(log_level)
    threading.Thread(target=_end_with_the_parent, args=(wires,), name="nanovllm-parent", daemon=True).start()


def _end_with_the_parent(wires: Wires) -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    wires.clear()
    os._exit(1)  # at once, also in the middle of a step
