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
    """New values for single elements of tensors on one device: gathered on the host, and sent in one copy.

    A new sequence changes a few numbers in several tensors. With a copy of its own for each tensor, the host would be
    busy for longer than the device needs for a step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._parts: list[tuple[Tensor, npt.NDArray[Any], npt.NDArray[Any]]] = []

    def add(self, tensor: Tensor, places: npt.NDArray[Any], values: npt.NDArray[Any]) -> None:
        """tensor: int32 of any shape, contiguous. places: indices of elements in the flattened tensor. values: one for
        each place. No element may be written twice before `send`."""
        self._parts.append((tensor, places.ravel(), values.ravel()))

    def send(self) -> None:
        if not self._parts:
            return
        arrays = [places for _, places, _ in self._parts] + [values for *_, values in self._parts]
        places, values = to_device(np.concatenate(arrays, dtype=np.int64), self.device).chunk(2)
        lengths = [len(numbers) for _, numbers, _ in self._parts]
        parts = zip(self._parts, places.split(lengths), values.int().split(lengths), strict=True)
        for (tensor, *_), some_places, some_values in parts:
            tensor.view(-1)[some_places] = some_values
        self._parts.clear()


def host_buffers(length: int, copies: int, device: torch.device) -> Iterator[Tensor]:
    """Buffers [length] int32 on the host, in turns for ever: what is sent from a buffer must not change on its way."""
    pinned = device.type == "cuda"
    return cycle([torch.zeros(length, dtype=torch.int32, pin_memory=pinned) for _ in range(copies)])
