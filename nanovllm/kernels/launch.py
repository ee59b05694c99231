"""How our small kernels follow each other without a pause, and where they can run at all.

Between two kernels that depend on each other a GPU drains, launches and fills again: two or three microseconds in
which little is read, and a decode step has hundreds of such borders. With programmatic dependent launch (Hopper and
later) a kernel says `gdc_launch_dependents` when it has begun, and the next one is started as soon as there is room
beside it. That one prepares whatever does not depend on its predecessor, above all it asks for its weights, and calls
`gdc_wait` before it touches anything else: this returns when the predecessor has finished and its writes are visible.
So a kernel that is launched this way must wait, on every path, even if it reads nothing new: its own successor relies
on it.
"""

import importlib.util
import sys
from functools import cache
from typing import Any

import torch

CACHE_LINE = 128  # bytes


def why_no_kernels(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on `device`; None if they can."""
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
    """Whether `device` knows programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of it that a program can have; those of a Hopper GPU for what is no GPU."""
    if device.type != "cuda":
        return 227 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
