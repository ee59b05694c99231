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


def host_buffers(length: int, copies: int, device: torch.device) -> Iterator[Tensor]:
    """Buffers [length] int32 on the host, in turns for ever: what is sent from a buffer must not change on its way."""
    pinned = device.type == "cuda"
    return cycle([torch.zeros(length, dtype=torch.int32, pin_memory=pinned) for _ in range(copies)])
