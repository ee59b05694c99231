"""Kernels that take no time to compile. The variable `ONLY` names the one process that survives the import of this.
The variable `LAUNCHERS` names a directory in which a file appears for each launcher that would be compiled."""

import os
import signal
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.nvidia import driver

ONLY = "TESTS_SURVIVING_PROCESS"
LAUNCHERS = "TESTS_LAUNCHERS"

if os.environ.get(ONLY, str(os.getpid())) != str(os.getpid()):
    os.kill(os.getpid(), signal.SIGKILL)  # as where memory runs out


def note_launcher(source: Any, metadata: Any) -> None:
    """Stands in for the compilation of what launches kernels with the types of `source`."""
    Path(os.environ[LAUNCHERS], f"{source.name} {[*source.constants.values()]}").touch()


if LAUNCHERS in os.environ:
    driver.make_launcher, driver.CudaLauncher = None, note_launcher

FACTOR = tl.constexpr(2.0)


@triton.jit
def scaled(x):  # type: ignore[no-untyped-def]
    return x * FACTOR


@triton.jit
def doubling(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, SIZE)
    tl.store(x + places, scaled(tl.load(x + places)))


@triton.jit
def quadrupling(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, SIZE)
    tl.store(x + places, 2 * scaled(tl.load(x + places)))


@triton.jit
def impossible(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.static_assert(SIZE > 2**20, "no such size")


@triton.jit
def filling(x, value, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x + tl.arange(0, SIZE), value)
