"""Stage 5's scheduler: who computes how much in a step. No model anywhere."""

from collections.abc import Callable
from typing import Any

import pytest

from stages.core import SamplingParams, Sequence, Trace
from tests.stages.likely import check, exercise
from tests.stages.subject import Subject, since


class Rig:
    """A scheduler that is stepped by hand."""

    def __init__(self, subject: Subject, num_blocks: int, block_size: int, seats: int, budget: int) -> None:
        self.pool = subject.part("PrefixCachingPool")(num_blocks, block_size)
        self.told: list[Any] = []
        self.scheduler = subject.part("Scheduler")(self.pool, seats, budget, Trace(self.told.append))
        self.all: list[Sequence] = []

    def add(self, *prompt_lengths: int) -> list[Sequence]:
        for length in prompt_lengths:
            n = len(self.all)
            tokens = [100 * n + i for i in range(length)]
            self.all.append(Sequence(n, tokens, length, SamplingParams(max_tokens=99), seed=n))
            self.scheduler.add(self.all[-1])
        return self.all

    def step(self) -> dict[int, int]:
        """Schedule, and do what an engine does with the plan. Returns the tokens that each request computed."""
        plan = self.scheduler.schedule()
        for s in plan:
            assert len(s.seq.block_table) * self.pool.block_size >= s.seq.num_computed + s.num_tokens
        new = [1000 * (s.seq.request + 1) + len(s.seq.token_ids) for s in plan if s.sample]
        self.scheduler.commit(plan, new, frozenset())
        return {s.seq.request: s.num_tokens for s in plan}

    def queues(self) -> tuple[list[int], list[int]]:
        return [s.request for s in self.scheduler.running], [s.request for s in self.scheduler.waiting]


@pytest.fixture
def rig(subject: Subject) -> Callable[..., Rig]:
    def make(num_blocks: int = 64, block_size: int = 2, seats: int = 4, budget: int = 8) -> Rig:
        return Rig(subject, num_blocks, block_size, seats, budget)

    return make


@exercise("5.1")
def test_victims_are_the_latest_arrivals_until_there_is_room(rig: Callable[..., Rig]) -> None:
    """Three run, each with two blocks of 2 tokens, and none is free."""
    r = rig(num_blocks=6)
    a, b, c = r.add(4, 4, 4)
    for seq in (a, b, c):
        assert r.pool.allocate(seq, 4)
        r.scheduler.running.append(r.scheduler.waiting.popleft())
    victims: list[int] = []

    def preempt(seq: Sequence) -> None:
        """As exercise 5.3 will have it, but that nobody waits."""
        assert seq in r.scheduler.running, f"request {seq.request} no longer runs\nlikely: preempt itself takes it out"
        victims.append(seq.request)
        r.scheduler.running.remove(seq)
        r.pool.release(seq)

    r.scheduler.preempt = preempt
    likely: dict[str, Any] = {
        "the earliest arrival is at the front of self.running, the latest at its end": [0],
        "nobody was preempted": [],
    }
    got = r.scheduler.make_room(a, 6)  # one more block for a: c gives two
    check("requests preempted for one block", victims, [2], likely)
    check("what make_room returned", got, True, {"the victim was another sequence, so the requester goes on": False})
    likely = {
        "the victim's blocks are free, but the requester has not taken them: call self.allocate again, in a loop": 2
    }
    check("blocks of the requester", len(a.block_table), 3, likely)
    r.scheduler.make_room(b, 6)
    victims.clear()
    got = r.scheduler.make_room(a, 8)
    check(
        "requests preempted for one block more",
        victims,
        [1],
        {"no victim was chosen, but no block is free: request 1 took the last one": []},
    )
    check("what make_room returned", got, True)
    check("running", [s.request for s in r.scheduler.running], [0])

    r = rig(num_blocks=5)
    a, b, c = r.add(4, 2, 2)
    for seq in (a, b, c):
        assert r.pool.allocate(seq, len(seq.token_ids))
        r.scheduler.running.append(r.scheduler.waiting.popleft())
    victims.clear()
    r.scheduler.preempt = preempt
    r.scheduler.make_room(a, 10)  # three more blocks: one is free, b and c have one each
    check(
        "requests preempted for three blocks", victims, [2, 1], {"one victim may not be enough: preempt in a loop": [2]}
    )

    r = rig(num_blocks=4)
    a, b, *_ = r.add(4, 4)
    for seq in (a, b):
        assert r.pool.allocate(seq, 4)
        r.scheduler.running.append(r.scheduler.waiting.popleft())
    victims.clear()
    r.scheduler.preempt = preempt
    got = r.scheduler.make_room(b, 5)  # b is the latest itself
    likely = {
        "make_room refuses, and the requester keeps its blocks: it must be preempted itself": [],
        "the victim was the requester itself, and the loop went on: return False then": [1, 0],
        "the requester is spared: as the latest arrival it must be preempted itself": [0],
    }
    check("requests preempted for a block more of the latest arrival", victims, [1], likely)
    likely = {"a sequence that was preempted itself computes nothing in this step": True}
    check("what make_room returned to the latest arrival", got, False, likely)


@exercise("5.2")
def test_admitted_in_order_with_room_for_all_and_a_share_of_the_budget(rig: Callable[..., Rig]) -> None:
    """Waiting: prompts of 6, 8 and 2 tokens. Blocks of 2 tokens."""
    r = rig(num_blocks=16, budget=64)
    r.add(6, 8, 2)
    plan: list[Any] = []
    r.scheduler.admit(plan, 10)
    shares = [(s.seq.request, s.num_tokens) for s in plan]
    likely: dict[str, Any] = {
        "an admitted sequence must leave self.waiting, where it is the first: popleft": [(0, 6), (0, 4)],
        "nothing was scheduled: plan.append(Scheduled(seq, num_tokens))": [],
        "the budget is not lowered: budget -= num_tokens": [(0, 6), (1, 8), (2, 2)],
        "the last sequence takes more than is left: min(.., budget)": [(0, 6), (1, 8)],
    }
    check("shares (request, tokens) of a budget of 10", shares, [(0, 6), (1, 4)], likely)
    computed = [seq.num_computed for seq in r.scheduler.running]
    likely = {"planned tokens are not computed yet: commit counts them when the step is over": [6, 4]}
    check("num_computed of those that run", computed, [0, 0], likely)
    likely = {
        "an admitted sequence must join self.running": ([], [2]),
        "an admitted sequence must leave self.waiting": ([0, 1], [0, 1, 2]),
    }
    check("running, waiting", r.queues(), ([0, 1], [2]), likely)
    for s in plan:
        blocks = len(s.seq.block_table)
        likely = {
            "there is room for this step's share only: the sequence would soon be preempted": -(-s.num_tokens // 2)
        }
        check(f"blocks of request {s.seq.request}, one for two tokens", blocks, len(s.seq.token_ids) // 2, likely)

    r = rig(num_blocks=6)
    r.add(6, 8, 2)
    plan = []
    r.scheduler.admit(plan, 64)  # three blocks are left after the first: too few for the second
    likely = {
        "the third request was admitted before the second: a request that does not fit blocks all behind it": (
            [0, 2],
            [1],
        ),
        "admitted without room for all its tokens": ([0, 1], [2]),
    }
    check("running, waiting, with 6 blocks", r.queues(), ([0], [1, 2]), likely)

    r = rig(num_blocks=32, budget=64)
    [first] = r.add(8)
    r.step()
    r.scheduler.finish(first)
    r.all.clear()
    r.add(8, 4)  # of the first the prefix cache knows 6 tokens
    plan = []
    r.scheduler.admit(plan, 4)
    likely = {
        "tokens that the prefix cache has are scheduled again": [4],
        "tokens that the prefix cache has are charged to the budget": [2],
    }
    told = "tokens scheduled with a budget of 4, of 8 tokens with 6 in the cache and of 4 with none"
    check(told, [s.num_tokens for s in plan], [2, 2], likely)


@exercise("5.3")
def test_a_preempted_sequence_waits_without_blocks_at_its_place(rig: Callable[..., Rig]) -> None:
    """Requests 0, 2, 3 run, 1 and 4 wait; then 2 is preempted, and after it 3."""
    r = rig(num_blocks=16)
    everybody = r.add(4, 4, 4, 4, 4)
    r.scheduler.waiting.clear()
    r.scheduler.waiting.extend(everybody[i] for i in (1, 4))
    for i in (0, 2, 3):
        assert r.pool.allocate(everybody[i], 4)
        everybody[i].num_computed = 4
        everybody[i].token_ids.append(7)
        r.scheduler.running.append(everybody[i])
    victim = everybody[2]
    r.scheduler.preempt(victim)
    likely: dict[str, Any] = {
        "the victim is still in self.running": [0, 2, 3],
        "the last sequence was removed, whichever is preempted": [0, 2],
    }
    check("running", r.queues()[0], [0, 3], likely)
    likely = {
        "the victim is in no queue, so it will never be computed": [1, 4],
        "the victim went to the back of the queue: by arrival, request 2 is before request 4": [1, 4, 2],
        "the victim went to the front of the queue: by arrival, request 1 is before request 2": [2, 1, 4],
    }
    check("waiting", r.queues()[1], [1, 2, 4], likely)
    check("its block table", victim.block_table, [], {"the victim still has its blocks: self.release(seq)": [2, 3]})
    likely = {"the victim's blocks never came back to the free list: self.release(seq)": 10}
    check("free blocks", len(r.pool.free_list), 12, likely)
    likely = {"no KV of the victim is left, since its blocks are gone: set num_computed to 0": 4}
    check("its num_computed", victim.num_computed, 0, likely)
    check("its tokens", len(victim.token_ids), 5, {"the generated tokens must be kept": 4})
    freed = [e["freed"] for e in r.told if e["type"] == "blocks"]
    check(
        "blocks freed, by the events",
        len(freed),
        1,
        {"self.release emits this event, and self.blocks.release does not": 0},
    )
    r.scheduler.preempt(everybody[3])
    check("waiting, after 3 was preempted as well", r.queues()[1], [1, 2, 3, 4])


@since(5)
def test_the_budget_is_shared_by_decodes_and_chunks(rig: Callable[..., Rig]) -> None:
    r = rig(budget=8)
    r.add(3, 12, 4)
    assert r.step() == {0: 3, 1: 5}  # the second prompt is cut, the third waits
    assert r.step() == {0: 1, 1: 7}
    assert r.step() == {0: 1, 1: 1, 2: 4}
    assert r.step() == {0: 1, 1: 1, 2: 1}
    r.add(20)
    assert r.step() == {0: 1, 1: 1, 2: 1, 3: 5}  # who comes later joins at once


@since(5)
def test_only_the_chunk_that_reaches_the_last_known_token_samples(rig: Callable[..., Rig]) -> None:
    r = rig(budget=3)
    [seq] = r.add(7)
    lengths = []
    for _ in range(4):
        r.step()
        lengths.append(len(seq.token_ids))
    assert lengths == [7, 7, 8, 9]


@since(5)
def test_seats_are_limited_and_freed(rig: Callable[..., Rig]) -> None:
    r = rig(seats=2)
    a, _, _ = r.add(2, 2, 2)
    assert r.step() == {0: 2, 1: 2}
    assert r.step() == {0: 1, 1: 1}
    r.scheduler.finish(a)
    assert r.queues() == ([1], [2])
    assert r.step() == {1: 1, 2: 2}


@since(5)
def test_a_prompt_is_admitted_only_if_all_of_it_has_room(rig: Callable[..., Rig]) -> None:
    r = rig(num_blocks=6)
    r.add(6, 8)
    assert r.step() == {0: 6}
    assert r.queues() == ([0], [1]) and len(r.pool.free_list) == 3


@since(5)
def test_the_latest_arrival_is_preempted_and_comes_back(rig: Callable[..., Rig]) -> None:
    r = rig(num_blocks=6)
    a, b, _ = r.add(4, 4, 4)  # all six blocks are full after the prompts
    assert r.step() == {0: 4, 1: 4}
    assert r.step() == {0: 1, 1: 1}
    assert r.queues() == ([0, 1], [2])
    assert len(r.pool.free_list) == 0
    assert r.step() == {0: 1, 1: 1}
    known = list(b.token_ids)
    assert r.step() == {0: 1}  # a needs a fourth block: b gives way, and is not let in again in the same step
    assert r.queues() == ([0], [1, 2])  # b came before c and still does
    assert b.token_ids == known and b.num_computed == 0 and b.block_table == []
    assert [e["request"] for e in r.told if e["type"] == "preempted"] == [1]
    for _ in range(11 - len(a.token_ids)):
        r.step()
    r.scheduler.finish(a)
    assert r.step()[1] >= 1 and b.token_ids[: len(known)] == known


@since(5)
def test_a_sequence_that_preempts_itself_computes_nothing(rig: Callable[..., Rig]) -> None:
    r = rig(num_blocks=5)
    _, b = r.add(4, 4)
    r.step()
    assert len(r.pool.free_list) == 1
    assert r.step() == {0: 1}  # a takes the last block; b finds none and is itself the latest arrival
    assert b.block_table == [] and r.queues() == ([0], [1])


@since(5)
def test_scheduler_s4_the_first_always_advances(rig: Callable[..., Rig]) -> None:
    """On a pool with hardly room for one, everyone ends, in order of arrival, without livelock."""
    r = rig(num_blocks=6, seats=4, budget=4)
    r.add(5, 3, 6, 4)
    done: list[int] = []
    for _ in range(200):
        first = min((s.request for s in r.scheduler.running), default=None)
        plan = r.step()
        assert first is None or first in plan, "the earliest arrival did nothing"
        for seq in [s for s in r.scheduler.running if len(s.token_ids) == 12]:
            r.scheduler.finish(seq)
            done.append(seq.request)
        if len(done) == 4:
            break
    assert done == [0, 1, 2, 3]
    assert len(r.pool.free_list) == 6 and any(e["type"] == "preempted" for e in r.told)


@since(5)
def test_what_comes_back_finds_its_own_blocks(rig: Callable[..., Rig]) -> None:
    """Recompute is cheap when nobody took the blocks meanwhile: they are still known, output included."""
    r = rig(num_blocks=32)
    [seq] = r.add(4)
    for _ in range(5):
        r.step()
    assert (len(seq.token_ids), seq.num_computed) == (9, 8)
    r.scheduler.preempt(seq)
    assert r.step() == {0: 1} and seq.num_computed == 9
