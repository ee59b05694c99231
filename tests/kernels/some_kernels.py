"""Kernels that take no time to compile. The variable `ONLY` names the one process that survives the import of this."""

import os
import signal

import triton
import triton.language as tl

ONLY = "TESTS_SURVIVING_PROCESS"

if os.environ.get(ONLY, str(os.getpid())) != str(os.getpid()):
    os.kill(os.getpid(), signal.SIGKILL)  # as where memory runs out


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
