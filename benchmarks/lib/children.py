"""Processes that a benchmark starts. They end with the benchmark, and so do the processes that they have started.

That holds whatever ends the benchmark. The signal of a time limit runs no `finally`. The children are in sessions of
their own, which no signal to the benchmark's group reaches. So there is one more process, the watcher, which is told of
every child through a pipe. The pipe breaks when the benchmark ends. Then the watcher ends the children that are left.
"""

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import IO, Any

GRACE_SECONDS = 10  # between the watcher's SIGTERM, on which servers clean up, and its SIGKILL
WATCHER = sys.executable, "-P", __file__


@contextmanager
def child(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process, with the options of `subprocess.Popen`. At the end of the block it is killed with all that it
    has started."""
    told = watcher()
    process = subprocess.Popen(command, text=True, start_new_session=True, **options)
    print(process.pid, file=told, flush=True)
    try:
        yield process
    finally:
        end(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        print(process.pid, file=told, flush=True)


@cache
def watcher() -> IO[str]:
    """The pipe to the watcher of this process. A child's process id is written to it when the child starts or ends."""
    process = subprocess.Popen(
        WATCHER, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    atexit.register(process.communicate)
    assert process.stdin is not None
    return process.stdin


def end(group: int, signum: int) -> bool:
    """Send a signal (0: none) to a process group. Returns whether there is such a group."""
    with suppress(ProcessLookupError):
        os.killpg(group, signum)
        return True
    return False


def watch(told: Iterable[str]) -> None:
    """The watcher: when the pipe breaks, end the groups that have begun and not ended. `told`: lines of process ids."""
    groups: set[int] = set()
    for line in told:
        groups ^= {int(line)}
    deadline = time.monotonic() + GRACE_SECONDS
    groups = {group for group in groups if end(group, signal.SIGTERM)}
    while groups and time.monotonic() < deadline:
        time.sleep(0.1)
        groups = {group for group in groups if end(group, 0)}
    for group in groups:
        end(group, signal.SIGKILL)


if __name__ == "__main__":
    watch(sys.stdin)
