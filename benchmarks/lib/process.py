"""One contender in a process that does nothing else: `python -m benchmarks.lib.process RESULT < JOB`.

Job and result are JSON (`harness.run_process` writes and reads them). What is measured is up to a function of the
benchmark: `measure(**arguments)` returns the figures of each repetition by scenario. If the job names a package,
`measure` is given an engine of that package first; nanovllm and vLLM are called in the same way.

PyTorch is imported where it is used: by an engine's package, as its users have it, and with nothing before it.
"""

import importlib
import importlib.metadata
import itertools
import json
import logging
import os
import platform
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

ClockName = Literal["cpu", "wall"]
GREEDY: tuple[dict[str, Any], ...] = ({"temperature": 0.0},)
SAMPLED: tuple[dict[str, Any], ...] = ({"temperature": 0.6},)
CLOCKS: dict[ClockName, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}


def choose_clock(device: str, threads: int) -> ClockName:
    """The CPU time of this process where one thread computes all the time: it is what a stopwatch would show on an idle
    machine, and hardly changes on a busy one. The wall clock everywhere else."""
    return "cpu" if device == "cpu" and threads == 1 else "wall"


class Parts(logging.Handler):
    """Collects how many seconds each part of nanovllm's start takes: those that its log tells, and what lies between.

    imported: when all was imported (`time.time`).
    """

    BEFORE: ClassVar = {
        "weights": "configuration",
        "measuring memory": "rest of the kernels' imports",
        "compilation": "KV cache",
        "recording": "KV cache",
    }

    def __init__(self, imported: float) -> None:
        super().__init__()
        self.seconds, self.end = defaultdict[str, float](float), imported

    def emit(self, record: logging.LogRecord) -> None:
        name, seconds = cast("tuple[str, float]", record.args)
        self.seconds[self.BEFORE.get(name, "the rest")] += record.created - seconds - self.end
        self.seconds[name] += seconds
        self.end = record.created


class Engine:
    """nanovllm's or vLLM's `LLM`, with token ids in and out. `started` is when the process began (`time.time`).

    Attributes:
        parts: seconds that each part of the start took; of vLLM, imports alone.
    """

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, package: str, model: str, options: dict[str, Any], started: float) -> None:
        library = importlib.import_module(package)
        self.version = f"{package} {getattr(library, '__version__', '')}".strip()
        self.started = started
        self.make_params, make_llm = library.SamplingParams, library.LLM  # which imports all the rest
        parts = Parts(imported := time.time())
        logger = logging.getLogger("nanovllm.startup")
        logger.addHandler(parts)
        logger.setLevel(logging.DEBUG)
        self.llm = make_llm(model, **{"skip_tokenizer_init": True} | options)
        self.ready_seconds = time.time() - started
        self.parts = {"imports": imported - started, **parts.seconds}

    def generate(
        self, prompts: list[list[int]], max_tokens: Sequence[int], kinds: Sequence[dict[str, Any]] = GREEDY
    ) -> list[Any]:
        """The outputs. The requests get the `kinds` of sampling parameters in turn.

        Raises RuntimeError if a request did not get exactly the tokens it was to get.
        """
        turns = zip(max_tokens, itertools.cycle(kinds), strict=False)
        params = [self.make_params(ignore_eos=True, max_tokens=n, **kind) for n, kind in turns]
        outputs: list[Any] = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        given = [len(output.outputs[0].token_ids) for output in outputs]
        if given != list(max_tokens):
            raise RuntimeError(f"wrong number of tokens: wanted {list(max_tokens)}, got {given}")
        return outputs

    def timed(
        self, prompts: list[list[int]], max_tokens: Sequence[int], kinds: Sequence[dict[str, Any]] = GREEDY
    ) -> float:
        """Seconds that `generate` takes."""
        start = self.clock()
        self.generate(prompts, max_tokens, kinds)
        return self.clock() - start

    def warm_up(self, prompts: list[list[int]], num_tokens: int = 8, kinds: Sequence[dict[str, Any]] = SAMPLED) -> None:
        """Compile what compiles at first use, for these lengths."""
        self.generate([[1, 2, 3]], [num_tokens])
        self.generate(prompts, [num_tokens] * len(prompts), kinds)


def measure_start(engine: Engine) -> list[dict[str, dict[str, float]]]:
    """The time since the process of `engine` was started, and its parts. It is here because other modules import much
    that would count."""
    engine.generate([[1, 2, 3]], [1])
    seconds = time.time() - engine.started
    parts = engine.parts | {"first token": seconds - engine.ready_seconds}
    parts["the rest"] = seconds - sum(seconds for name, seconds in parts.items() if name != "the rest")
    return [{"start": {"seconds": seconds, "ready_seconds": engine.ready_seconds, **parts}}]


def random_prompts(lengths: Sequence[int], seed: int, highest_id: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(0, highest_id) for _ in range(length)] for length in lengths]


def synchronize(device: str) -> None:
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def processor_name() -> str:
    """The CPU's model as the operating system calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return names[0].strip() if names else platform.processor() or platform.machine()


def facts(device: str) -> dict[str, Any]:
    """What a figure depends on besides the code; nothing that names the machine or its owner."""
    import torch

    found = {
        "device": "cpu",
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
    }
    if torch.device(device).type == "cuda":
        versions = {"triton": importlib.metadata.version("triton"), "cuda": torch.version.cuda}
        found |= {"device": torch.cuda.get_device_name(device), **versions}
    return found


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job in this process."""
    module_name, _, function = job["measure"].rpartition(".")
    if job.get("variant") is not None:
        importlib.import_module(module_name).prepare(job["variant"])
    engine = None
    if "package" in job:  # before all that a benchmark imports, which is no part of a start
        engine = Engine(job["package"], job["model"], job["options"], job["started"])
    measure, about = getattr(importlib.import_module(module_name), function), {}
    if engine is not None:
        measure = partial(measure, engine)
        about = {"engine": engine.version, "ready_seconds": engine.ready_seconds}
    machine = facts(job["device"]) | {"clock": job["clock"]}
    return {"pid": os.getpid(), "facts": machine, "repetitions": measure(**job["arguments"]), **about}


def main() -> None:
    job = json.load(sys.stdin)
    if job["threads"]:
        import torch

        torch.set_num_threads(job["threads"])
    Path(sys.argv[1]).write_text(json.dumps(run(job)))


# vLLM starts its engine in a process of its own that imports this module again
if __name__ == "__main__":
    main()
