"""All-reduce of small tensors in one kernel, over memory that all GPUs of a host have mapped ("symmetric memory").

At decode sizes an all-reduce is all latency. NCCL passes sums around; here every rank puts its part where the others
see it, waits for theirs, and reads them all: one exchange instead of several. Every rank reads as many messages as
there are ranks, so that NCCL wins again where they are long. (TensorRT-LLM and vLLM have kernels of their own for this;
this one is PyTorch's, in `torch.ops.symm_mem`.)

Off unless NANOVLLM_ONE_SHOT_BYTES says up to how many bytes it is used: `python -m benchmarks.tensor_parallel` shows up
to where it is faster. All ranks must be on one host whose GPUs reach each other's memory.
"""

import os
import re
from datetime import timedelta
from typing import Any, Optional, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

SWITCH = "NANOVLLM_ONE_SHOT_BYTES"
ALIGNMENT = 16  # what a thread reads at once, in bytes
DTYPES = (torch.bfloat16, torch.float32)  # those that the kernel knows


class Meeting(dist.Store):
    """The ranks' store, for PyTorch's exchange of handles.

    That numbers the exchanges of a process, not those of a group: the leader of a second engine would count on where
    the first one ended, and its workers, new processes, from 0. Here everybody starts at 0.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._first: dict[str, int] = {}  # number that each kind of exchange began with

    def _key(self, key: str) -> str:
        found = re.fullmatch(r"(.*)/(\d+)/(\d+)", key)  # kind, number, rank
        if found is None:
            return key
        kind, number = found[1], int(found[2])
        return f"{kind}/{number - self._first.setdefault(kind, number)}/{found[3]}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        found = [self._key(key) for key in keys]
        self._store.wait(found) if timeout is None else self._store.wait(found, timeout)


class OneShot:
    """Sums messages of up to `max_bytes`. Fit for CUDA graphs, since the buffer never moves."""

    def __init__(self, rank: int, size: int, store: dist.Store, device: torch.device, max_bytes: int) -> None:
        from torch._C._distributed_c10d import _register_process_group
        from torch.distributed import _symmetric_memory as symmetric_memory

        if rank == 0:
            store.set("one-shot", uuid4().hex)
        # PyTorch finds a group by its name. This one has no backend: it is only ranks and a store where they meet.
        self.name = cast("Any", store.get("one-shot").decode())
        self._meeting = Meeting(dist.PrefixStore(self.name, store))
        self._group = dist.ProcessGroup(self._meeting, rank, size)
        _register_process_group(self.name, self._group)  # which keeps neither alive
        self.buffer = symmetric_memory.empty(max_bytes, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self.buffer, self.name)

    @classmethod
    def wanted(cls, rank: int, size: int, store: dist.Store, device: torch.device) -> Optional["OneShot"]:
        """None where it is not switched on. Raises ValueError if the switch is no number."""
        value = os.environ.get(SWITCH, "0")
        if not value.isdecimal():
            raise ValueError(f"{SWITCH} must be a number of bytes, 0 for never; got {value!r}")
        max_bytes = int(value) // ALIGNMENT * ALIGNMENT
        return cls(rank, size, store, device, max_bytes) if max_bytes else None

    def takes(self, x: Tensor) -> bool:
        return x.dtype in DTYPES and x.is_contiguous() and 0 < x.nbytes <= len(self.buffer) and not x.nbytes % ALIGNMENT

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in a new tensor."""
        own = self.buffer[: x.nbytes].view(x.dtype).view(x.shape)
        summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(own, x, "sum", self.name)
        return summed
