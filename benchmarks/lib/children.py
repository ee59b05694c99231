"""Processes that a benchmark starts. They end with the benchmark, and so does what they have started in turn.

That holds whatever ends the benchmark. A time limit's signal runs no `finally`, and the children are in sessions of
their own, which no signal to the benchmark's group reaches. So a watcher, which is one more process, is told of every
child. It reads from a pipe that breaks with the benchmark, and then ends the children that are left.
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
    """Where to tell a watcher of the children of this process, each when it begins and when it has ended."""
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
    """The watcher: end the groups that have begun and not ended when nobody is left to tell of them."""
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
