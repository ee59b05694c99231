"""The processes behind stage 7: how ranks are started, told what to do and ended, so that nothing is left behind.

A *rank* is a process with a device of its own. The leader, rank 0, made the engine; the others are its workers. In a
`Team` the leader sends them one message in each step, through a pipe to each. In a `Group` all ranks compute together:
sums and gathers of tensors, by gloo on CPUs and by NCCL on GPUs.
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
    """Another rank did not do its part. The leader finds out which one, and why."""


class WorkerDied(PeerLost):
    """A worker is the cause; the message is its traceback, or the signal that killed it."""


class Group:
    """Collectives among the ranks of one engine. Not a global: a process may lead several engines."""

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
        """The backend that reaches the other ranks. Whatever fails inside is a fault of theirs: PeerLost."""
        try:
            if self.backend is None:
                raise PeerLost("the ranks are no longer connected")
            yield self.backend
        except RuntimeError as error:
            raise PeerLost(str(error)) from error

    def leave(self) -> None:
        """Disconnect. A collective that waits for another rank (under NCCL, for ever) ends without a result."""
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
    """The leader's workers, and how it tells them what to do. With one device there are no workers."""

    def __init__(self, devices: list[torch.device]) -> None:
        self.size, self.devices = len(devices), devices
        self.group = Group(0, self.size, devices[0])
        self.workers: dict[Connection, BaseProcess] = {}  # by our end of the pipe to it
        self.store: dist.TCPStore | None = None
        self.threads = max(1, torch.get_num_threads() // self.size)  # of the CPU's, for each rank
        # Called by the user, by the garbage collector or when Python ends, whichever is first; only once in any case
        self.close = weakref.finalize(self, release, self.workers, self.group)

    def start(self, make: Make, arguments: tuple[Any, ...]) -> None:
        """Start the workers. Each makes `do = make(group, *arguments)`, and calls `do` with every message.

        Workers are new Python processes ("spawn"), which import `make` by its name: a fork would have neither the
        threads nor the GPU of its parent.
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

        If one fails, the others wait for ever. So the team is closed, and RuntimeError has what the workers said.
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
        """Send `message` to every worker."""
        if self.size == 1:
            return
        payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        for pipe in self.workers:
            with suppress(OSError):  # the worker is dead: whoever waits for its part will hear of it
                pipe.send_bytes(payload)

    def wait_for_all(self) -> None:
        """Return when every worker has said that it is ready."""
        waiting = set(self.workers)
        while waiting:
            for pipe in connection.wait(list(self.workers)):  # on all: one that has answered may die meanwhile
                self.hear(pipe)
                waiting.discard(pipe)

    def hear(self, pipe: Any) -> None:
        """Take what a worker says. Raises PeerLost if that is nothing, because it has died, or a failure."""
        worker = self.workers[pipe]
        try:
            report = pipe.recv()
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
            for pipe in connection.wait(silent, deadline - monotonic()):
                try:
                    self.hear(pipe)
                except WorkerDied as found:
                    lost = found
                except PeerLost:
                    silent.remove(pipe)  # type: ignore[arg-type]
        return str(lost)


def leave_with_the_first(sentinels: list[int], group: Group) -> None:
    """Disconnect when the first worker dies. NCCL does not notice that, and the leader would wait for ever."""
    connection.wait(sentinels)
    group.leave()


def release(workers: dict[Connection, BaseProcess], group: Group) -> None:
    """End the workers: gently if they listen, and otherwise by force."""
    for pipe in workers:
        pipe.close()  # to a worker that waits for a message this is the end
    deadline = monotonic() + GRACE / 4
    for worker in workers.values():
        worker.join(max(0, deadline - monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()
    workers.clear()
    group.leave()


def work(make: Make, arguments: tuple[Any, ...], group: Group, port: int, pipe: Connection, threads: int) -> None:
    """What a worker's process runs: get ready, do what each message says, end when the leader closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the leader decides
    threading.Thread(target=exit_with_leader, daemon=True).start()
    torch.set_num_threads(threads)
    if group.device.type == "cuda":
        torch.cuda.set_device(group.device)
    try:
        do = make(group, *arguments)
        pipe.send(None)
        group.join(dist.TCPStore(HOST, port, is_master=False))
        for message in messages(pipe):
            do(message)
    except PeerLost:
        os._exit(0)  # somebody else has the story to tell
    except BaseException:
        with suppress(OSError):  # the leader may be gone, too
            pipe.send(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # at once: what Python would tidy up may wait for ranks that are gone


def exit_with_leader() -> None:
    """End this process with the leader's, also in the middle of a step, where nobody listens to the pipe."""
    connection.wait([multiprocessing.parent_process().sentinel])  # type: ignore[union-attr]
    os._exit(1)


def messages(pipe: Connection) -> Iterator[Any]:
    """The leader's messages, until it closes the pipe."""
    with suppress(EOFError, OSError):
        while True:
            yield pickle.loads(pipe.recv_bytes())
