"""Sums of small tensors in one exchange, over memory that all GPUs of a host have mapped ("symmetric memory").

At decode sizes an all-reduce is all latency. NCCL passes sums from rank to rank. Here every rank writes its part to
where the others wait for it, and adds all parts up by itself, in `nanovllm/kernels/fused/sum_over_ranks.py`. The same
kernel does the norm that follows. Every rank sends its whole part to each of the others, so NCCL is faster for long
messages (`python -m benchmarks.engine tensor_parallel` shows from where on).

One-shot sums are used up to `default_bytes`, where all ranks are on one host whose GPUs reach each other's memory over
NVLink. NANOVLLM_ONE_SHOT_BYTES sets another number of bytes, 0 for never. The kernel's buffer limits rows and their
length in any case. A kernel that waits for a rank that is gone would hold the GPU for ever: see `release`.
"""

import ctypes
import os
import re
import threading
from datetime import timedelta
from time import monotonic
from typing import Any, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

SWITCH = "NANOVLLM_ONE_SHOT_BYTES"
MAX_BYTES = 1024 * 1024  # MAX_ROWS rows of 8 KiB; on 2 and 4 H200s twice as much was still faster than NCCL (cc9dd9c)
MAX_BYTES_OF_MANY = 256 * 1024  # more ranks send more messages; a guess, since only 2 and 4 ranks were measured
MANY = 5  # ranks
PATIENCE = timedelta(seconds=30)  # how long ranks wait for each other's handles
STUCK, PAUSE = 0.2, 0.005  # seconds until kernels count as stuck, and between two looks
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class RendezvousStore(dist.Store):
    """The store through which PyTorch exchanges the handles of symmetric memory among the ranks.

    PyTorch numbers the exchanges of a process, not those of a group. For a second engine the leader would count on, and
    its workers, new processes, would count from 0. Here every rank starts at 0.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._first: dict[str, int] = {}  # the number that each kind of exchange began with

    def _key(self, key: str) -> str:
        # kind / number / rank, or what belongs to a barrier
        found = re.fullmatch(r"(.*)/(\d+)/(\d+|num_members|last_member)", key)
        if found is None:
            return key
        kind, number = found[1], int(found[2])
        return f"{kind}/{number - self._first.setdefault(kind, number)}/{found[3]}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._key(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait([self._key(key) for key in keys], PATIENCE if timeout is None else timeout)


class OneShotAllReduce:
    """Sums tensors [T, H] of up to `max_bytes` over the ranks. Fit for CUDA graphs, since the buffers never move.

    All ranks make theirs at the same time. Raises what PyTorch raises if memory cannot be shared, or if another rank
    does not come within `PATIENCE`.
    """

    def __init__(self, rank: int, size: int, store: dist.Store, device: torch.device, max_bytes: int) -> None:
        from torch._C._distributed_c10d import _register_process_group
        from torch.distributed import _symmetric_memory as symmetric_memory

        from nanovllm.kernels.fused.sum_over_ranks import EMPTY, MAX_ROWS, ROW_BYTES, sum_over_ranks

        if rank == 0:
            store.set("one-shot", uuid4().hex)
        # PyTorch finds a group by its name. This group has no backend, only ranks and a store where they meet.
        self.name = cast("Any", store.get("one-shot").decode())
        self._rendezvous = RendezvousStore(dist.PrefixStore(self.name, store))
        self._group = dist.ProcessGroup(self._rendezvous, rank, size)
        _register_process_group(self.name, self._group)  # which keeps neither alive
        shape = 2, size, MAX_ROWS, ROW_BYTES // 4
        self._memory = symmetric_memory.empty(shape, dtype=torch.int32, device=device)
        handle: Any = symmetric_memory.rendezvous(self._memory, self.name)
        words = tuple(handle.get_buffer(peer, shape, torch.int32) for peer in range(size))
        self._buffers = {4: words, 2: tuple(buffer.view(torch.int16) for buffer in words)}  # by the width of a number
        self._turn = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        self._sum, self._rank, self._device, self.max_bytes = sum_over_ranks, rank, device, max_bytes
        self._memory.fill_(EMPTY)  # nobody sends anything before all have said that they are here
        torch.cuda.synchronize(device)

    @staticmethod
    def wanted(rank: int, size: int, device: torch.device) -> tuple[int, bool]:
        """Up to how many bytes to use it, and whether the user's switch says so. Raises ValueError for a bad switch."""
        value = os.environ.get(SWITCH)
        if value is None:
            peers = [(device.index or 0) - rank + peer for peer in range(size)]
            return (default_bytes(size) if all(reaches(device, peer) for peer in peers) else 0), False
        if not value.isdecimal():
            raise ValueError(f"{SWITCH} must be a number of bytes, 0 for never; got {value!r}")
        return int(value), True

    def release(self, stream: torch.cuda.Stream, over: threading.Event) -> None:
        """Let kernels end that wait on `stream` for a rank that is gone; their sums mean nothing. Runs in a thread.

        Whenever the stream is stuck, zeros are written to where the kernels wait for numbers, until `over` is set: no
        such kernel is launched after that.
        """
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
            busy_since: float | None = None
            while not over.wait(PAUSE):
                if stream.query():
                    busy_since = None
                    continue
                busy_since = busy_since or monotonic()
                if monotonic() > busy_since + STUCK:
                    self._memory.zero_()
                    torch.cuda.current_stream().synchronize()

    def takes(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether tensors of this shape, which must be [T, H], and this dtype can be summed here."""
        if len(shape) != 2 or dtype.itemsize not in self._buffers:
            return False
        rows, row_bytes = shape[0], shape[1] * dtype.itemsize
        places, place_bytes = self._memory.shape[2], 4 * self._memory.shape[3]
        return 0 < rows <= places and 0 < row_bytes <= place_bytes and rows * row_bytes <= self.max_bytes

    def sum(
        self,
        x: Tensor,
        dtype: torch.dtype,
        norm: tuple[Tensor, float] | None = None,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The sum of all ranks' x, with residual and norm: see `sum_over_ranks`.

        x: [T, H], or [S, T, H] float32 to be summed over S. `takes` must accept [T, H] and `dtype`.
        """
        buffers = self._buffers[dtype.itemsize]
        return self._sum(x, buffers, self._turn, self._rank, dtype, norm=norm, residual=residual)


def default_bytes(ranks: int) -> int:
    return MAX_BYTES if ranks < MANY else MAX_BYTES_OF_MANY


def reaches(device: torch.device, peer: int) -> bool:
    """Whether `device` is the GPU `peer`, or can write to its memory over NVLink, which unlike PCIe has atomics."""
    if device.type != "cuda" or not 0 <= peer < torch.cuda.device_count():
        return False
    own = device.index or 0
    return peer == own or (torch.cuda.can_device_access_peer(own, peer) and link_has_atomics(own, peer))


def link_has_atomics(first: int, second: int) -> bool:
    """Whether the link between two GPUs has atomics. Asks the driver, since PyTorch has no call for it; False if the
    driver does not say."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        handles, found = [ctypes.c_int(), ctypes.c_int()], ctypes.c_int()
        failed = [driver.cuDeviceGet(ctypes.byref(h), i) for h, i in zip(handles, (first, second), strict=True)]
        failed.append(driver.cuDeviceGetP2PAttribute(ctypes.byref(found), NATIVE_ATOMICS, *handles))
    except (OSError, AttributeError):
        return False
    return not any(failed) and bool(found.value)
