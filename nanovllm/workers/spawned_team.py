"""Ranks that the leader starts itself, on its own machine, and that end without leaving a trace.

Workers are new Pythons ("spawn"): a fork of a process with threads and a GPU inherits half of both. A step costs the
leader one write to shared memory and a few bytes through a pipe to each worker, which sleeps at the other end. Every
failure ends in an error at the leader, with the traceback of the worker that failed first, and with every worker and
segment gone.
"""

import multiprocessing
import os
import pickle
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.distributed.group import HOST, TIMEOUT, Group, PeerLost
from nanovllm.workers.team import GRACE, MakeWorker, Team, WorkerDied, failure_report
from nanovllm.workers.watchdog import BEAT, StepStatus, Watchdog, beat

FIRST_SIZE = 1 << 16  # bytes of the first segment; a longer message gets a larger one


class SpawnedTeam(Team):
    """The leader's side."""

    def __init__(self, devices: list[torch.device], make: MakeWorker) -> None:
        """Start the workers. `make` is found by its name in their processes, so a script that comes here needs an
        `if __name__ == "__main__":`; `join` waits for them."""
        super().__init__()
        self.group = Group(0, len(devices), devices[0])
        self._workers: dict[Connection, BaseProcess] = {}  # by our end of the pipe to it
        self._segments: list[SharedMemory] = []
        self.close = weakref.finalize(self, _release, self._workers, self._segments, self.group)
        context = multiprocessing.get_context("spawn")
        self._store = make_store()
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
        try:
            self._wait_for_all()
            self.group.join(self._store)
        except PeerLost as lost:
            raise self.failed(lost, "the ranks could not start", starting=True) from lost
        args = self._store.clone(), self.step, list(self._workers.values()), self.group
        threading.Thread(target=_watch, args=args, name="nanovllm-watch", daemon=True).start()

    def _send(self, payload: bytes) -> None:
        """Written once, for all workers to read."""
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

    def _wait_for_all(self) -> None:
        """Each worker answers once when it is ready, and once for each message that it has read."""
        waiting = set(self._workers)
        while waiting:
            # On all of them: one that has answered may die meanwhile.
            ready = connection.wait(list(self._workers), TIMEOUT.total_seconds())
            if not ready:
                raise PeerLost(f"a rank has not answered for {TIMEOUT.total_seconds():g} s")
            for pipe in ready:
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
            report = f"{worker.name} died (exit code {worker.exitcode})"
            if worker.exitcode == 1 and not self.group.connected:  # it did not come so far as to send its traceback
                report += '; a script that starts ranks needs `if __name__ == "__main__":`, and has to be a file'
            raise kind(self.group.lost or report) from None
        if report is not None:
            raise WorkerDied(f"{worker.name} failed:\n{report}")

    def cause_of(self, lost: PeerLost) -> str:
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


def make_store() -> Any:
    """The store where the ranks meet, at a free port of this machine. By itself a TCPStore listens to the network."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    fd = listener.detach()  # which is the store's from now on
    return dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def _watch(store: dist.Store, step: StepStatus, workers: list[BaseProcess], group: Group) -> None:
    """Kill a worker that does not go on, and so make it one that is dead. Gloo notices that; NCCL never would, and the
    leader would wait for ever."""
    on_gpu = group.device.type == "cuda"

    def lose(rank: int, why: str) -> None:
        group.lost = why
        workers[rank - 1].kill()

    max_step = TIMEOUT.total_seconds() if on_gpu else float("inf")
    sentinels = [worker.sentinel for worker in workers]
    Watchdog(store, group.size, step, lose, sentinels, max_step).run()
    if on_gpu:
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
    group.close()


def _free(segments: list[SharedMemory]) -> None:
    for segment in segments:
        segment.close()
        segment.unlink()
    segments.clear()


def _work(make: MakeWorker, group: Group, port: int, pipe: Connection, threads: int) -> None:
    """A worker's life: get ready, do what each message says, and end when the leader does or closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the leader decides
    stores: list[dist.Store] = []
    threading.Thread(target=_exit_with_leader, args=(stores, group.rank), daemon=True).start()
    torch.set_num_threads(threads)
    if group.device.type == "cuda":
        torch.cuda.set_device(group.device)
    try:
        pipe.send(None)
        store: Any = dist.TCPStore(HOST, port, is_master=False)
        stores.append(store.clone())
        group.join(store)
        do = make(group)
        for message in _messages(pipe):
            do(message)
    except PeerLost:
        os._exit(0)  # the rank that failed reports
    except BaseException as error:
        with suppress(OSError):  # the leader may be gone, too
            pipe.send(failure_report(error, group.rank))
        os._exit(1)
    os._exit(0)  # at once: what Python would tidy up may wait for ranks that are gone


def _exit_with_leader(stores: list[dist.Store], rank: int) -> None:
    """End this process with the leader, also in the middle of a step, where nobody listens to the pipe. Until then show
    a pulse."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    with suppress(RuntimeError):  # the store is gone, and with it the leader
        while not connection.wait([parent.sentinel], BEAT):
            for store in stores:
                beat(store, rank)
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
