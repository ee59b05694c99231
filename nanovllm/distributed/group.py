"""Collectives among the ranks of one engine: NCCL on GPUs, gloo on CPUs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=5)  # for a rank that hangs; one that dies is noticed at once


class PeerLost(RuntimeError):
    """Another rank did not do its part. Why, the leader finds out."""


class Group:
    """One rank's connection to the others. No global of the process, so that a process may have several engines.

    A rank alone (size 1) has nobody to talk to, and every collective is the identity.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._backend: Any = None  # between `join` and `leave`

    def join(self, store: dist.Store) -> None:
        """Meet the others at `store`; returns when all are there."""
        if self.device.type == "cuda":
            # By default PyTorch ends the whole process when a collective fails, and with it the user's program.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            self._backend = dist.ProcessGroupNCCL(store, self.rank, self.size, dist.ProcessGroupNCCL.Options())
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            # On the loopback interface: ranks of one machine need no network, and nobody else gets in.
            options._devices, options._timeout = [gloo.create_device(hostname=HOST)], TIMEOUT
            self._backend = gloo(store, self.rank, self.size, options)
        self.all_reduce(torch.zeros(1, device=self.device)).item()  # NCCL connects at its first collective

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place, the same on every rank. On a GPU it is queued, not waited for."""
        if self.size > 1:
            with self._others() as backend:
                backend.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x, one after another, on every rank: [...] -> [R, ...]."""
        if self.size == 1:
            return x[None]
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._others() as backend:
            backend.allgather([parts], [x]).wait()
        return torch.stack(parts)

    def smallest(self, value: int) -> int:
        """The least of all ranks' values."""
        return int(self.all_gather(torch.tensor(value, device=self.device)).min())

    @contextmanager
    def _others(self) -> Iterator[Any]:
        """What fails in here is not this rank's fault."""
        try:
            if self._backend is None:
                raise PeerLost("the ranks are not connected")
            yield self._backend
        except RuntimeError as error:
            raise PeerLost(str(error)) from error

    @property
    def connected(self) -> bool:
        return self.size == 1 or self._backend is not None

    def leave(self) -> None:
        """Let go of the others. A collective that waits for one of them (NCCL would for ever) ends without a result."""
        backend, self._backend = self._backend, None
        if backend is not None and self.device.type == "cuda":
            backend.abort()


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
