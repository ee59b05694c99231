"""The scheduling policy, case by case: every step is checked against the shadow KV."""

import pytest

from nanovllm.engine.sequence import SequenceStatus
from tests.engine.helpers import BOTH, long_run, make, planned, sequence
from tests.engine.shadow import VOCAB_SIZE

# --- scheduler -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "prompt", "max_tokens", "limits"),
    [
        ({"nb": 4}, 10, 1, ("8", "num_kv_blocks=4", "kvcache_block_size=2", "max_tokens")),
        ({"nb": 4}, 5, 5, ("9 KV slots", "has 8", "num_kv_blocks=4", "max_tokens=5")),
        ({"mbt": 4, "enable_chunked_prefill": False}, 5, 1, ("max_num_batched_tokens=4", "enable_chunked_prefill")),
        ({"max_model_len": 6}, 6, 1, ("max_model_len=6",)),
    ],
)
def test_s1_what_can_never_run_is_refused_and_disturbs_no_one(
    config: dict[str, int], prompt: int, max_tokens: int, limits: tuple[str, ...]
) -> None:
    world = make(**config)  # type: ignore[arg-type]
    beside = world.add([1, 2, 3], max_tokens=2)
    with pytest.raises(ValueError, match=f"prompt has {prompt} tokens") as refusal:
        world.add([1] * prompt, max_tokens=max_tokens)
    assert all(limit in str(refusal.value) for limit in limits)
    world.drain()
    assert world.outputs[beside].finished


def test_s1_what_just_fits_is_accepted() -> None:
    world = make(nb=4)
    id = long_run(world, [1] * 5, 4)  # eight slots: the KV of the ninth token is never needed
    world.drain()
    assert len(world.outputs[id].outputs[0].token_ids) == 4


@BOTH
def test_s1_a_resumed_sequence_comes_in_chunks_also_with_chunking_off(asynchronous: bool) -> None:
    world = make(seqs=1, mbt=4, enable_chunked_prefill=False, enable_prefix_caching=False, asynchronous=asynchronous)
    long = long_run(world, [1, 2, 3], 8, priority=1)
    for _ in range(6):
        world.step()
    world.add([4, 5], max_tokens=1)  # takes the only seat; what is resumed is longer than a step may be
    world.drain()
    assert world.outputs[long].metrics.num_preemptions == 1
    chunks = [item.num_tokens for plan in world.executor.plans for item in plan.scheduled if item.key == 0]
    assert chunks[0] == 3 and 4 in chunks


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_s2_a_pool_that_is_too_small_changes_no_token(temperature: float, asynchronous: bool) -> None:
    world = make(nb=6, asynchronous=asynchronous)
    ids = [long_run(world, [i, 2, 3], 6, temperature=temperature, seed=i) for i in range(3)]
    world.drain()  # the world compares every token with those of the request alone
    assert sum(world.outputs[id].metrics.num_preemptions for id in ids) > 0
    assert all(len(world.outputs[id].outputs[0].token_ids) == 6 for id in ids)


@BOTH
def test_s3_an_urgent_request_takes_the_only_seat_and_gives_it_back(asynchronous: bool) -> None:
    world = make(seqs=1, asynchronous=asynchronous)
    slow = long_run(world, [1, 2, 3], 20, priority=1)
    for _ in range(4):
        world.step()
    equal = world.add([4, 5], priority=1, max_tokens=2)
    world.step()
    assert sequence(world, equal).status is SequenceStatus.WAITING
    urgent = world.add([6, 7], priority=0, max_tokens=2)
    world.step()
    assert sequence(world, urgent).status is SequenceStatus.RUNNING
    done: list[str] = []
    while world.engine.has_unfinished():
        done += [output.request_id for output in world.step() if output.finished]
    assert done == [urgent, slow, equal]  # the preempted one comes back to the place of its arrival


def test_s3_an_urgent_request_preempts_no_one_in_vain() -> None:
    world = make(nb=8)
    equal = long_run(world, [1] * 10, 6)
    worse = long_run(world, [2, 2], 6, priority=1)
    world.step()
    large = long_run(world, [3] * 12, 2)
    world.step()
    assert sequence(world, equal).status is sequence(world, worse).status is SequenceStatus.RUNNING
    assert sequence(world, large).status is SequenceStatus.WAITING
    world.drain()


def test_s3_an_urgent_request_takes_blocks_that_the_less_urgent_share_among_themselves() -> None:
    world = make(nb=8)
    world.add([2] * 12, max_tokens=1, priority=1)
    world.step()
    pair = [long_run(world, [2] * 12 + [i], 3, priority=1) for i in (1, 2)]
    world.step()
    urgent = long_run(world, [3] * 15, 2)
    world.step()
    assert sequence(world, urgent).status is SequenceStatus.RUNNING
    assert all(sequence(world, id).status is SequenceStatus.WAITING for id in pair)
    world.drain()


@BOTH
def test_s3_many_equals_on_a_tight_pool_end_in_bounded_time(asynchronous: bool) -> None:
    world = make(nb=8, asynchronous=asynchronous)
    ids = [long_run(world, [i % VOCAB_SIZE, 1, 2], 12) for i in range(12)]
    steps = 0
    while world.engine.has_unfinished():
        world.step()
        steps += 1
    assert steps < 12 * 13 * 2  # the foremost gets a token in every step
    first_tokens = [world.outputs[id].metrics.first_token_time or 0.0 for id in ids]
    assert first_tokens == sorted(first_tokens)


@BOTH
def test_s4_a_decode_gets_its_token_in_every_step_beside_a_long_prompt(asynchronous: bool) -> None:
    world = make(mbt=2, asynchronous=asynchronous, nb=64)
    a = long_run(world, [1], 50)
    for _ in range(2):
        world.step()
    b = world.add([2, 3] * 20, max_tokens=1)  # one token of budget is left for it in each step
    for _ in range(42):
        before = len(world.requests[a].seen[0])
        world.step()
        assert len(world.requests[a].seen[0]) == before + 1
    assert world.requests[b].over
    world.drain()


def test_the_order_in_a_step_is_decodes_then_unfinished_prompts_then_waiting() -> None:
    world = make(mbt=6)
    long_run(world, [1, 2], 10, priority=1)  # key 0, will decode
    world.step()
    long_run(world, [3] * 9, 2)  # key 1, better than it, computed in chunks
    world.step()
    assert planned(world) == [(0, 2, 1), (1, 0, 5)]
    long_run(world, [4], 2, priority=2)  # keys 2 and 3, waiting
    long_run(world, [5], 2, priority=1)
    world.step()
    assert planned(world) == [(0, 3, 1), (1, 5, 4), (3, 0, 1)]
    world.drain()


def test_s6_degenerate_requests_are_refused() -> None:
    world = make()
    for prompt, reason in ([], "empty"), ([VOCAB_SIZE], f"contains {VOCAB_SIZE}"), ([1, -1], "contains -1"):
        with pytest.raises(ValueError, match=reason):
            world.add(prompt)
    with pytest.raises(TypeError, match="prompt_token_ids"):
        world.add([1.5])  # type: ignore[list-item]
    for max_tokens in 0, -1:
        with pytest.raises(ValueError, match="max_tokens"):
            world.add([1], max_tokens=max_tokens)
    with pytest.raises(ValueError, match="stop_token_ids contains 99"):
        world.add([1], stop_token_ids=[99])
    with pytest.raises(ValueError, match="logprobs=9"):
        world.add([1], logprobs=VOCAB_SIZE + 1)
    assert not world.engine.has_unfinished()


@BOTH
def test_s7_twelve_requests_with_twelve_sets_of_parameters(asynchronous: bool) -> None:
    world = make(seqs=5, asynchronous=asynchronous)
    ids = [
        world.add(
            [i % VOCAB_SIZE, 1],
            max_tokens=1 + i,
            temperature=float(i % 2),
            seed=i,
            ignore_eos=i % 3 > 0,
            min_tokens=i % 2,
        )
        for i in range(12)
    ]
    world.drain()
    # The world has compared each with what these parameters give alone; here only that they do differ.
    assert len({tuple(world.outputs[id].outputs[0].token_ids) for id in ids}) == 12


# --- rows, and the step in flight ------------------------------------------------------------------------------------


def test_a_row_gets_only_the_blocks_it_does_not_know_and_all_of_them_when_it_is_new() -> None:
    world = make(seqs=1)
    long_run(world, [1, 2, 3], 4)
    world.drain()
    sent = [(item.start, item.new_blocks) for plan in world.executor.plans for item in plan.scheduled]
    assert sent == [(0, (0, 1)), (3, ()), (4, (2,)), (5, ())]
    world.add([1, 2, 3], max_tokens=1)
    world.step()
    plan = world.executor.plans[-1]
    assert plan.freed_rows == [0]
    assert plan.scheduled[0].new_blocks[0] == 0 and len(plan.scheduled[0].new_blocks) == 2


def test_a_preempted_sequence_waits_for_its_pending_token() -> None:
    """Freed blocks could take it back at once, but what it would have to compute is not known yet."""
    world = make(seqs=1, asynchronous=True)
    long_run(world, [1, 2, 3], 6, priority=1)
    world.step()  # its first token is in flight
    urgent = world.add([4, 5], max_tokens=1)
    scheduler = world.scheduler
    assert [item.key for item in scheduler.schedule().scheduled] == [1]
    world.abort(urgent)  # seat and blocks are free again
    assert scheduler.schedule().scheduled == []
    plan, handle = world.engine._in_flight.popleft()
    scheduler.commit(plan, handle.result())
    assert [(item.key, item.start, item.num_tokens) for item in scheduler.schedule().scheduled] == [(0, 0, 4)]


def test_who_was_looked_up_is_forgotten_when_more_of_its_text_is_published_or_it_starts() -> None:
    world = make()
    prompts = [3, 3, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6]
    other, same, waiting = (sequence(world, world.add(prompt)) for prompt in prompts)
    scheduler, blocks = world.scheduler, world.scheduler.blocks
    for seq in (other, same):
        blocks.share(seq, [])
        blocks.grow(seq, len(seq.token_ids))
    for num_computed in (2, 4):
        cached, scheduler._looked_up = blocks.find_prefix(waiting), waiting
        scheduler._publish(other, num_computed - 1)
        scheduler._publish(same, num_computed - 1)  # nothing new
        assert scheduler._looked_up is waiting
        scheduler._publish(same, num_computed)
        assert scheduler._looked_up is not waiting and blocks.find_prefix(waiting) != cached
    scheduler._looked_up = waiting
    scheduler._start(waiting, blocks.find_prefix(waiting))
    assert scheduler._looked_up is None


def test_nothing_is_planned_past_the_last_token() -> None:
    """With the length foreseen, as many tokens are computed as it takes, though each step is planned a step ahead."""
    computed = []
    for asynchronous in False, True:
        world = make(asynchronous=asynchronous)
        long_run(world, [1, 2, 3], 5)
        world.drain()
        computed.append(sum(item.num_tokens for plan in world.executor.plans for item in plan.scheduled))
    assert computed == [7, 7]
