"""One engine in a process that does nothing else: `python -m benchmarks.engine.engine_worker RESULT < JOB`.

Job and result are JSON (`engine_harness.run_process` writes and reads them). nanovllm and vLLM are called in the same
way, so one class serves both. What is measured is up to the benchmark's module: its function `measure(engine,
**arguments)` returns the figures of each repetition.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.worker import facts

# A repetition's figures by scenario: {"batch 1": {"ms_per_token": 1.2}}
Repetition = dict[str, dict[str, Any]]


class Engine:
    """nanovllm's or vLLM's `LLM`, with token ids in and out. `started` is when the process began (`time.time`)."""

    def __init__(self, package: str, model: str, options: dict[str, Any], started: float) -> None:
        library = importlib.import_module(package)
        self.version = f"{package} {getattr(library, '__version__', '')}".strip()
        self.started = started
        self.make_params = library.SamplingParams
        self.llm = library.LLM(model, skip_tokenizer_init=True, **options)
        self.ready_seconds = time.time() - started

    def generate(self, prompts: list[list[int]], max_tokens: Sequence[int], temperature: float = 0.0) -> list[Any]:
        """The outputs. Raises RuntimeError if a request did not get exactly the tokens it was to get."""
        params = [self.make_params(temperature=temperature, ignore_eos=True, max_tokens=n) for n in max_tokens]
        outputs: list[Any] = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        given = [len(output.outputs[0].token_ids) for output in outputs]
        if given != list(max_tokens):
            raise RuntimeError(f"wrong number of tokens: wanted {list(max_tokens)}, got {given}")
        return outputs

    def timed(self, prompts: list[list[int]], max_tokens: Sequence[int], temperature: float = 0.0) -> float:
        """Seconds that `generate` takes."""
        start = time.perf_counter()
        self.generate(prompts, max_tokens, temperature)
        return time.perf_counter() - start

    def warm_up(self, prompts: list[list[int]], num_tokens: int = 8) -> None:
        """Compile what compiles at first use, for these lengths."""
        self.generate([[1, 2, 3]], [num_tokens])
        self.generate(prompts, [num_tokens] * len(prompts), temperature=0.6)


def random_prompts(lengths: Sequence[int], seed: int, highest_id: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(0, highest_id) for _ in range(length)] for length in lengths]


def versions(device: str) -> dict[str, Any]:
    if torch.device(device).type == "cpu":
        return {}
    import triton

    return {"triton": triton.__version__, "cuda": torch.version.cuda}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job in this process."""
    if job["variant"] is not None:
        from benchmarks.engine.ablations import VARIANTS

        patch = VARIANTS[job["variant"]].patch
        if patch is not None:
            patch()
    engine = Engine(job["package"], job["model"], job["options"], job["started"])
    repetitions: list[Repetition] = importlib.import_module(job["module"]).measure(engine, **job["arguments"])
    return {
        "pid": os.getpid(),
        "engine": engine.version,
        "ready_seconds": engine.ready_seconds,
        "facts": {**facts(job["device"]), **versions(job["device"]), "clock": "wall"},
        "repetitions": repetitions,
    }


def main() -> None:
    job = json.load(sys.stdin)
    result = run(job)
    Path(sys.argv[1]).write_text(json.dumps(result))


# vLLM starts its engine in a process of its own that imports this module again
if __name__ == "__main__":
    main()
