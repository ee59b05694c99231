"""nanovllm: an LLM inference engine that a person can read in an afternoon."""

import os
from typing import Any

from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.startup import large_imports
from nanovllm.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]

# An OpenMP thread that waits for others spins, and so takes the core that they need where a CPU is busy. A tenth of
# GNU's default costs nothing on an idle CPU. On a busy CPU, steps become up to five times as fast. Threads that never
# spin are faster still there, and take twice the time on an idle CPU. Read when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:  # a user's own choice stays
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")


def __getattr__(name: str) -> Any:
    # These bring torch along, which takes seconds; the control plane and the command line's help do without.
    if name == "LLM":
        with large_imports():
            from nanovllm.llm import LLM

        return LLM
    if name == "AsyncLLM":
        with large_imports():
            from nanovllm.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
