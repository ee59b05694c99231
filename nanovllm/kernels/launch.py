"""How our small kernels follow each other without a pause, and what the GPU that they run on can do.

Between two kernels that depend on each other a GPU drains, launches and fills again. That takes two or three
microseconds in which little is read, and a decode step has hundreds of such borders. With programmatic dependent launch
(Hopper and later) a kernel calls `gdc_launch_dependents` when it has begun, and the next kernel is started as soon as
there is room beside it. The next kernel prepares whatever does not depend on its predecessor: above all it asks for its
weights. Then it calls `gdc_wait` before it touches anything else. That call returns when the predecessor has finished
and its writes are visible.

So a kernel that is launched this way must call `gdc_wait` on every path, even if it reads nothing new: its own
successor relies on it. In the kernels the switch is called PDL.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

CACHE_LINE = 128  # bytes


@cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability, major and minor; None where `device` is no GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether `device` has programmatic dependent launch."""
    found = capability(device)
    return found is not None and found[0] >= 9


@cache
def is_hopper(device: torch.device) -> bool:
    return capability(device) == (9, 0)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have. Where `device` is no GPU, those of a Hopper GPU."""
    if device.type != "cuda":
        return 227 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@cache
def shared_memory_of_sm(device: torch.device) -> int:
    """Bytes of shared memory that the programs of one multiprocessor have together, 1 KiB of each for the system. Where
    `device` is no GPU, those of a Hopper GPU."""
    if device.type != "cuda":
        return 228 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_multiprocessor)


@triton.jit
def prefetch_l2(pointer):  # type: ignore[no-untyped-def]
    """Have the cache lines of all pointers brought to the L2 cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointer], dtype=tl.int32, is_pure=False, pack=1
    )
