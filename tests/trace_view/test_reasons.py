"""The reasons that the page gives are the scheduler's own."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest

from nanovllm.trace_view import Recording
from nanovllm.trace_view.recording import page_data
from stages.core import SamplingParams
from stages.manifest import load_stage
from tests.engine.helpers import make
from tests.trace_view.runs import crowded
from tools.pictures.three_requests import STORY_MODEL

LIMITS: dict[str, Any] = {"block_size": 2, "num_blocks": 12, "max_num_seqs": 3, "max_num_batched_tokens": 8}


def test_who_is_first_waits_for_what_the_scheduler_lacks() -> None:
    """After each plan the scheduler is asked itself; all reasons occur."""
    world = make(bs=2, nb=12, seqs=3, mbt=8)
    recording = Recording(**LIMITS)
    world.engine.trace.on_event = recording
    scheduler, planned = world.engine.scheduler, {}
    schedule = scheduler.schedule

    def watched() -> Any:
        plan = schedule()
        if scheduler.waiting and plan.scheduled:
            head, free = scheduler.waiting[0], scheduler.blocks.num_free
            planned[plan.step] = head.request_id, scheduler._budget, len(scheduler.running), free, len(head.token_ids)
        return plan

    scheduler.schedule = watched  # type: ignore[method-assign]
    draw = random.Random(2)
    for _ in range(40):
        prompt = [draw.randrange(1, 8) for _ in range(draw.randint(2, 9))]
        world.add(prompt, max_tokens=draw.randint(2, 9), ignore_eos=True, priority=draw.choice([0, 0, 1]))
        for _ in range(3):
            world.step()
    world.drain()
    data, said = page_data(recording, None), Counter[str]()
    for row in data["steps"]:
        if not row["waits"]:
            assert row["step"] not in planned
            continue
        first, why = row["waits"]
        request, budget, running, free, known = planned[row["step"]]
        assert data["names"][first] == str(request)
        if "budget" in why:
            assert budget == 0 and why == "the step's budget of 8 tokens is spent"
        elif "seats" in why:
            assert running == 3 and budget > 0
        elif "tokens need" in why:
            found = re.fullmatch(r"its (\d+) tokens need (\d+) blocks?, (none|\d+) (?:is|are) free", why)
            assert found and int(found[1]) == known and found[3].replace("none", "0") == str(free)
            assert int(found[2]) == -(-known // 2) > free
        else:
            assert why.startswith("preempted in this step: ")
        said[why.split()[0]] += 1
    assert said.keys() == {"the", "all", "its", "preempted"}, said


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_who_needs_blocks_gets_them(asynchronous: bool) -> None:
    """Whoever a preemption names takes blocks next, unless the victim made room for itself in vain."""
    events = crowded(asynchronous).events
    preempted = [i for i, event in enumerate(events) if event["type"] == "preempted"]
    selves = 0
    for i in preempted:
        event = events[i]
        by, victim = event["by"], [event["request"], event["choice"]]
        assert event["needs"] > event["free"]
        if by == victim:
            selves += 1
            continue
        later = (e for e in events[i + 1 :] if e["type"] == "scheduled" or e.get("taken"))
        assert (taker := next(later))["type"] == "blocks" and [taker["request"], taker["choice"]] == by
    assert 0 < selves < len(preempted)


def test_sentences_about_preemptions() -> None:
    whys = [event["why"] for event in page_data(crowded(), None)["events"] if event["type"] == "preempted"]
    forms = (
        r"r\d+ needs 1 block, none is free, and r\d+ came last",
        r"it needs 1 block, none is free, and it is itself the last in order",
    )
    assert whys and {next((form for form in forms if re.fullmatch(form, why)), why) for why in whys} <= set(forms)


def test_a_seat_for_the_more_urgent_one() -> None:
    world = make(bs=2, nb=12, seqs=1, mbt=8)
    recording = Recording(**LIMITS)
    world.engine.trace.on_event = recording
    slow = world.add([1, 2, 3], max_tokens=6, ignore_eos=True, priority=1)
    world.step()
    fast = world.add([4, 5], max_tokens=2, ignore_eos=True, priority=0)
    world.drain()
    [why] = [event["why"] for event in page_data(recording, None)["events"] if event["type"] == "preempted"]
    assert why == f"{fast} needs a seat, and none is free, and {slow} is less urgent (priority 1, not 0)"


def test_a_stage_says_less() -> None:
    recording = Recording()
    engine = load_stage(5).engine_class()(STORY_MODEL, on_event=recording, block_size=4, num_blocks=6)
    engine.generate([[1, 2, 3, 4], [5, 6, 7, 8]], SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
    data = page_data(recording, None)
    assert [event["why"] for event in data["events"] if "why" in event] == ["blocks ran out, and 1 came last"]
    assert {row["waits"][1] for row in data["steps"] if row["waits"]} == {
        "preempted in this step: blocks ran out, and 1 came last",
        "its turn has not come",
    }
