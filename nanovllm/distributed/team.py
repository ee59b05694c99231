"""The processes of an engine with several ranks: how they start, are told what to do, and end without leaving a trace.

The leader, rank 0, is the process that made the engine. Its workers are new Pythons ("spawn"): a fork of a process
with threads and a GPU inherits half of both. A step costs the leader one write to shared memory and a byte through a
pipe to each worker, which sleeps at the other end: nobody spins. Every failure ends in an error at the leader, with
the traceback of the worker that failed first, and with every worker and segment gone.
"""

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from time import monotonic
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.distributed.group import HOST, Group, PeerLost

GRACE = 2.0  # seconds for workers to say what happened, or to leave by themselves
FIRST_SIZE = 1 << 16  # bytes of the first segment; a longer message gets a larger one

# What makes a worker's part, in its process: called with its group, returns what is called with every message.
Make = Callable[[Group], Callable[[Any], object]]


class WorkerDied(PeerLost):
    """Why a step failed: the traceback of a worker, or the signal that killed it."""


class Team:
    """The leader's side. Closed by the user, by the garbage collector or at exit, whichever is first."""

    def __init__(self, devices: list[torch.device], make: Make) -> None:
        """Start the workers. `make` is found by its name in their processes, so a script that comes here needs an
        `if __name__ == "__main__":`; `join` waits for them."""
        self.group = Group(0, len(devices), devices[0])
        self._workers: dict[Connection, BaseProcess] = {}  # by our end of the pipe to it
        self._segments: list[SharedMemory] = []
        self.close = weakref.finalize(self, _release, self._workers, self._segments, self.group)
        context = multiprocessing.get_context("spawn")
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # port 0: any that is free
        self.threads = torch.get_num_threads()
        if devices[0].type == "cpu":
            self.threads = max(1, self.threads // len(devices))
        for rank, device in enumerate(devices[1:], start=1):
            ours, theirs = context.Pipe()
            group = Group(rank, len(devices), device)
            task = make, group, self._store.port, theirs, self.threads
            process = context.Process(target=_work, args=task, name=f"rank {rank}", daemon=True)
            process.start()
            self._workers[ours] = process
            theirs.close()  # the worker's end is the only one left, so its death is the end of the pipe

    def join(self) -> None:
        """Connect the group. Raises RuntimeError if a worker did not come so far."""
        try:
            self._wait_for_all()
            self.group.join(self._store)
        except PeerLost as lost:
            cause = self._cause_of(lost)
            self.close()
            raise RuntimeError(f"the ranks could not start: {cause}") from lost
        if self.group.device.type == "cuda":
            # NCCL never notices that a rank has died: without this the leader would wait for its part for ever. Gloo
            # does notice, and must not be taken apart by a thread that ends with the program.
            sentinels = [worker.sentinel for worker in self._workers.values()]
            threading.Thread(target=_leave_with_the_first, args=(sentinels, self.group), daemon=True).start()

    def tell(self, message: object) -> None:
        """Write `message` once, for all workers to read, and wake them. Raises PeerLost if one of them is gone."""
        payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        if self._segments:
            self._wait_for_all()  # nobody still reads what is about to be overwritten
        if not self._segments or self._segments[0].size < len(payload):
            _free(self._segments)
            # Under a name that nobody else has: the system chooses it.
            self._segments.append(SharedMemory(create=True, size=max(FIRST_SIZE, 2 * len(payload))))
        buffer: Any = self._segments[0].buf
        buffer[: len(payload)] = payload
        for pipe in self._workers:
            with suppress(OSError):  # of a dead worker: its end of the pipe says more
                pipe.send((self._segments[0].name, len(payload)))

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """What all ranks do together, each with its share of the CPU's threads. Ctrl-C waits for the end of it.

        Any failure in here ends all of them: in half a step the ranks would wait for each other, and take for an answer
        to one question what was meant for another. That of another rank becomes RuntimeError with its story.
        """
        threads = torch.get_num_threads()
        with ctrl_c_waits():
            if not self.close.alive:
                raise RuntimeError("this engine is closed: its ranks have ended; make a new one")
            torch.set_num_threads(min(threads, self.threads))
            try:
                yield
                if not self.group.connected:
                    raise PeerLost("a worker died")
            except PeerLost as lost:
                cause = self._cause_of(lost)
                self.close()
                raise RuntimeError(f"a rank was lost, so this engine is closed: {cause}") from lost
            except BaseException:
                self.close()
                raise
            finally:
                torch.set_num_threads(threads)

    def _wait_for_all(self) -> None:
        """Each worker answers once when it is ready, and once for each message that it has read."""
        waiting = set(self._workers)
        while waiting:
            for pipe in connection.wait(list(self._workers)):  # on all: one that has answered may die meanwhile
                self._hear(pipe)
                waiting.discard(pipe)

    def _hear(self, pipe: Any) -> None:
        """Take an answer. Raises PeerLost if there is none, or if it tells of a failure."""
        worker = self._workers[pipe]
        try:
            report = pipe.recv()
        except (EOFError, OSError):
            worker.join(GRACE)
            kind = WorkerDied if worker.exitcode else PeerLost  # one that left was let down by another
            raise kind(f"{worker.name} died (exit code {worker.exitcode})") from None
        if report is not None:
            raise WorkerDied(f"{worker.name} failed:\n{report}")

    def _cause_of(self, lost: PeerLost) -> str:
        """Why a step failed, in the words of the worker that failed first, where one did."""
        deadline = monotonic() + GRACE
        silent = list(self._workers)
        while not isinstance(lost, WorkerDied) and (ready := connection.wait(silent, max(0, deadline - monotonic()))):
            for pipe in ready:
                try:
                    self._hear(pipe)
                except WorkerDied as found:
                    lost = found
                except PeerLost:
                    silent.remove(pipe)  # type: ignore[arg-type]
        return str(lost)


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """A Ctrl-C in here takes effect at the end; a second one at once.

    By a handler and not by a mask, which is of one thread only: the signal would come through another. Python handles
    signals in the main thread, so that all others are left alone anyway.
    """
    usual: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    noted: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(frame)
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if noted:
            usual(signal.SIGINT, noted[0])


def _leave_with_the_first(sentinels: list[int], group: Group) -> None:
    connection.wait(sentinels)
    group.leave()


def _release(workers: dict[Connection, BaseProcess], segments: list[SharedMemory], group: Group) -> None:
    """End the workers, the gentle way if they listen, and free what was shared with them."""
    for pipe in workers:
        pipe.close()  # to a worker that waits for a message this is the end
    deadline = monotonic() + GRACE / 4
    for worker in workers.values():
        worker.join(max(0, deadline - monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()
    workers.clear()
    _free(segments)
    group.leave()


def _free(segments: list[SharedMemory]) -> None:
    for segment in segments:
        segment.close()
        segment.unlink()
    segments.clear()


def _work(make: Make, group: Group, port: int, pipe: Connection, threads: int) -> None:
    """A worker's life: get ready, do what each message says, and end when the leader does or closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the leader decides
    threading.Thread(target=_exit_with_leader, daemon=True).start()
    torch.set_num_threads(threads)
    if group.device.type == "cuda":
        torch.cuda.set_device(group.device)
    try:
        pipe.send(None)
        group.join(dist.TCPStore(HOST, port, is_master=False))
        do = make(group)
        for message in _messages(pipe):
            do(message)
    except PeerLost:
        os._exit(0)  # somebody else has the story to tell
    except BaseException:
        with suppress(OSError):  # the leader may be gone, too
            pipe.send(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # at once: what Python would tidy up may wait for ranks that are gone


def _exit_with_leader() -> None:
    """Also in the middle of a step, where nobody listens to the pipe."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _messages(pipe: Connection) -> Iterator[Any]:
    """What the leader tells, until it closes the pipe."""
    segment: SharedMemory | None = None
    while True:
        try:
            name, size = pipe.recv()
        except (EOFError, OSError):
            return
        if segment is None or segment.name != name:
            segment = SharedMemory(name)  # the one before goes when nobody refers to it
        buffer: Any = segment.buf
        message = pickle.loads(buffer[:size])
        pipe.send(None)
        yield message
