"""Processes: who runs the ranks of an engine, one or several. `start_executor` is the way in."""

import torch

from nanovllm.workers.executor import LocalExecutor, RunnerSpec, current, numbered
from nanovllm.workers.parallel_executor import ParallelExecutor


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
