"""Collectives among the ranks of one engine: by NCCL on GPUs and gloo on CPUs; small sums on GPUs by `one_shot.py`."""

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.distributed.one_shot import OneShotAllReduce

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=5)  # how long ranks wait for each other (see `nanovllm/workers/watchdog.py`)
SLICE = timedelta(seconds=0.5)  # how long a wait goes on after the group was given up
ABORTED = 10.0  # seconds for NCCL to let go of everything


class PeerLost(RuntimeError):
    """Another rank did not do its part. The leader finds out why."""


class Group:
    """One rank's connection to the others. Not torch's global process group: a process may have several engines.

    With one rank (size 1) every collective is the identity.

    Attributes:
        lost: why the group was given up; None while it was not.
        one_shot: sums small tensors, where the GPUs can.
        recorded: CUDA graphs that may hold collectives. Whoever records one adds it.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.lost: str | None = None
        self.one_shot: OneShotAllReduce | None = None
        self.recorded: list[torch.cuda.CUDAGraph] = []
        self._backend: Any = None  # torch's ProcessGroupNCCL or ProcessGroupGloo, between `join` and `leave`
        self._stream: torch.cuda.Stream | None = None  # that steps run on
        # For `leave` and `close`
        self._lock = threading.Lock()
        self._cleanups: list[threading.Thread] = []
        self._no_more_steps = threading.Event()
        self._kept: Any = None  # the one-shot memory, which recorded graphs still know

    def __reduce__(self) -> Any:
        """For a new process, which is given its group before it joins."""
        return Group, (self.rank, self.size, self.device)

    def join(self, store: dist.Store, host: str = HOST, timeout: timedelta = TIMEOUT) -> None:
        """Meet the other ranks at `store`; returns when all are there.

        On CPUs they talk through the network interface that has the address `host`. By default that is the loopback:
        ranks of one machine need no network, and nobody else gets in.
        """
        if self.device.type == "cuda":
            # By default PyTorch ends the whole process when a collective fails, and with it the user's program.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            self._backend = dist.ProcessGroupNCCL(store, self.rank, self.size, dist.ProcessGroupNCCL.Options())
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            named = os.environ.get("GLOO_SOCKET_IFNAME") if host != HOST else None
            device = gloo.create_device(interface=named) if named else gloo.create_device(hostname=host)
            options._devices, options._timeout = [device], timeout
            self._backend = gloo(store, self.rank, self.size, options)
        self.all_reduce(torch.zeros(1, device=self.device)).item()  # NCCL connects at its first collective
        if self.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.device)
            self.one_shot = self._join_one_shot(store)

    def _join_one_shot(self, store: dist.Store) -> OneShotAllReduce | None:
        """All ranks have it, or none. A failure is raised only if the user's switch asks for one-shot sums."""
        max_bytes, asked = OneShotAllReduce.wanted(self.rank, self.size, self.device)
        max_bytes = self.smallest(max_bytes)
        if not max_bytes:
            return None
        made: OneShotAllReduce | None = None
        failure: Exception | None = None
        try:
            made = OneShotAllReduce(self.rank, self.size, store, self.device, max_bytes)
        except Exception as error:  # for example in a container that may not share handles
            failure = error
        everybody = bool(self.smallest(int(made is not None)))  # a rank that failed must say so before anything else
        if failure is not None and asked:
            raise failure
        if not everybody:
            why = failure or "another rank failed"
            logger.warning("small sums go through NCCL, because GPU memory cannot be shared: %s", why)
        return made if everybody else None

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, the same on every rank. On a GPU the sum is queued, not waited for.

        x itself, overwritten, or a new tensor if it was summed in one exchange.
        """
        if self.size > 1:
            one_shot = self.one_shot  # another thread may set it to None
            if one_shot is not None and x.is_contiguous() and one_shot.takes(x.shape, x.dtype):
                return one_shot.sum(x, x.dtype)[0]
            with self._peers() as backend:
                self._wait(backend.allreduce([x]))
        return x

    def can_fuse_all_reduce(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether a sum of such tensors over the ranks is one exchange, so that `all_reduce_add_rms_norm` takes it."""
        one_shot = self.one_shot
        return one_shot is not None and one_shot.takes(shape, dtype)

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(sum + residual), sum + residual), [T, H] each, in one kernel; sum: of all ranks' x.

        x: [T, H], or [S, T, H] float32 to be summed over S, for which `can_fuse_all_reduce` said yes. Raises PeerLost
        after the group was given up.
        """
        one_shot = self.one_shot
        if one_shot is None:
            raise PeerLost(self.lost or "the ranks are not connected")
        return one_shot.sum(x, weight.dtype, (weight, eps), residual)

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x, one after another, on every rank: x [...], contiguous -> [R, ...]."""
        if self.size == 1:
            return x[None]
        gathered = x.new_empty(self.size, *x.shape)
        with self._peers() as backend:
            self._wait(backend._allgather_base(gathered.view(-1), x.view(-1)))
        return gathered

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite x on every rank with that of rank 0."""
        if self.size > 1:
            with self._peers() as backend:
                self._wait(backend.broadcast(x, 0))
        return x

    def smallest(self, value: int) -> int:
        """The least of all ranks' values."""
        return int(self.all_gather(torch.tensor([value], device=self.device)).min())

    @contextmanager
    def _peers(self) -> Iterator[Any]:
        """The backend, for what needs the other ranks. A RuntimeError inside becomes a PeerLost."""
        try:
            if self._backend is None:
                raise PeerLost("the ranks are not connected")
            yield self._backend
        except RuntimeError as error:
            raise PeerLost(self.lost or str(error)) from error

    def _wait(self, work: Any) -> None:
        """Wait for a collective; on a GPU only the stream waits. One of gloo's goes on, but the wait for it can end."""
        if self.device.type == "cuda":
            work.wait()
            return
        while not work.is_completed():
            try:
                work.wait(SLICE)
            except RuntimeError:
                if self.lost is not None:
                    raise
        work.wait()

    @property
    def connected(self) -> bool:
        return self.lost is None and (self.size == 1 or self._backend is not None)

    def give_up(self, why: str) -> None:
        """End every wait for another rank. Called from any thread."""
        self.lost = self.lost or why
        if self.device.type == "cuda":
            self.leave()
        elif self._backend is not None:
            # Gloo's own thread goes on waiting, and freeing the backend would wait for it. So it is never freed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))

    def leave(self) -> None:
        """Disconnect. On a GPU a collective that waits for another rank ends without a result. Called from any thread.
        NCCL's abort may take long and has a thread of its own."""
        with self._lock:
            backend, one_shot, self._backend, self.one_shot = self._backend, self.one_shot, None, None
            if backend is None or self.device.type != "cuda":
                return
            if one_shot is not None and self._stream is not None:
                self._kept = one_shot
                self._start_cleanup(one_shot.release, self._stream, self._no_more_steps)
            self._start_cleanup(backend.abort)

    def _start_cleanup(self, what: Callable[..., object], *args: object) -> None:
        self._cleanups.append(threading.Thread(target=what, args=args, name="nanovllm-cleanup", daemon=True))
        self._cleanups[-1].start()

    def close(self) -> None:
        """Leave, and wait until that is done: NCCL tears down a process that ends in the middle of its abort.

        The abort waits until no CUDA graph is left in which NCCL was recorded. So the graphs go, though not while one
        runs: the driver would wait for its end, and let nobody launch what would end it.
        """
        self.leave()
        if self._kept is not None and self._stream is not None:
            wait_until_idle(self._stream, ABORTED)
        while self.recorded:
            self.recorded.pop().reset()
        self._no_more_steps.set()
        with self._lock:
            cleanups, self._cleanups = self._cleanups, []
        for thread in cleanups:
            thread.join(ABORTED)
        self._kept = None


def wait_until_idle(stream: torch.cuda.Stream, seconds: float) -> None:
    """Wait until all work on the stream is done, at most so long."""
    end = monotonic() + seconds
    while not stream.query() and monotonic() < end:
        sleep(0.005)


def devices_of(first: torch.device, ranks: int) -> list[torch.device]:
    """The device of each rank: GPUs from `first` on, or the CPU. Raises ValueError if there are too few."""
    if first.type != "cuda":
        return [first] * ranks
    index, found = first.index or 0, torch.cuda.device_count()
    if index + ranks > found:
        raise ValueError(
            f"tensor_parallel_size={ranks} from device={str(first)!r} on needs {index + ranks} CUDA GPUs, there are "
            f"{found}; use fewer ranks, or device='cpu'"
        )
    return [torch.device("cuda", index + rank) for rank in range(ranks)]
