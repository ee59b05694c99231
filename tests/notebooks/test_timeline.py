"""What the pictures are drawn from: events sorted into who computed, waited and held what."""

import itertools
from typing import Any

import pytest

from stages.core import Event
from tools.pictures.timeline import SlotUse, held_tokens, read_events, slot_use, token_times


class Recorder:
    """Writes down events as an engine would; `step` is set by the test."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.clock = itertools.count()
        self.step = 0

    def __call__(self, type: str, request: int, **details: Any) -> None:
        self.events.append(
            {"t": float(next(self.clock)), "step": self.step, "type": type, "request": request} | details
        )

    def run(self, request: int, tokens: int, cached: int) -> None:
        self("scheduled", request, tokens=tokens, cached=cached)

    def blocks(
        self, request: int, taken: tuple[int, ...] = (), shared: tuple[int, ...] = (), freed: tuple[int, ...] = ()
    ) -> None:
        self("blocks", request, taken=list(taken), shared=list(shared), freed=list(freed))


def phases(events: list[Event]) -> list[list[str]]:
    return [[span.phase for span in life.spans] for life in read_events(events).lives]


def test_recomputing_is_told_from_new_work() -> None:
    """Stage 1: the second step computes the prompt again. The second request waits for the first one's end."""
    emit = Recorder()
    for request in (0, 1):
        emit("added", request, prompt_tokens=3)
    for request in (0, 1):
        emit("admitted", request, cached=0)
        for tokens in (3, 4):
            emit.step += 1
            emit.run(request, tokens, 0)
            emit("token", request, ids=[7])
        emit("finished", request, reason="length")
    assert phases(emit.events) == [["prefill", "again"], ["waiting", "waiting", "prefill", "again"]]
    timeline = read_events(emit.events)
    assert timeline.tokens_in_step == {1: 3, 2: 4, 3: 3, 4: 4}
    assert [(life.finished, life.length, len(life.token_times)) for life in timeline.lives] == [(2, 4, 2), (4, 4, 2)]


def test_chunks_decodes_and_a_seat_without_work() -> None:
    emit = Recorder()
    emit("added", 0, prompt_tokens=5)
    emit("admitted", 0, cached=0)
    for tokens, cached in ((3, 0), (2, 3), (1, 5)):
        emit.step += 1
        emit.run(0, tokens, cached)
        if emit.step == 1:
            emit("added", 1, prompt_tokens=2)
            emit("admitted", 1, cached=0)
    emit.step += 1
    emit.run(1, 2, 0)
    assert phases(emit.events) == [["prefill", "prefill", "decode", "idle"], ["idle", "idle", "prefill"]]


def test_preemption_is_waiting_and_then_computing_again() -> None:
    emit = Recorder()
    emit("added", 0, prompt_tokens=2)
    emit("added", 1, prompt_tokens=2)
    emit.step = 1
    for request in (0, 1):
        emit("admitted", request, cached=0)
        emit.run(request, 2, 0)
    emit.step = 2
    emit("preempted", 1, tokens=3)
    emit.run(0, 1, 2)
    emit("finished", 0, reason="stop")
    emit.step = 3
    emit("admitted", 1, cached=0)
    emit.run(1, 3, 0)
    timeline = read_events(emit.events)
    assert phases(emit.events) == [["prefill", "decode"], ["prefill", "waiting", "again"]]
    assert timeline.lives[1].preempted == [2]
    assert [held_tokens(timeline, step) for step in (1, 2, 3)] == [{0: 2, 1: 2}, {0: 3}, {1: 3}]


def test_a_cache_hit_is_noted_once() -> None:
    emit = Recorder()
    emit("added", 0, prompt_tokens=6)
    emit("admitted", 0, cached=4)
    for tokens, cached in ((1, 4), (1, 5), (1, 6)):
        emit.step += 1
        emit.run(0, tokens, cached)
    assert [(span.phase, span.hit) for span in read_events(emit.events).lives[0].spans] == [
        ("prefill", 4),
        ("prefill", 0),
        ("decode", 0),
    ]


def shared_blocks() -> list[Event]:
    """Request 0 owns blocks 0 and 1 with 3 tokens, request 1 shares block 0 and takes block 2; block size 2."""
    emit = Recorder()
    emit("added", 0, prompt_tokens=3)
    emit("added", 1, prompt_tokens=4)
    emit("admitted", 0, cached=0)
    emit.blocks(0, taken=(0, 1))
    emit.step = 1
    emit.run(0, 3, 0)
    emit("admitted", 1, cached=2)
    emit.blocks(1, taken=(2,), shared=(0,))
    emit.step = 2
    emit.run(1, 2, 2)
    emit("finished", 0, reason="stop")
    emit.blocks(0, freed=(1,))
    emit.step = 3
    emit.run(1, 1, 4)
    return emit.events


def test_blocks_are_those_held_while_the_step_runs() -> None:
    first, second, third = read_events(shared_blocks()).blocks
    assert first.holders == {0: [0], 1: [0]}  # block 2 was taken before step 2, not before step 1
    assert not first.writers.keys() - first.holders.keys()
    assert second.holders == {0: [0, 1], 1: [0], 2: [1]}
    assert third.holders == {0: [1], 2: [1]}
    assert third.writers == {0: 0, 1: 0, 2: 1}  # block 1 is free, with what request 0 left in it
    assert second.filled(2) == {0: 2, 1: 1, 2: 2}


def test_the_first_step_may_be_number_0() -> None:
    """As in nanovllm. Who is added before it is there in it; who is added behind it waits from the next one on."""
    emit = Recorder()
    emit("added", 0, prompt_tokens=2)
    emit("admitted", 0, cached=0)
    emit.blocks(0, taken=(0,))
    emit.run(0, 2, 0)
    emit("added", 1, prompt_tokens=2)
    emit.step = 1
    emit.run(0, 1, 2)
    timeline = read_events(emit.events)
    assert phases(emit.events) == [["prefill", "decode"], ["waiting"]]
    assert timeline.tokens_in_step == {0: 2, 1: 1}
    assert [(b.step, b.holders, b.filled(4)) for b in timeline.blocks] == [(0, {0: [0]}, {0: 2}), (1, {0: [0]}, {0: 3})]
    assert [held_tokens(timeline, step) for step in (0, 1)] == [{0: 2}, {0: 3}]


@pytest.mark.parametrize("order", [1, -1], ids=["freed, then finished", "finished, then freed"])
def test_wrong_guesses_free_only_the_end_of_a_table(order: int) -> None:
    """And with the end of a sequence goes its share of blocks that others still hold, which nobody frees."""
    emit = Recorder()
    emit("added", 0, prompt_tokens=5)
    emit("admitted", 0, cached=2)
    emit.blocks(0, taken=(1, 2), shared=(0,))
    emit.run(0, 3, 2)
    emit.blocks(0, freed=(2,))
    emit.step = 1
    emit.run(0, 1, 5)
    ends = [lambda: emit.blocks(0, freed=(1,)), lambda: emit("finished", 0, reason="length")]
    for end in ends[::order]:
        end()
    emit("added", 1, prompt_tokens=1)
    emit.step = 2
    emit.run(1, 1, 0)
    assert [list(b.holders) for b in read_events(emit.events).blocks] == [[0, 1, 2], [0, 1], []]
    holdings = pytest.importorskip("tools.pictures.blocks", reason="matplotlib is not installed").holdings
    assert [[h.table for h in holdings(emit.events, step)] for step in range(3)] == [[[0, 1, 2]], [[0, 1]], []]


def test_choices_of_a_request_are_lives_of_their_own() -> None:
    emit = Recorder()
    for choice in (0, 1):
        emit("added", 7, prompt_tokens=2, choice=choice)
    for choice in (0, 1):
        emit.run(7, 2, 0)
        emit.events[-1]["choice"] = choice
    lives = read_events(emit.events).lives
    assert [(life.request, life.choice, [s.tokens for s in life.spans]) for life in lives] == [(7, 0, [2]), (7, 1, [2])]


def test_a_shared_block_counts_once() -> None:
    use = slot_use(shared_blocks(), block_size=2)
    assert use[:2] == [SlotUse(1, reserved=4, used=3), SlotUse(2, reserved=6, used=5)]


def test_a_block_is_as_full_as_its_fullest_holder_made_it() -> None:
    """The second holder has not run yet."""
    emit = Recorder()
    for request in (0, 1):
        emit("added", request, prompt_tokens=3)
        emit("admitted", request, cached=0)
    emit.blocks(0, taken=(0, 1))
    emit.blocks(1, shared=(0,))
    emit.step = 1
    emit.run(0, 3, 0)
    assert read_events(emit.events).blocks[0].filled(2) == {0: 2, 1: 1}


def test_a_rectangle_is_as_large_as_it_is_told() -> None:
    emit = Recorder()
    emit("added", 0, prompt_tokens=2)
    emit("admitted", 0, cached=0)
    emit.step = 1
    emit.run(0, 2, 0)
    assert slot_use(emit.events, reserved=10) == [SlotUse(1, reserved=10, used=2)]
    with pytest.raises(ValueError, match="block_size"):
        slot_use(emit.events)


def test_a_second_call_starts_new_lives() -> None:
    emit = Recorder()
    for _ in range(2):
        emit("added", 0, prompt_tokens=2)
        emit("admitted", 0, cached=0)
        emit.step += 1
        emit.run(0, 2, 0)
        emit("finished", 0, reason="stop")
    assert phases(emit.events) == [["prefill"], ["prefill"]]


def test_the_shortest_gap_between_tokens_counts() -> None:
    emit = Recorder()
    emit("added", 0, prompt_tokens=4)
    for at in (1.0, 1.5, 1.75, 9.0):
        emit.events.append({"t": at, "step": 1, "type": "token", "request": 0, "ids": [5]})
    emit("added", 1, prompt_tokens=8)  # never got as far as a second token
    assert token_times(emit.events) == [(4, 250.0)]
