"""What is left of an engine on several GPUs when one of its ranks dies or hangs: nothing, and least of all memory."""

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM
from tests.engine.ranks import engine_checkpoints, generate, pids_of
from tests.engine.test_ranks import CONFIG, LONG, check_death, in_mid_step, in_step_three
from tests.weights import lively_qwen3

__all__ = ["engine_checkpoints"]  # a fixture

pytestmark = pytest.mark.gpu(2)
SLACK = 200 << 20  # bytes: contexts, and what libraries keep for themselves
ON_GPUS: dict[str, Any] = CONFIG | {"device": "cuda", "num_kv_blocks": 2000}  # enough to be seen


def used(index: int) -> int:
    free, total = torch.cuda.mem_get_info(index)
    return total - free


@pytest.mark.parametrize(
    ("number", "message"), [(signal.SIGKILL, "rank 1 died"), (signal.SIGSTOP, "rank 1 was stopped")]
)
@pytest.mark.parametrize("when", [in_step_three, in_mid_step])
def test_memory_is_free_again(
    engine_checkpoints: Path, when: Callable[..., None], number: signal.Signals, message: str
) -> None:
    """And a second engine starts where the first one was."""
    path = lively_qwen3(engine_checkpoints, num_hidden_layers=2)
    with LLM(path, **ON_GPUS) as llm:  # libraries are loaded, contexts made
        expected = [output.outputs[0].token_ids for output in generate(llm, [[1, 2, 3]], LONG)]
    gc.collect()
    torch.cuda.empty_cache()
    before = [used(i) for i in range(2)]
    with LLM(path, **ON_GPUS, enforce_eager=when is in_mid_step) as llm:
        generate(llm, [[1, 2, 3]], LONG)
        assert used(1) > before[1] + SLACK
        [pid] = pids_of(llm)
        when(llm, lambda: os.kill(pid, number))
        check_death(llm, message)
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    assert all(used(i) < before[i] + SLACK for i in range(2))
    with LLM(path, **ON_GPUS) as llm:
        assert [output.outputs[0].token_ids for output in generate(llm, [[1, 2, 3]], LONG)] == expected
