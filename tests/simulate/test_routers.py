"""Each rule on a case worked out by hand."""

import random
from collections import Counter
from typing import Any

import pytest

from nanovllm.simulate.arrivals import Query
from nanovllm.simulate.histogram import Histogram
from nanovllm.simulate.replica import Replica
from nanovllm.simulate.routers import ROUTERS, Router
from tests.simulate.linear import Linear, config

BLOCK = 4
TEXT = list(range(100, 140))  # ten blocks


class Drawn(random.Random):
    """Draws the first ones."""

    def sample(self, population: Any, k: int, *, counts: Any = None) -> list[Any]:
        return list(population[:k])


def replicas(*loads: int) -> list[Replica]:
    """Each with so many queries, of which none has begun."""
    made = []
    for number, load in enumerate(loads):
        chosen = config(kvcache_block_size=BLOCK, num_kv_blocks=40)
        made.append(replica := Replica(number, chosen, Linear(), vocab_size=4096))
        for i in range(load):
            replica.add(Query(1000 * number + i, 0.0, [9 + i], max_tokens=4), 0.0)
    return made


def router(name: str, fleet: list[Replica], **options: Any) -> Router:
    made = ROUTERS[name](Drawn(0), BLOCK, **options)
    made.replicas_changed(fleet)
    return made


def query(prompt: list[int] = TEXT, number: int = 7, session: str | None = None) -> Query:
    return Query(number, 0.0, prompt, 8, session)


def order(made: Router, fleet: list[Replica], asked: Query | None = None) -> list[int]:
    return [replica.number for replica in made.choose(asked or query(), fleet)]


def compute(replica: Replica, asked: Query) -> None:
    replica.add(asked, 0.0)
    now = 0.0
    while (over := replica.begin_turn(now)) is not None:
        now = over
        replica.end_turn(now, Histogram())


def test_round_robin() -> None:
    fleet = replicas(5, 0, 0)
    made = router("round-robin", fleet)
    assert [order(made, fleet) for _ in range(4)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]
    assert order(made, fleet[:2]) == [0, 1], "one is gone"


def test_least_loaded() -> None:
    fleet = replicas(2, 1, 3, 1)
    assert order(router("least-loaded", fleet), fleet)[0] == 1


def test_two_choices() -> None:
    fleet = replicas(2, 1, 0, 3)
    made = router("two-choices", fleet)
    assert order(made, fleet) == [1, 0, 2, 3], "0 and 1 were drawn; then the others, should both be full"
    made = ROUTERS["two-choices"](random.Random(0), BLOCK)
    first = Counter(next(iter(made.choose(query(), fleet))).number for _ in range(6000))
    # Of 6 pairs: replica 2 wins its 3, replica 1 those with 0 and 3, replica 0 the one with 3
    assert [first[n] / 1000 for n in (2, 1, 0, 3)] == pytest.approx([3, 2, 1, 0], abs=0.15)


def test_prefix_affinity_goes_where_the_text_is_known() -> None:
    fleet = replicas(0, 3, 0)
    made = router("prefix", fleet)
    made.routed(query(), fleet[1])
    assert order(made, fleet)[0] == 1, "known there, whatever the load"
    assert order(made, fleet, query([*TEXT[:12], *range(28)]))[0] == 1, "three of ten blocks"
    assert order(made, fleet, query([*TEXT[:3], *range(37)]))[0] == 0, "not a block: to who was sent least"
    made.routed(query([*TEXT[:20], 1, 2, 3, 4]), fleet[2])
    assert order(made, fleet, query(TEXT[:20]))[0] == 2, "both know all of it, and this one has fewer queries"


def test_prefix_affinity_has_two_thresholds() -> None:
    fleet = replicas(0, 3, 0)
    made = router("prefix", fleet, imbalanced_threshold=2)
    made.routed(query(), fleet[1])
    assert order(made, fleet)[0] == 0, "3 - 0 is more than 2: two choices decide"
    fleet = replicas(0, 2, 0)
    made = router("prefix", fleet, imbalanced_threshold=2, match_rate_threshold=0.5)
    made.routed(query(), fleet[1])
    assert order(made, fleet)[0] == 1, "2 - 0 is not more than 2"
    assert order(made, fleet, query([*TEXT[:16], *range(24)]))[0] == 0, "four of ten blocks are less than half"
    assert order(made, fleet, query([*TEXT[:20], *range(20)]))[0] == 1, "and five are not"


def test_prefix_affinity_forgets_the_dead_and_the_old() -> None:
    fleet = replicas(0, 0)
    made = router("prefix", fleet)
    made.routed(query(), fleet[1])
    for i in range(4):  # of 40 blocks that a replica holds
        made.routed(query([*range(i, 500, 13)][:36]), fleet[1])
    assert order(made, fleet)[0] == 1, "nine blocks four times, and four of the text are left"
    made.routed(query([7] * 36), fleet[1])
    assert order(made, fleet)[0] == 0
    made.routed(query(), fleet[1])
    made.replicas_changed(fleet[:1])
    made.replicas_changed(fleet)
    assert order(made, fleet)[0] == 0


def test_kv_aware_weighs_what_is_cached_against_what_is_in_use() -> None:
    fleet = replicas(0, 0)
    compute(fleet[1], query(number=1))  # its ten blocks stay in the cache; the last is not looked up, but is known
    made = router("kv", fleet)
    assert order(made, fleet) == [1, 0]
    fleet[1].add(query([*range(500, 516)], number=2), 0.0)  # 16 tokens to compute: 4 blocks
    assert made.cost(query(), fleet[0]) == 10 and made.cost(query(), fleet[1]) == 4  # type: ignore[attr-defined]
    fleet[1].add(query([*range(600, 632)], number=3), 0.0)  # 8 more
    assert order(made, fleet) == [0, 1], "12 against 10"
    fleet[1].begin_turn(1.0)
    # Computed now, but the first tokens are not known yet; 12 blocks are in use.
    assert made.cost(query(), fleet[1]) == 24  # type: ignore[attr-defined]


def test_conversations_stay_with_their_replica() -> None:
    fleet = replicas(0, 0, 0, 0)
    made = router("sessions", fleet)
    homes = {f"s{i}": order(made, fleet, query(session=f"s{i}")) for i in range(400)}
    assert all(len(set(tried)) == 3 for tried in homes.values()), "one, and two to fall back on"
    assert homes["s5"] == order(made, fleet, query(number=99, session="s5"))
    shares = Counter(tried[0] for tried in homes.values())
    assert all(50 < shares[number] < 160 for number in range(4)), "each about a fourth"
    made.replicas_changed(fleet[:3])
    for session, tried in homes.items():
        now = order(made, fleet[:3], query(session=session))[0]
        assert now == (tried[1] if tried[0] == 3 else tried[0]), "only those of the dead one move, to the next"
    strict = router("sessions", fleet, num_fallback_replicas=0)
    assert len(order(strict, fleet)) == 1


def test_queries_without_a_conversation_go_anywhere() -> None:
    fleet = replicas(0, 0)
    made = router("sessions", fleet)
    assert {order(made, fleet, query(number=i))[0] for i in range(30)} == {0, 1}


@pytest.mark.slow
def test_names_are_those_of_ray() -> None:
    """Where Ray is installed: each class is there."""
    pytest.importorskip("ray.serve")
    from ray._common.utils import import_attr  # type: ignore[import-not-found, unused-ignore]

    for made in ROUTERS.values():
        try:
            assert import_attr(made.ray_class)
        except ModuleNotFoundError as error:  # of an extra of Ray's
            assert "ray" not in str(error), made
