"""Collectives among the ranks of one engine: NCCL on GPUs, gloo on CPUs; small sums on GPUs by `one_shot.py`."""

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
TIMEOUT = timedelta(minutes=5)  # how long ranks wait for each other (see `watch`)
SLICE = timedelta(seconds=0.5)  # how long a wait goes on after the group was given up
ABORTED = 10.0  # seconds for NCCL to let go of everything


class PeerLost(RuntimeError):
    """Another rank did not do its part. Why, the leader finds out."""


class Group:
    """One rank's connection to the others. No global of the process, so that a process may have several engines.

    A rank alone (size 1) has nobody to talk to, and every collective is the identity.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.lost: str | None = None  # why it was given up
        self._backend: Any = None  # between `join` and `leave`
        self.one_shot: OneShotAllReduce | None = None  # what sums small tensors instead, where that is wanted
        self.recorded: list[torch.cuda.CUDAGraph] = []  # graphs that may hold collectives
        self._stream: torch.cuda.Stream | None = None  # that steps run on
        self._leaving = threading.Lock()
        self._tidying: list[threading.Thread] = []
        self._over = threading.Event()  # no more steps will be launched
        self._left: Any = None  # memory that recorded graphs still know

    def __reduce__(self) -> Any:
        """A process is given its group before it joins."""
        return Group, (self.rank, self.size, self.device)

    def join(self, store: dist.Store, host: str = HOST, timeout: timedelta = TIMEOUT) -> None:
        """Meet the others at `store`; returns when all are there. On CPUs they talk through the interface that has the
        address `host`: ranks of one machine need no network, and nobody else gets in."""
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
        """All ranks have it, or none. If it fails although the switch asks for it, that is raised."""
        max_bytes, asked = OneShotAllReduce.wanted(self.rank, self.size, self.device)
        max_bytes = self.smallest(max_bytes)
        if not max_bytes:
            return None
        made: OneShotAllReduce | None = None
        failure: Exception | None = None
        try:
            made = OneShotAllReduce(self.rank, self.size, store, self.device, max_bytes)
        except Exception as error:  # of a container that may not share handles, say
            failure = error
        everybody = bool(self.smallest(int(made is not None)))  # whoever failed must say so before anything else
        if failure is not None and asked:
            raise failure
        if not everybody:
            why = failure or "another rank failed"
            logger.warning("small sums go through NCCL, because GPU memory cannot be shared: %s", why)
        return made if everybody else None

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, the same on every rank: x itself, overwritten, or a new tensor if it was summed in
        one exchange. On a GPU it is queued, not waited for."""
        if self.size > 1:
            one_shot = self.one_shot  # which another thread may take away
            if one_shot is not None and x.is_contiguous() and one_shot.takes(x.shape, x.dtype):
                return one_shot.sum(x, x.dtype)[0]
            with self._others() as backend:
                self._wait(backend.allreduce([x]))
        return x

    def can_fuse_all_reduce(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether a sum of such tensors over the ranks is one exchange, which can do the norm behind it as well."""
        one_shot = self.one_shot
        return one_shot is not None and one_shot.takes(shape, dtype)

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(sum + residual), sum + residual), [T, H] each, of the sum of all ranks' x [T, H], or [S, T, H]
        float32, parts to be summed. For shapes that `can_fuse_all_reduce`. Raises PeerLost after the group was given up."""
        one_shot = self.one_shot
        if one_shot is None:
            raise PeerLost(self.lost or "the ranks are not connected")
        return one_shot.sum(x, weight.dtype, (weight, eps), residual)

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x, one after another, on every rank: contiguous [...] -> [R, ...]."""
        if self.size == 1:
            return x[None]
        gathered = x.new_empty(self.size, *x.shape)
        with self._others() as backend:
            self._wait(backend._allgather_base(gathered.view(-1), x.view(-1)))
        return gathered

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, in place, on every rank."""
        if self.size > 1:
            with self._others() as backend:
                self._wait(backend.broadcast(x, 0))
        return x

    def smallest(self, value: int) -> int:
        """The least of all ranks' values."""
        return int(self.all_gather(torch.tensor([value], device=self.device)).min())

    @contextmanager
    def _others(self) -> Iterator[Any]:
        """For what needs the other ranks: gives the backend. A RuntimeError in here becomes a PeerLost."""
        try:
            if self._backend is None:
                raise PeerLost("the ranks are not connected")
            yield self._backend
        except RuntimeError as error:
            raise PeerLost(self.lost or str(error)) from error

    def _wait(self, work: Any) -> None:
        """On a GPU only the stream waits. Gloo's work cannot be called off, but nobody needs to wait for it."""
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
        """End the waiting of whoever waits for another rank. Called from any thread."""
        self.lost = self.lost or why
        if self.device.type == "cuda":
            self.leave()
        elif self._backend is not None:
            # Gloo's own thread goes on waiting, and whoever takes the group apart would wait for that: nobody does.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))

    def leave(self) -> None:
        """Let go of the others. A collective that waits for one of them (NCCL would for ever) ends without a result.
        Called from any thread; what NCCL then has to tidy up is left to one of its own."""
        with self._leaving:
            backend, one_shot, self._backend, self.one_shot = self._backend, self.one_shot, None, None
            if backend is None or self.device.type != "cuda":
                return
            if one_shot is not None and self._stream is not None:
                self._left = one_shot
                self._tidy(one_shot.release, self._stream, self._over)
            self._tidy(backend.abort)

    def _tidy(self, what: Callable[..., object], *args: object) -> None:
        self._tidying.append(threading.Thread(target=what, args=args, name="nanovllm-tidy", daemon=True))
        self._tidying[-1].start()

    def close(self) -> None:
        """Leave, and wait until that is done: a process that ends in the middle of it is torn down by NCCL.

        NCCL keeps what it has until no CUDA graph is left in which it was recorded. They are of no more use and go, but
        not while one runs: the driver would wait for its end, and let nobody else launch what would end it.
        """
        self.leave()
        if self._left is not None and self._stream is not None:
            wait_for(self._stream, ABORTED)
        while self.recorded:
            self.recorded.pop().reset()
        self._over.set()
        with self._leaving:
            tidying, self._tidying = self._tidying, []
        for thread in tidying:
            thread.join(ABORTED)
        self._left = None


def wait_for(stream: torch.cuda.Stream, seconds: float) -> None:
    """Until all work on the stream is done, at most so long."""
    end = monotonic() + seconds
    while not stream.query() and monotonic() < end:
        sleep(0.005)


def devices_of(first: torch.device, ranks: int) -> list[torch.device]:
    """A device for each rank: GPUs from `first` on, or the one CPU. Raises ValueError if there are too few."""
    if first.type != "cuda":
        return [first] * ranks
    index, found = first.index or 0, torch.cuda.device_count()
    if index + ranks > found:
        raise ValueError(
            f"tensor_parallel_size={ranks} from device={str(first)!r} on needs {index + ranks} CUDA GPUs, there are "
            f"{found}; use fewer ranks, or device='cpu'"
        )
    return [torch.device("cuda", index + rank) for rank in range(ranks)]
