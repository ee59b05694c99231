"""Processes: who runs the ranks of an engine, one or several. `start_executor` is the way in."""

import torch

from nanovllm.workers.executor import LocalExecutor, RunnerSpec, current, numbered
from nanovllm.workers.parallel_executor import ParallelExecutor


def find_device(name: str | None) -> torch.device:
    """A GPU if there is one, unless `name` says otherwise. Raises ValueError for a device that is not there."""
    known = ["cpu", "cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name not in (None, *known):
        raise ValueError(f"device must be one of {', '.join(known)} on this machine; got {name!r}")
    if (name or "cpu") != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: no usable CUDA GPU here; use device='cpu'")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def start_executor(spec: RunnerSpec, device: torch.device) -> LocalExecutor | ParallelExecutor:
    """Load the model on `device`, or on as many devices from there on as there are ranks.

    Raises ValueError where there is too little memory or too few GPUs. In a process that torchrun has started for
    another rank than the first, this does not return (see `launched_team.serve`).
    """
    try:
        if spec.config.tensor_parallel_size > 1:
            with current(device):
                return ParallelExecutor.start(spec, device)
        device = numbered(device)
        with current(device):
            return LocalExecutor(spec.make_runner(device))
    except torch.OutOfMemoryError as error:
        remedy = "take a smaller model, or lower num_kv_blocks, max_num_batched_tokens or max_num_seqs"
        raise ValueError(f"{device} has too little free memory for {spec.path}: {error}; {remedy}") from error
