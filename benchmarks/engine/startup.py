"""From starting Python to the first token: with empty compile caches, and once more with what that left in them.

    python -m benchmarks.engine.startup --out DIR [--vllm-path PATH] [--rounds 1]

Imports, loading, compilation, capture of CUDA graphs: all of it counts. The weights are random, so that nothing is read
from a disk for them; Python's own files are in the page cache, because each library is imported once beforehand.
"""

import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.engine import ours, run, vllm
from benchmarks.lib import harness
from benchmarks.lib.harness import Contender, Measured, Showcase, lower
from benchmarks.lib.process import Engine

# Where compilers keep what they made: Triton, Inductor, CUDA's own, vLLM
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")


def measure(engine: Engine) -> list[Measured]:
    """In the process of one contender: the time since it was started."""
    engine.generate([[1, 2, 3]], [1])
    return [{"start": {"seconds": time.time() - engine.started, "ready_seconds": engine.ready_seconds}}]


def cold_and_warm(contender: Contender, options: Namespace) -> dict[str, Any]:
    """Two processes in turn, on caches that are empty at first."""
    import_once(contender)
    with tempfile.TemporaryDirectory() as scratch:
        caches = {name: str(Path(scratch) / name.lower()) for name in CACHES}
        cold, warm = (
            harness.run_process(contender, "benchmarks.engine.startup", {}, options, caches) for _ in range(2)
        )
    scenarios = {"cold": cold["repetitions"][0]["start"], "warm": warm["repetitions"][0]["start"]}
    return {**warm, "repetitions": [scenarios]}


def import_once(contender: Contender) -> None:
    command = [sys.executable, "-c", f"from {contender.spec['package']} import LLM"]
    subprocess.run(command, cwd=harness.ROOT, env=harness.python_path(contender), capture_output=True)


def showcase(options: Namespace) -> Showcase:
    figures = [
        lower(kind, f"start to first token, {caches} compile caches", "s", kind, "seconds")
        for kind, caches in (("cold", "empty"), ("warm", "warm"))
    ]
    title, workload = "From starting Python to the first token", "a prompt of 3 tokens; random weights"
    return Showcase("startup", title, workload, [ours(options), *vllm(options)], figures, headline="warm")


def main() -> None:
    run(showcase, "startup", __doc__, measure=cold_and_warm)


if __name__ == "__main__":
    main()
