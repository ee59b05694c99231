"""Stage 5's scheduler: who computes how much in a step. No model anywhere."""

from collections.abc import Callable
from typing import Any

import pytest

from stages.core import SamplingParams, Sequence, Trace
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
    while a in r.scheduler.running and len(a.token_ids) < 11:
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
