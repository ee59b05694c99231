"""Copies from the host to the device that nobody waits for: from pinned memory, in the order of the stream."""

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy of the array on the device. On a CPU the tensor shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    pinned = torch.empty_like(tensor, pin_memory=True)
    np.copyto(pinned.numpy(), array)  # `pin_memory()` would wake up a thread for every core for as little as this
    return pinned.to(device, non_blocking=True)


class Writes:
    """New values for single elements of `memory` [M] int32: gathered on the host, and sent in one copy.

    A new sequence changes a few numbers in several tensors, which are all parts of this memory. With a copy and a
    kernel of its own for each tensor, the host would be busy for longer than the device needs for a step.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._places: list[npt.NDArray[Any]] = []
        self._values: list[npt.NDArray[Any]] = []

    def add(self, part: Tensor, places: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """part: a contiguous view of the memory. places: indices of elements in the flattened part. values: one for
        each place, int32. No element may be written twice before `send`."""
        self._places.append(places.ravel() + part.storage_offset() - self.memory.storage_offset())
        self._values.append(values.ravel())

    def send(self) -> None:
        if not self._places:
            return
        places = np.concatenate(self._places, dtype=np.int64)
        sent = np.empty(3 * len(places), dtype=np.int32)  # two words for each place, then the values
        sent[: 2 * len(places)] = places.view(np.int32)
        np.concatenate(self._values, out=sent[2 * len(places) :])
        on_device = to_device(sent, self.memory.device)
        self.memory[on_device[: 2 * len(places)].view(torch.int64)] = on_device[2 * len(places) :]
        self._places.clear()
        self._values.clear()


def host_buffers(length: int, copies: int, device: torch.device) -> Iterator[Tensor]:
    """Buffers [length] int32 on the host, in turns for ever: what is sent from a buffer must not change on its way."""
    pinned = device.type == "cuda"
    return cycle([torch.zeros(length, dtype=torch.int32, pin_memory=pinned) for _ in range(copies)])
