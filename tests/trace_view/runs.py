"""Recorded runs to look at: the scheduler over an executor without a model, so that they cost nothing."""

import functools
import random

from nanovllm.trace_view import Recording
from tests.engine.helpers import make


@functools.cache
def crowded(asynchronous: bool = False) -> Recording:
    """Twelve requests, half of them with a common beginning, in a pool so small that some are preempted."""
    world = make(bs=2, nb=16, seqs=3, mbt=8, asynchronous=asynchronous)
    recording = Recording(block_size=2, num_blocks=16, max_num_seqs=3, max_num_batched_tokens=8, title="crowded")
    world.engine.trace.on_event = recording
    draw = random.Random(1)
    for i in range(12):
        own = [draw.randrange(1, 8) for _ in range(draw.randint(2, 9))]
        world.add(([5, 6, 7, 1, 2] if i % 2 else []) + own, max_tokens=draw.randint(2, 9), ignore_eos=True)
        for _ in range(2):
            world.step()
    world.drain()
    assert {"preempted", "finished"} <= {event["type"] for event in recording.events}
    return recording
