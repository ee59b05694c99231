"""Fleets for the page: scenes teach what they say, sentences are true, and to be watched changes nothing."""

import random
import re
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from nanovllm.simulate.arrivals import VOCAB_SIZE
from nanovllm.simulate.fleet import Fleet, FleetOptions
from nanovllm.simulate.replica import Replica
from nanovllm.simulate.routers import ROUTERS
from tools.scheduler_page.build import fleets, read
from tools.scheduler_page.fleet import BLOCK_SIZE, Clients, FleetRun, FleetSetup, costs, play_fleet

SCENES = {scene["name"]: scene for scene in fleets()}
SMALL = FleetSetup(router="prefix", replicas=3, rate=40, shared=70, beginnings=4, num_blocks=64, seats=3, threshold=2)
DEATHS = ((300, 1), (500, 0), (620, 3))


def played(name: str, **changes: Any) -> dict[str, Any]:
    return play_fleet(replace(FleetSetup.parse(SCENES[name]), **changes))


def middle(run: dict[str, Any], tenth: int) -> float:
    """Half of the first tokens that came in this tenth of a second took no longer, in ms."""
    return median(ms for _, _, frame, ms, _, _ in run["requests"] if frame // 10 == tenth)


def decisions(run: dict[str, Any]) -> list[tuple[int, int, int, str]]:
    """Frame, request, replica and reason of each."""
    sentence = r"Request (\d+) to replica (\d+): (.*)\. Replica \2 holds (?:none|[\d,]+) of the [\d,]+ prompt tokens\."
    said = [(t, text) for t, frame in enumerate(run["frames"]) for kind, text in frame["why"] if kind == "route"]
    found = [(t, re.fullmatch(sentence, text)) for t, text in said]
    return [(t, int(match[1]), int(match[2]), match[3]) for t, match in found if match]


# --- the scenes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_a_scene_is_a_question_whose_run_ends(scene: dict[str, Any]) -> None:
    assert 0 <= scene["right"] < len(scene["answers"]) and scene["router"] in ROUTERS
    run = scene["run"]
    assert [request[0] for request in run["requests"]] == list(range(run["totals"]["requests"]))
    assert f'"{scene["router"]}":' in read("fleet.js")


def test_the_recorded_runs_give_the_right_answers() -> None:
    affinity, hot, death = (SCENES[name]["run"] for name in ("affinity", "hot", "death"))
    assert affinity["totals"]["p99"] < 60 and affinity["totals"]["cached"] > 80
    assert hot["totals"]["by_replica"] == {"0": hot["totals"]["requests"], "1": 0, "2": 0}
    assert all(middle(death, tenth) > 2.5 * middle(death, 1) for tenth in range(2, 10))


@pytest.mark.slow
def test_what_the_scenes_suggest_to_try_shows_what_they_say() -> None:
    balanced = played("affinity", router="two-choices")["totals"]
    assert f"99% come within {balanced['p99'] / 1000:.2f} s" in SCENES["affinity"]["question"]
    assert 0.05 < SCENES["affinity"]["run"]["totals"]["p99"] / balanced["p99"] < 0.15  # "About a tenth of that"
    changes: dict[str, Any]
    for changes in ({"num_blocks": 208}, {"rate": 100}):
        two, prefix = (played("affinity", router=router, **changes)["totals"] for router in ("two-choices", "prefix"))
        assert two["p50"] < 2 * prefix["p50"] and two["p99"] < 3 * prefix["p99"]
    for changes in ({"threshold": 4}, {"router": "kv"}):
        spread = played("hot", **changes)["totals"]
        assert min(spread["by_replica"].values()) > 90 and spread["p99"] < SCENES["hot"]["run"]["totals"]["p99"] / 20
    overloaded = played("death", rate=400, deaths=())
    wall = sum(50 <= frame < 200 for _, _, frame, *_ in overloaded["requests"]) / 1.5
    assert 0.93 < SCENES["death"]["rate"] / wall < 0.97 and 0.67 < 105 / wall < 0.73
    alive, calm = played("death", deaths=()), played("death", rate=105)
    assert all(middle(alive, tenth) < 2.5 * middle(alive, 1) for tenth in range(2, 10))
    assert middle(calm, 2) > 1.5 * middle(calm, 1) and all(
        middle(calm, t) < 1.2 * middle(calm, 1) for t in range(5, 10)
    )


# --- what is told ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=ROUTERS)
def told(request: pytest.FixtureRequest) -> dict[str, Any]:
    setup = replace(SMALL, router=request.param, deaths=DEATHS)
    watched = FleetRun(setup)
    return {"setup": setup, "run": watched.result(), "watched": watched}


def test_to_be_watched_changes_nothing(told: dict[str, Any]) -> None:
    setup, watched = told["setup"], told["watched"]
    kwargs = {"imbalanced_threshold": 2} if setup.router == "prefix" else {}
    router = ROUTERS[setup.router](random.Random(0), BLOCK_SIZE, **kwargs)
    options = FleetOptions(replicas=3, startup_seconds=0.3, deaths=tuple((ms / 1000, number) for ms, number in DEATHS))
    alone = Fleet(
        lambda number: Replica(number, watched.config, costs(), vocab_size=VOCAB_SIZE, intake=costs().intake),
        router,
        Clients(setup),
        options,
    )
    alone.run()
    assert watched.fleet.statistics.report() == alone.statistics.report()


def test_the_reason_of_each_decision_is_true(told: dict[str, Any]) -> None:
    setup, run = told["setup"], told["run"]
    made = decisions(run)
    assert len(made) == run["totals"]["requests"] + run["totals"]["resent"] == sum(run["totals"]["by_replica"].values())
    queries = {query.number: query for query in Clients(setup).queries()}
    sent: dict[int, list[str | None]] = {}
    for t, request, replica, reason in made:
        numbers = [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", reason)]
        session = queries[request].session
        if reason == "no other serves":
            assert set(run["frames"][t]["replicas"]) <= {str(replica), "3"}
        elif setup.router == "round-robin":
            assert reason == "its turn has come"
        elif setup.router == "least-loaded":
            assert re.fullmatch(r"\d+ requests? there, [\d, and]+ elsewhere", reason) and numbers[0] <= min(numbers[1:])
        elif setup.router == "kv":
            cost, compute, in_use, *others = numbers
            assert cost <= min(others) and abs(compute + in_use - cost) <= 1
        elif setup.router == "sessions":
            assert session is None or "the hash of its beginning" in reason
        elif "drawn were" in reason:
            *_, other, theirs, mine = numbers
            assert mine <= theirs and other != replica
            if setup.router == "prefix":
                assert re.match(r"replica \d has [3-9] requests more than replica \d, so two choices decide: ", reason)
        elif "sent there before" in reason:
            assert session in sent[replica] and numbers[0] == 15 * BLOCK_SIZE
        else:
            assert reason == "nobody is known to have its beginning, and the least text was sent there"
            alive = map(int, run["frames"][t]["replicas"])
            assert session is None or all(session not in sent.get(other, [])[-2:] for other in alive)
        sent.setdefault(replica, []).append(session)


def test_a_replica_is_said_to_hold_what_it_then_finds() -> None:
    """Where nobody waits and nobody is thrown out: what is there when the router decides is there a moment later."""
    run = play_fleet(replace(SMALL, rate=20, num_blocks=256, seats=32))
    said = {
        int(match[1]): int(match[2].replace(",", "").replace("none", "0"))
        for frame in run["frames"]
        for kind, text in frame["why"]
        if (match := re.match(r"Request (\d+) .* holds ([\d,]+|none) of the", text))
    }
    assert {number: cached for number, _, _, _, cached, _ in run["requests"]} == said and len(set(said.values())) > 1


# --- what the frames show --------------------------------------------------------------------------------------------


def test_states_keep_to_the_limits_and_the_dead_are_gone_until_they_are_replaced(told: dict[str, Any]) -> None:
    setup, run = told["setup"], told["run"]
    for t, frame in enumerate(run["frames"]):
        alive = {0, 1, 2} - ({1} if t >= 30 else set()) - ({0} if t >= 50 else set())
        alive |= ({3} if 60 <= t < 62 else set()) | ({4} if t >= 80 else set()) | ({5} if t >= 92 else set())
        assert set(frame["replicas"]) == {str(number) for number in alive}
        places = [run["lanes"][number] for number in frame["replicas"]]
        assert len(set(places)) == len(places) and set(places) <= {0, 1, 2}
        for waiting, running, blocks in frame["replicas"].values():
            assert waiting >= 0 and 0 <= running <= setup.seats and 0 <= blocks <= setup.num_blocks
    assert run["lanes"] == {"0": 0, "1": 1, "2": 2, "3": 1, "4": 0, "5": 1}
    said = [text for frame in run["frames"] for kind, text in frame["why"] if kind in ("death", "start")]
    assert [re.sub(r" What .*", "", text) for text in said] == [
        "Replica 1 dies.",
        "Replica 0 dies.",
        "Replica 3 serves in the place of replica 1. Its cache is empty.",
        "Replica 3 dies.",
        "Replica 4 serves in the place of replica 0. Its cache is empty.",
        "Replica 5 serves in the place of replica 3. Its cache is empty.",
    ]


def test_at_another_rate_the_same_requests_come_closer_together() -> None:
    slow, fast = (list(Clients(replace(SMALL, rate=rate)).queries()) for rate in (50, 100))
    assert len(fast) > len(slow) > 30
    for one, other in zip(slow, fast, strict=False):
        assert (one.prompt, one.max_tokens) == (other.prompt, other.max_tokens)
        assert one.time == pytest.approx(2 * other.time, abs=1e-4)
    sharing = sum(query.session is not None for query in slow)
    assert 0.5 < sharing / len(slow) < 0.9
