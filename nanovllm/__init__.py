"""nanovllm: an LLM inference engine that a person can read in an afternoon."""

import os
from typing import Any

from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]

# A thread of OpenMP's that waits for others spins by default, and so takes the core that they need: on a busy CPU a
# step takes thirty times as long. Read when torch is imported, so it has to be here; a user's own choice stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def __getattr__(name: str) -> Any:
    # These bring torch along, which takes seconds; the control plane and the command line's help do without.
    if name == "LLM":
        from nanovllm.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from nanovllm.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
