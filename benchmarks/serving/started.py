"""A server as a process of its own, for those who measure it from outside. Imports no torch."""

import os
import re
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.lib.children import child

ROOT = Path(__file__).parents[2]
OURS = r"serving at http://127\.0\.0\.1:(\d+)"  # what `nanovllm serve` and examples/ray_serve.py say


@contextmanager
def started(
    command: list[str], ready: str = OURS, stderr: int | None = None, env: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server and its port, once it says `ready`. At the end of the block the server is stopped, with all processes
    that it has started, and `returncode` is set.

    ready:   a regular expression whose group is the port; without a group the port is 0.
    stderr:  as in `Popen`; `subprocess.STDOUT` to look for `ready` there, too.
    env:     variables that are added to those of this process.

    Raises RuntimeError if the server does not start.
    """
    with child(command, cwd=ROOT, env=os.environ | (env or {}), stdout=subprocess.PIPE, stderr=stderr) as popen:
        try:
            assert popen.stdout is not None
            said = deque[str](maxlen=30)
            for line in popen.stdout:
                said.append(line)
                if found := re.search(ready, line):
                    break
            else:
                raise RuntimeError("the server did not start:\n" + "".join(said))
            threading.Thread(target=popen.stdout.read, daemon=True).start()  # a pipe that is full would stop the server
            yield popen, int(found[1]) if found.re.groups else 0
        finally:
            popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                popen.wait(60)


def check_status(popen: subprocess.Popen[str]) -> None:
    """Raises RuntimeError for a server that ended with an error."""
    if popen.returncode:
        raise RuntimeError(f"the server ended with status {popen.returncode}")
