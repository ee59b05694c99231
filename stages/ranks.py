"""The processes behind stage 7: how ranks are started, told what to do and ended, so that nothing is left behind.

A *rank* is a process with a device of its own. The leader, rank 0, made the engine; the others are its workers. In a
`Team` the leader tells them, once a step: one message in shared memory, and a bell (a pipe) to each. In a `Group` all
ranks compute together: sums and gathers of tensors, by gloo on CPUs and by NCCL on GPUs.
"""

import multiprocessing
import os
import pickle
import signal
import socket
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=5)  # for a rank that hangs; a death is noticed at once
Make = Callable[..., Callable[[Any], object]]  # what makes a rank that does what each message says
NO_MAIN = '(a script that starts ranks needs `if __name__ == "__main__":`, and has to be a file)'
GRACE = 2.0  # seconds for workers to say what happened, or to leave by themselves
_leaving = threading.RLock()  # of all groups: who watches a worker and who ends the program may come at once


class PeerLost(RuntimeError):
    """Another rank did not do its part. Which one, and why, is for the leader to find out."""


class WorkerDied(PeerLost):
    """This is why: the traceback of a worker, or the signal that killed it."""


class Group:
    """Collectives among the ranks of one engine. It is no global of the process, which may lead several engines."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.backend: Any = None  # there is none before `join` and after `leave`, and never any for a rank alone

    def join(self, store: dist.Store) -> None:
        """Meet the others; returns when all are there."""
        if self.device.type == "cuda":
            # By default PyTorch ends the whole process when a collective fails, and with it the user's program
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            self.backend = dist.ProcessGroupNCCL(store, self.rank, self.size, dist.ProcessGroupNCCL.Options())
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            # Not the interface of the host's name: ranks of one machine need no network, and nobody else gets in
            options._devices, options._timeout = [gloo.create_device(hostname=HOST)], TIMEOUT
            self.backend = gloo(store, self.rank, self.size, options)
        self.all_reduce(torch.zeros(1, device=self.device)).item()  # NCCL connects at its first collective

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, in place, the same on every rank."""
        if self.size > 1:
            with self.others() as backend:
                backend.allreduce([x]).wait()  # on a GPU this only queues it behind what is queued already
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x, one after another, on every rank: [...] -> [R, ...]."""
        if self.size == 1 or x.numel() == 0:
            return x.expand(self.size, *x.shape)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self.others() as backend:
            backend.allgather([parts], [x]).wait()
        return torch.stack(parts)

    @contextmanager
    def others(self) -> Iterator[Any]:
        """Their backend. What fails in here is not this rank's fault."""
        try:
            if self.backend is None:
                raise PeerLost("the ranks are no longer connected")
            yield self.backend
        except RuntimeError as error:
            raise PeerLost(str(error)) from error

    def leave(self) -> None:
        """Let go of the others. A collective that waits for one of them (NCCL would for ever) ends without a result."""
        with _leaving:  # a process that ends while another thread aborts NCCL is torn down by it
            backend, self.backend = self.backend, None
            if backend is not None and self.device.type == "cuda":
                backend.abort()


def devices_of(first: torch.device, ranks: int) -> list[torch.device]:
    """A device for each rank: GPUs from `first` on, or the one CPU. Raises ValueError if there are too few."""
    if first.type != "cuda":
        return [first] * ranks
    index, found = first.index or 0, torch.cuda.device_count()
    if index + ranks > found:
        need = f"device={str(first)!r} and tensor_parallel_size={ranks} need {index + ranks} CUDA GPUs"
        raise ValueError(f"{need}, this machine has {found}; use fewer ranks, or device='cpu'")
    return [torch.device("cuda", index + rank) for rank in range(ranks)]


class Team:
    """The leader's side: its workers, and what it tells them. With one device there are none, and nothing is told."""

    def __init__(self, devices: list[torch.device]) -> None:
        self.size, self.devices = len(devices), devices
        self.group = Group(0, self.size, devices[0])
        self.workers: dict[Connection, BaseProcess] = {}  # by our end of the pipe to it
        self.segments: list[SharedMemory] = []  # the one in use, if any
        self.store: dist.TCPStore | None = None
        self.threads = max(1, torch.get_num_threads() // self.size)  # of the CPU's, for each rank
        # Called by the user, by the garbage collector or when Python ends, whichever is first; only once in any case
        self.close = weakref.finalize(self, release, self.workers, self.segments, self.group)

    def start(self, make: Make, arguments: tuple[Any, ...]) -> None:
        """Start the workers. Each calls `make(group, *arguments)`, and what that returns with every message.

        They are new Pythons ("spawn"): a fork has but half of the threads and the GPU. They find `make` by its name.
        """
        if self.size == 1:
            return
        context = multiprocessing.get_context("spawn")
        listener = socket.create_server((HOST, 0))  # a port that is free; the store's own would be open to the network
        port, fd = listener.getsockname()[1], listener.detach()
        self.store = dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
        for rank in range(1, self.size):
            ours, theirs = context.Pipe()
            task = (make, arguments, Group(rank, self.size, self.devices[rank]), port, theirs, self.threads)
            process = context.Process(target=work, args=task, name=f"rank {rank}", daemon=True)
            process.start()
            self.workers[ours] = process
            theirs.close()  # the worker's end is the only one left, so its death is the end of the pipe

    def join(self) -> None:
        """Wait until every worker is ready, and connect the group. Raises RuntimeError if one of them is not."""
        if self.store is not None:
            try:
                self.wait_for_all()
                self.group.join(self.store)
                if self.group.device.type == "cuda":
                    args = [worker.sentinel for worker in self.workers.values()], self.group
                    threading.Thread(target=leave_with_the_first, args=args, daemon=True).start()
            except PeerLost as lost:
                raise RuntimeError(f"the ranks could not start: {self.cause_of(lost)}") from lost

    @contextmanager
    def step(self, message: object) -> Iterator[None]:
        """Inside, all ranks work on `message`, each with its share of the CPU's threads.

        If one fails, the others wait in a step that nobody will finish. So the team is closed, and RuntimeError tells
        what the workers had to say.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(min(threads, self.threads))
        try:
            self.tell(message)
            yield
            if self.size > 1 and self.group.backend is None:
                raise PeerLost("a worker died")
        except PeerLost as lost:
            cause = self.cause_of(lost)
            self.close()
            raise RuntimeError(f"a rank was lost in the middle of a step, so this engine is closed: {cause}") from lost
        except BaseException:  # Ctrl-C as well
            if self.size > 1:
                self.close()
            raise
        finally:
            torch.set_num_threads(threads)

    def tell(self, message: object) -> None:
        """Write `message` once, for all workers to read, and ring their bells."""
        if self.size == 1:
            return
        payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        if self.segments:
            self.wait_for_all()  # nobody still reads what is about to be overwritten
        if not self.segments or self.segments[0].size < len(payload):
            free(self.segments)
            self.segments.append(SharedMemory(create=True, size=2 * len(payload)))  # under a name that nobody else has
        buffer: Any = self.segments[0].buf
        buffer[: len(payload)] = payload
        for bell in self.workers:
            with suppress(OSError):  # of a dead worker: its end of the pipe says more
                bell.send((self.segments[0].name, len(payload)))

    def wait_for_all(self) -> None:
        """Each worker says once that it is ready, and after each message that it has read it."""
        waiting = set(self.workers)
        while waiting:
            for bell in connection.wait(list(self.workers)):  # on all: one that has answered may die meanwhile
                self.hear(bell)
                waiting.discard(bell)

    def hear(self, bell: Any) -> None:
        """Take an answer. Raises PeerLost if there is none, or if it tells of a failure."""
        worker = self.workers[bell]
        try:
            report = bell.recv()
        except (EOFError, OSError):
            worker.join(GRACE)
            kind = WorkerDied if worker.exitcode else PeerLost  # one that left was let down by another
            hint = f" {NO_MAIN}" if worker.exitcode == 1 else ""  # there was no report, so it never came to `work`
            raise kind(f"{worker.name} died (exit code {worker.exitcode}){hint}") from None
        if report is not None:
            raise WorkerDied(f"{worker.name} failed:\n{report}")

    def cause_of(self, lost: PeerLost) -> str:
        """Why a step failed, in the words of the worker that failed first, where one did."""
        deadline, silent = monotonic() + GRACE, list(self.workers)
        while silent and monotonic() < deadline and not isinstance(lost, WorkerDied):
            for bell in connection.wait(silent, deadline - monotonic()):
                try:
                    self.hear(bell)
                except WorkerDied as found:
                    lost = found
                except PeerLost:
                    silent.remove(bell)  # type: ignore[arg-type]
        return str(lost)


def leave_with_the_first(sentinels: list[int], group: Group) -> None:
    """NCCL never notices that a rank has died: without this the leader would wait for its part for ever."""
    connection.wait(sentinels)
    group.leave()


def release(workers: dict[Connection, BaseProcess], segments: list[SharedMemory], group: Group) -> None:
    """End the workers, the gentle way if they listen, and free what was shared with them."""
    for bell in workers:
        bell.close()  # to a worker that waits for a message this is the end
    deadline = monotonic() + GRACE / 4
    for worker in workers.values():
        worker.join(max(0, deadline - monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()
    workers.clear()
    free(segments)
    group.leave()


def free(segments: list[SharedMemory]) -> None:
    for segment in segments:
        segment.close()
        segment.unlink()
    segments.clear()


def work(make: Make, arguments: tuple[Any, ...], group: Group, port: int, bell: Connection, threads: int) -> None:
    """A worker's life: get ready, do what each message says, and end when the leader does or closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the leader decides
    threading.Thread(target=exit_with_leader, daemon=True).start()
    torch.set_num_threads(threads)
    if group.device.type == "cuda":
        torch.cuda.set_device(group.device)
    try:
        do = make(group, *arguments)
        bell.send(None)
        group.join(dist.TCPStore(HOST, port, is_master=False))
        for message in messages(bell):
            do(message)
    except PeerLost:
        os._exit(0)  # somebody else has the story to tell
    except BaseException:
        with suppress(OSError):  # the leader may be gone, too
            bell.send(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # at once: what Python would tidy up may wait for ranks that are gone


def exit_with_leader() -> None:
    """Also in the middle of a step, where nobody listens to the bell."""
    connection.wait([multiprocessing.parent_process().sentinel])  # type: ignore[union-attr]
    os._exit(1)


def messages(bell: Connection) -> Iterator[Any]:
    """What the leader tells, until it closes the pipe."""
    segment: SharedMemory | None = None
    while True:
        try:
            name, size = bell.recv()
        except (EOFError, OSError):
            return
        if segment is None or segment.name != name:
            segment = SharedMemory(name)  # the one before goes when nobody refers to it
        buffer: Any = segment.buf
        message = pickle.loads(buffer[:size])
        bell.send(None)
        yield message
