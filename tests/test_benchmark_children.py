"""What a benchmark has started ends with it, even if the benchmark is killed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A benchmark whose child starts a process in turn. All three hold the pipe to the test.
GRANDCHILD = "import time; print('grandchild', flush=True); time.sleep(600)"
CHILD = f"""import subprocess, sys
subprocess.run([sys.executable, "-c", {GRANDCHILD!r}])
"""
BENCHMARK = f"""import sys, time
from benchmarks.lib.children import child
with child([sys.executable, "-c", {CHILD!r}]):
    {{}}
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_children_end_with_a_benchmark_that_is_killed(signum: signal.Signals) -> None:
    status = run(BENCHMARK.format("time.sleep(600)"), signum)
    assert status == -signum


def test_children_end_where_a_benchmark_fails() -> None:
    assert run(BENCHMARK.format("sys.stdin.readline(); sys.exit(3)")) == 3


def run(program: str, signum: int | None = None) -> int:
    """The status of a benchmark. Raises TimeoutExpired if any of its processes outlives it."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        assert benchmark.stdout.readline() == "grandchild\n"
        if signum is not None:
            benchmark.send_signal(signum)
        benchmark.communicate("\n", timeout=60)  # returns when nobody holds the pipe any more
    return benchmark.returncode
