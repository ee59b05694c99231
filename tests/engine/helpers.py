"""Short ways to say what a test needs."""

from typing import Any

import pytest

from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import RequestOutput
from tests.engine.world import World

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def make(*, bs: int = 2, nb: int = 32, seqs: int = 8, mbt: int = 64, asynchronous: bool = False, **more: Any) -> World:
    """bs, nb, mbt: block size, number of blocks, max_num_batched_tokens."""
    return World(
        kvcache_block_size=bs,
        num_kv_blocks=nb,
        max_num_seqs=seqs,
        max_num_batched_tokens=mbt,
        async_scheduling=asynchronous,
        **more,
    )


def sequence(world: World, request_id: str, choice: int = 0) -> Sequence:
    found = [s for s in world.scheduler.sequences.values() if (s.request_id, s.choice) == (request_id, choice)]
    return found[0]


def planned(world: World) -> list[tuple[int, int, int]]:
    """(key, start, num_tokens) of the last plan; keys count up from 0 in order of arrival."""
    return [(item.key, item.start, item.num_tokens) for item in world.executor.plans[-1].scheduled]


def long_run(world: World, prompt: list[int], max_tokens: int, **more: Any) -> str:
    return world.add(prompt, max_tokens=max_tokens, ignore_eos=True, **more)


def run(world: World, prompt: list[int], **params: Any) -> RequestOutput:
    id = world.add(prompt, **params)
    world.drain()
    return world.outputs[id]


def greedy_tokens(prompt: list[int], number: int) -> list[int]:
    return run(make(), prompt, ignore_eos=True, max_tokens=number).outputs[0].token_ids
