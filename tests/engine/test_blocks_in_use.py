"""Prefix cache, shared blocks, aborts and chunks in the engine: every step is checked against the shadow KV."""

import pytest

from nanovllm.engine.sequence import SequenceStatus
from tests.engine.helpers import BOTH, long_run, make, planned, sequence
from tests.engine.shadow import VOCAB_SIZE

# --- prefix cache ----------------------------------------------------------------------------------------------------


@BOTH
def test_p1_a_prompt_that_is_cached_whole(asynchronous: bool) -> None:
    world = make(asynchronous=asynchronous)
    first = world.add([1, 2, 3, 4], logprobs=0)
    world.drain()
    again = [world.add([1, 2, 3, 4], logprobs=0) for _ in range(3)]
    world.drain()
    assert [world.outputs[id].num_cached_tokens for id in (first, *again)] == [0, 2, 2, 2]
    assert len({str(world.outputs[id].outputs[0].token_ids) for id in (first, *again)}) == 1
    assert len({str(world.outputs[id].outputs[0].logprobs) for id in (first, *again)}) == 1


@BOTH
def test_p2_blocks_that_are_refilled_under_other_prefixes(asynchronous: bool) -> None:
    world = make(nb=5, asynchronous=asynchronous)
    for prompt in [1, 2, 5, 6, 1, 2, 7], [5, 6, 5, 6, 7], [5, 6, 1, 2, 1, 2, 7], [1, 2, 5, 6, 7]:
        world.add(prompt, max_tokens=4)
        world.drain()


@pytest.mark.parametrize(("steps", "cached"), [(1, 4), (2, 8)])
def test_p4_only_what_was_computed_before_an_abort_is_found(steps: int, cached: int) -> None:
    world = make(mbt=4)
    first = world.add([1, 2, 3, 4, 5, 6, 1, 2, 3])
    second = world.add([1, 2, 3, 4, 5, 6, 1, 2, 4])
    for _ in range(steps):
        world.step()
    world.abort(first)
    world.drain()
    assert world.outputs[second].num_cached_tokens == cached


def test_p4_what_is_in_flight_is_not_found() -> None:
    world = make(mbt=4, asynchronous=True)
    first = world.add([1, 2, 3, 4, 5, 6, 1, 2, 3])
    second = world.add([1, 2, 3, 4, 5, 6, 1, 2, 4])
    world.step()
    world.step()  # eight tokens submitted, four committed
    world.abort(first)
    world.drain()
    assert world.outputs[second].num_cached_tokens == 4


def test_p5_salts_keep_equal_prompts_apart() -> None:
    world = make()
    for salt, cached in (None, 0), ("a", 0), ("b", 0), ("a", 4):
        id = world.add([1, 2, 3, 4, 5], cache_salt=salt)
        world.drain()
        assert world.outputs[id].num_cached_tokens == cached


def test_p6_a_prompt_cached_in_free_blocks_fits_exactly_and_is_charged_for_the_rest_only() -> None:
    world = make(nb=4, mbt=2)
    world.add([1, 2, 3, 4, 5, 6], max_tokens=1)
    world.drain()
    other = world.add([1, 2, 3, 4, 5, 6, 7, 0], max_tokens=1)
    world.step()
    assert planned(world) == [(1, 6, 2)]  # all four blocks, two tokens of budget, one step
    assert world.outputs[other].finished


# --- blocks ----------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("end", ["finishes", "is aborted", "is preempted"])
def test_b2_one_of_two_sharers_goes_and_the_other_is_unharmed(end: str, asynchronous: bool) -> None:
    world = make(nb=14, asynchronous=asynchronous)
    b = long_run(world, [1, 2, 3, 4, 5, 6, 0], 16)
    for _ in range(3):
        world.step()
    a = long_run(world, [1, 2, 3, 4, 5, 6, 1], 2 if end == "finishes" else 16, priority=2)
    while world.scheduler.sequences[1].status is SequenceStatus.WAITING:
        world.step()
    assert sequence(world, a).block_table[:3] == sequence(world, b).block_table[:3]
    if end == "is aborted":
        world.abort(a)
    if end == "finishes":
        while not world.requests[a].over:
            world.step()
    # Takes all that is free, and from the less urgent also what is not.
    c = long_run(world, [7] * (12 if end == "is preempted" else 14), 2, priority=1)
    world.step()
    assert sequence(world, c).status is SequenceStatus.RUNNING
    assert sequence(world, b).status is SequenceStatus.RUNNING
    world.drain()
    assert end != "is preempted" or world.outputs[a].metrics.num_preemptions == 1


@BOTH
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("steps", range(9))
def test_b3_an_abort_at_any_moment(steps: int, n: int, asynchronous: bool) -> None:
    """From waiting, between chunks, decoding, and in the step that finishes it, to long after."""
    world = make(nb=10, mbt=3, asynchronous=asynchronous)
    other = world.add([1, 2, 3, 1])
    id = world.add([1, 2, 3, 4, 5, 6, 7], max_tokens=3, n=n)
    for _ in range(steps):
        world.step()
    for _ in range(2):
        world.abort(id)
    world.abort("never seen")
    world.drain()
    assert world.outputs[other].finished
    again = world.add([1, 2, 3, 4, 5, 6, 7], id=id)  # a late abort of the old one would be for this one
    world.drain()
    assert world.outputs[again].finished


@BOTH
def test_b3_an_abort_while_preempted(asynchronous: bool) -> None:
    world = make(seqs=1, asynchronous=asynchronous)
    slow = long_run(world, [1, 2, 3], 10, priority=1)
    for _ in range(3):
        world.step()
    urgent = world.add([4, 5])
    world.step()
    assert sequence(world, slow).status is SequenceStatus.WAITING
    world.abort(slow)
    world.drain()
    assert world.outputs[urgent].finished
    assert slow not in world.outputs or not world.outputs[slow].finished


def test_aborted_ones_do_not_pile_up_in_the_queue() -> None:
    world = make(seqs=1)
    long_run(world, [1], 40)
    for _ in range(100):
        world.abort(world.add([1, 2, 3], priority=5))
    assert len(world.scheduler.waiting) == 1
    world.drain()


# --- chunked prefill -------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("cached", [0, 1, 2])
def test_c1_chunk_sizes_and_cached_blocks_do_not_show(cached: int, asynchronous: bool) -> None:
    prompt = [(3 * i) % VOCAB_SIZE for i in range(23)]
    firsts = set()
    for mbt in 1, 2, 3, 5, 64:
        world = make(bs=4, mbt=mbt, asynchronous=asynchronous)
        if cached:
            world.add(prompt[: 4 * cached], max_tokens=1)
            world.drain()
        id = world.add(prompt, logprobs=0)
        world.drain()
        assert world.outputs[id].num_cached_tokens == 4 * cached
        firsts.add(str(world.outputs[id].outputs[0].logprobs))
    assert len(firsts) == 1


@BOTH
def test_c2_only_the_last_chunk_gives_a_token_and_an_end(asynchronous: bool) -> None:
    world = make(mbt=3, asynchronous=asynchronous)
    id = world.add([1, 2, 3, 4, 5, 6, 7, 1], max_tokens=1)
    seen = []
    while world.engine.has_unfinished():
        seen += [(output.finished, len(output.outputs[0].token_ids)) for output in world.step()]
    assert seen == [(True, 1)]
    assert [item.sample for plan in world.executor.plans for item in plan.scheduled] == [False, False, True]
    assert world.outputs[id].outputs[0].finish_reason == "length"
