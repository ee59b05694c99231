"""Runs for the page: scenes teach what they say, sentences give the right reason, frames are the engine's state."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stages import stage_5_continuous_batching as stage_5
from tools.scheduler_page.build import scenes
from tools.scheduler_page.play import MOST_TICKS, Request, Setup, play

SCENES = {scene["name"]: scene for scene in scenes()}


def setup(*requests: tuple[int, ...], **options: Any) -> Setup:
    """Requests A, B, ... as (arrival, prompt, output, priority, shared)."""
    named = tuple(Request("ABCDEFGHIJKL"[i], *values) for i, values in enumerate(requests))
    return Setup(requests=named, **({"num_blocks": 32, "block_size": 2, "seats": 4, "budget": 8} | options))


def said(run: dict[str, Any], kind: str) -> list[str]:
    return [text for frame in run["frames"] for k, text in frame["why"] + frame["after"] if k == kind]


def ends(run: dict[str, Any]) -> list[str]:
    return [event["request"] for event in run["events"] if event["type"] == "finished"]


# --- the scenes ------------------------------------------------------------------------------------------------------


def played(name: str, **changes: Any) -> dict[str, Any]:
    return play(replace(Setup.parse(SCENES[name]), **changes))


def with_request(name: str, of: str, **changes: Any) -> dict[str, Any]:
    requests = Setup.parse(SCENES[name]).requests
    return played(name, requests=tuple(replace(r, **changes) if r.name == of else r for r in requests))


def tokens_of(run: dict[str, Any], name: str) -> list[int]:
    return [event["tick"] for event in run["events"] if event["type"] == "token" and event["request"] == name]


def test_thrashing_computes_more_than_a_quarter_twice_and_static_is_still_slower() -> None:
    run, static = played("thrashing"), played("thrashing", static=True)
    computed = sum(share[1] for frame in run["frames"] for share in frame["shares"].values())
    assert run["totals"]["again"] > computed / 4
    assert {r for e in run["events"] if e["type"] == "admitted" and e["tick"] < 3 for r in e["request"]} == set("ABCD")
    assert static["totals"]["again"] == 0 and static["totals"]["steps"] > run["totals"]["steps"]
    smallest = next(n for n in range(12, 65, 4) if not played("thrashing", num_blocks=n)["totals"]["preemptions"])
    assert smallest > 12


def test_a_starves_until_everybody_of_a_better_priority_is_gone() -> None:
    run = played("starvation")
    assert ends(run)[-1] == "A" and run["totals"]["preemptions"] == 1
    assert any("A is less urgent (priority 1, not 0)" in text for text in said(run, "preempted"))
    assert ends(with_request("starvation", "A", priority=0))[0] == "A"
    assert ends(played("starvation", seats=3))[-1] != "A"


def test_decodes_get_a_token_in_every_step_beside_the_chunks_of_a_prompt() -> None:
    run = played("chunks")
    for name in "ABC":
        ticks = tokens_of(run, name)
        assert ticks == list(range(ticks[0], ticks[0] + 16))
    chunks = [frame["shares"]["D"][1] for frame in run["frames"] if frame.get("shares", {}).get("D", [0, 0])[1] > 1]
    assert chunks == [5] * 6 and run["totals"]["preemptions"] == 0
    refused = said(played("chunks", chunks=False), "refused")
    assert len(refused) == 1 and refused[0].startswith("D is refused") and "max_num_batched_tokens=8" in refused[0]
    whole = played("chunks", budget=33)
    assert next(f["shares"]["D"][1] for f in whole["frames"] if "D" in f["shares"]) == 30


def test_of_a_shared_beginning_the_end_is_evicted_first() -> None:
    def found(run: dict[str, Any]) -> int:
        [cached] = [e["cached"] for e in run["events"] if e["type"] == "admitted" and e["request"] == "C"]
        return int(cached)

    assert found(played("eviction")) == 8
    lost = said(played("eviction"), "forgotten")
    assert lost[:2] == [f"B takes block {n}, first in the free list: text of A is lost." for n in (3, 2)]
    assert found(with_request("eviction", "B", output=1)) == 16
    assert found(played("eviction", prefix_cache=False)) == 0


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_a_scene_is_a_question_whose_run_ends(scene: dict[str, Any]) -> None:
    assert 0 <= scene["right"] < len(scene["answers"])
    assert len(ends(scene["run"])) == len(scene["requests"]) and len(scene["run"]["frames"]) <= 40


# --- reasons ---------------------------------------------------------------------------------------------------------


def test_who_needs_a_block_and_who_gives_it() -> None:
    run = play(setup((0, 4, 9), (0, 4, 9), num_blocks=6))
    assert said(run, "preempted")[0] == "B is preempted: A needs 1 block, none is free, and B came last."
    assert said(run, "start")[2].startswith("B comes back: a seat is free, and ")
    alone = play(setup((0, 4, 5), (0, 4, 5), num_blocks=5))
    expected = "B is preempted: it needs 1 block, none is free, and it is itself the last in order."
    assert expected in said(alone, "preempted")


def test_whoever_has_the_better_priority_takes_a_seat_or_blocks() -> None:
    seat = play(setup((0, 2, 9, 1), (2, 2, 4, 0), seats=1))
    expected = "A is preempted: B needs a seat, and none is free, and A is less urgent (priority 1, not 0)."
    assert said(seat, "preempted") == [expected]
    blocks = play(setup((0, 8, 6, 1), (2, 9, 2, 0), num_blocks=8))
    assert said(blocks, "preempted")[0].startswith("A is preempted: B needs 5 blocks, 3 are free, and A is ")
    both = play(setup((0, 3, 6, 1), (0, 3, 6, 1), (2, 9, 2, 0), num_blocks=6))
    needs = [re.findall("needs (.*), and", text) for text in said(both, "preempted")]
    assert needs[:2] == [["5 blocks, none is free"], ["5 blocks, 3 are free"]]
    worst = play(setup((0, 4, 9, 0), (0, 4, 9, 2), (0, 4, 9, 1), num_blocks=8))
    expected = "B is preempted: it needs 1 block, none is free, and it is itself the last in order."
    assert said(worst, "preempted")[0] == expected


def test_of_a_reader_s_victim_nothing_is_said_that_is_true_of_the_engine_s_only() -> None:
    class First(stage_5.Scheduler):
        def make_room(self, seq: Any, num_tokens: int) -> bool:
            while not self.allocate(seq, num_tokens):
                self.preempt(self.running[0])
            return seq in self.running

    module = type("module", (), {"PrefixCachingPool": stage_5.PrefixCachingPool, "Scheduler": First})
    run = play(setup((0, 4, 9), (0, 4, 9), num_blocks=6), module)
    assert said(run, "preempted")[0] == (
        "A is preempted: A needs 1 block, none is free, and A was chosen, though B is behind it."
    )


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [
        (setup((0, 2, 5), (0, 2, 5), seats=1), "B waits: the only seat is taken."),
        (setup((0, 8, 5), (0, 2, 5)), "B waits: the step's budget of 8 tokens is spent."),
        (setup((0, 4, 3), (0, 8, 1), num_blocks=5), "B waits: its 8 tokens need 4 blocks, 3 are free."),
        (setup((0, 8, 6, 0, 8), (2, 12, 2, 0, 8), num_blocks=7),
         "B waits: its 13 tokens need 3 blocks beside 4 that it shares, 1 is free."),
        (setup((0, 16, 6, 0), (0, 2, 14, 2), (1, 24, 2, 1), num_blocks=16, seats=2, budget=32),
         "C waits: its 24 tokens need 12 blocks, 5 are free."),
        (setup((0, 4, 5), (0, 6, 5), chunks=False, num_blocks=5),
         "B waits: its 6 tokens must fit the budget whole, and 4 are left."),
        (setup((0, 2, 5), (0, 2, 5), (0, 2, 5), seats=1), "C waits behind B: nobody overtakes."),
        (setup((0, 2, 5), (1, 2, 5), static=True), "B waits for the next batch: A must end first."),
    ],
    ids=["seat", "budget", "blocks", "shared", "seat_to_be_had", "whole", "behind", "batch"],
)  # fmt: skip
def test_why_somebody_waits(waiting: Setup, reason: str) -> None:
    assert reason in said(play(waiting), "waits")


def test_what_is_computed_again_is_counted_and_said() -> None:
    run = play(setup((0, 4, 9), (0, 4, 9), num_blocks=6, prefix_cache=False))
    again = [int(n) for text in said(run, "work") for n in re.findall(r"\((\d+) of them again", text)]
    computed: dict[str, set[int]] = {"A": set(), "B": set()}
    twice = 0
    for event in run["events"]:
        if event["type"] == "scheduled":
            positions = set(range(event["cached"], event["cached"] + event["tokens"]))
            twice += len(positions & computed[event["request"]])
            computed[event["request"]] |= positions
    assert sum(again) == run["totals"]["again"] == twice > 0


def test_what_is_forgotten_was_written_by_whoever_took_the_block_last_and_not_by_who_shared_it() -> None:
    run = play(setup((0, 9, 1, 0, 8), (2, 9, 1, 0, 8), (4, 30, 1), num_blocks=16))
    [lost] = said(run, "forgotten")
    assert re.fullmatch(r"C takes blocks? [\d, and]+, first in the free list: text of A is lost\.", lost)


# --- what the frames show --------------------------------------------------------------------------------------------


def random_setup(draw: random.Random) -> Setup:
    requests = [
        (draw.randrange(12), draw.randint(1, 14), draw.randint(1, 12), draw.randrange(3), draw.choice((0, 0, 6)))
        for _ in range(draw.randint(1, 8))
    ]
    options: dict[str, Any] = {"num_blocks": draw.randint(8, 20), "block_size": draw.randint(1, 4)}
    options |= {"seats": draw.randint(1, 5), "budget": draw.randint(1, 16)}
    options |= {name: draw.random() < 0.5 for name in ("prefix_cache", "chunks", "static")}
    return setup(*requests, **options)


@pytest.mark.parametrize("seed", range(25))
def test_every_frame_adds_up_and_nothing_happens_without_a_reason(seed: int) -> None:
    made = random_setup(random.Random(seed))
    run = play(made)
    writers: dict[str, str] = {}
    lost = set()
    for event in run["events"]:
        for block in map(str, event.get("taken", ())):
            lost.add((event["request"], block, writers.get(block)))
            writers[block] = event["request"]
    for text in said(run, "forgotten"):
        taker, *blocks, writer = re.findall(r"\b(?:[A-L]|\d+)\b", text)
        assert {(taker, block, writer) for block in blocks} <= lost
    refused = {text[0] for text in said(run, "refused")}
    assert sorted([*ends(run), *refused]) == sorted(request.name for request in made.requests)
    for tick, frame in enumerate(run["frames"]):
        owned = {block for table in frame["tables"].values() for block in table}
        assert not owned & set(frame["free"]) and len(owned) + len(frame["free"]) == made.num_blocks
        assert set(frame["tables"]) <= set(frame["running"]) and len(frame["running"]) <= made.seats
        assert sum(tokens for _, tokens, *_ in frame["shares"].values()) <= made.budget
        told = {kind: [text for k, text in frame["why"] if k == kind] for kind in ("waits", "preempted", "work")}
        for who, kind in ((frame["waiting"] + frame["held"], "waits"), (frame["shares"], "work")):
            assert all(any(re.search(rf"\b{name}\b", text) for text in told[kind]) for name in who)
        victims = [e["request"] for e in run["events"] if e["tick"] == tick and e["type"] == "preempted"]
        assert [text[0] for text in told["preempted"]] == victims
        assert all(" needs " in text for text in told["preempted"])
        for needs, free in re.findall(r"tokens need (\d+) .*?, (none|\d+) (?:is|are) free", " ".join(told["waits"])):
            assert int(needs) > int(free.replace("none", "0")) == len(frame["free"])


@pytest.mark.parametrize("seed", range(6))
def test_stage_5_decides_as_the_engine_does_where_there_are_no_priorities(seed: int) -> None:
    """But for the order of the free list, where the engine puts blocks of no use to anybody first."""
    drawn = random_setup(random.Random(seed))
    equal = tuple(replace(request, priority=0) for request in drawn.requests)
    made = replace(drawn, requests=equal, budget=64, prefix_cache=True, chunks=True)
    ours, theirs = play(made), play(made, stage_5)
    assert theirs["error"] is None and ends(ours) == ends(theirs)
    for frame, other in zip(ours["frames"], theirs["frames"], strict=True):
        assert (frame["waiting"], frame["running"]) == (other["waiting"], other["running"])
        assert len(frame["free"]) == len(other["free"])


def test_a_static_batch_reserves_blocks_for_its_outputs_and_nobody_joins() -> None:
    run = play(setup((0, 4, 5), (0, 4, 9), (0, 4, 5), (1, 2, 2), num_blocks=10, static=True))
    admitted = {e["request"]: e["tick"] for e in run["events"] if e["type"] == "admitted"}
    finished = {e["request"]: e["tick"] for e in run["events"] if e["type"] == "finished"}
    assert admitted["A"] == admitted["B"] == 0  # 4 and 6 blocks: all that there are
    assert admitted["C"] == admitted["D"] == finished["B"] + 1 and not run["totals"]["preemptions"]


def test_the_page_gives_up_on_a_run_without_an_end() -> None:
    class Lazy(stage_5.Scheduler):
        finish: Callable[..., None] = lambda self, seq: None

    run = play(
        setup((0, 2, 2)), type("module", (), {"PrefixCachingPool": stage_5.PrefixCachingPool, "Scheduler": Lazy})
    )
    assert len(run["frames"]) <= MOST_TICKS and said(run, "error")
