"""How our small kernels follow each other without a pause, and where kernels can run at all.

Between two kernels that depend on each other a GPU drains, launches and fills again. That takes two or three
microseconds in which little is read, and a decode step has hundreds of such borders. With programmatic dependent launch
(Hopper and later) a kernel calls `gdc_launch_dependents` when it has begun, and the next kernel is started as soon as
there is room beside it. The next kernel prepares whatever does not depend on its predecessor: above all it asks for its
weights. Then it calls `gdc_wait` before it touches anything else. That call returns when the predecessor has finished
and its writes are visible.

So a kernel that is launched this way must call `gdc_wait` on every path, even if it reads nothing new: its own
successor relies on it. In the kernels the switch is called PDL.
"""

import importlib.util
import sys
from functools import cache
from typing import Any

import torch

CACHE_LINE = 128  # bytes


def why_no_kernels(device: torch.device) -> str | None:
    """The reason why the Triton kernels cannot run on `device`; None if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"its kernels need an NVIDIA GPU, and {str(device)!r} is none"
    if not sys.platform.startswith("linux") or importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton; Linux only)"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"its kernels need compute capability 8.0 or more, and this GPU has {major}.{minor}"
    return None


@cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether `device` has programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have. Where `device` is no GPU, those of a Hopper GPU."""
    if device.type != "cuda":
        return 227 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
