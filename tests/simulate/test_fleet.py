"""A fleet loses nothing, and is as a queue must be."""

import gc
import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from nanovllm.simulate.arrivals import Lengths, Query
from nanovllm.simulate.autoscaling import Autoscaling
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.replica import Job, Replica
from nanovllm.simulate.report import Statistics, table
from nanovllm.simulate.routers import ROUTERS
from tests.simulate.linear import Linear, config, fleet, synthetic


class Watched(Statistics):
    """Also keeps every query that was finished."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[Query] = []

    def finished(self, job: Job) -> None:
        super().finished(job)
        self.queries.append(job.query)
        assert job.first_token_time is not None
        assert job.query.time < job.first_token_time <= job.finished_time
        assert job.num_delivered == min(job.query.max_tokens, 2048 - len(job.query.prompt))


STORMY: dict[str, Any] = {
    "replicas": 3,
    "deaths": ((0.3, 0), (0.6, 1), (0.9, 2), (1.1, 3), (1.3, 4)),
    "startup_seconds": 0.3,
    "max_queue": 2,
}


ROUTER = [pytest.param(name, marks=() if name == "prefix" else pytest.mark.slow) for name in ROUTERS]


@pytest.mark.parametrize("router", ROUTER)
def test_every_query_ends_once(router: str) -> None:
    """Over deaths, refusals and conversations; and the clock never runs back."""
    workload = synthetic(rate=300.0, queries=150, turns=2.0, think_seconds=0.3, cv=2.0)
    stats = Watched()
    simulated = fleet(workload, router, statistics=stats, engine=config(max_num_seqs=2), max_retries=1, **STORMY)
    times: list[float] = []
    at = simulated._at

    def watched(time: float, call: Any, argument: Any) -> None:
        assert time >= simulated.now, "something was to happen in the past"
        times.append(simulated.now)
        at(time, call, argument)

    simulated._at = watched  # type: ignore[method-assign]
    add = stats.timeline.add

    def counted(time: float, num_open: int, num_replicas: int) -> None:
        over = stats.num_finished + stats.num_refused + stats.num_too_long
        assert num_open == stats.num_sent - over, "a client that thinks about the next turn has no open query"
        add(time, num_open, num_replicas)

    stats.timeline.add = counted  # type: ignore[method-assign]
    simulated.run()
    assert times == sorted(times)
    assert stats.num_resent > 0 and stats.num_refused > 0 and stats.num_lost_tokens > 0, "else this would prove little"
    assert stats.num_sent == stats.num_finished + stats.num_refused + stats.num_too_long > 150
    assert stats.num_retries > stats.num_refused
    assert max(Counter(query.number for query in stats.queries).values()) == 1
    assert not simulated.queued and simulated.num_open == 0


def test_no_token_is_lost_or_counted_twice() -> None:
    simulated = fleet(synthetic(rate=100.0), **STORMY)
    replicas: list[Replica] = []
    make_replica = simulated.make_replica
    simulated.make_replica = lambda number: replicas.append(made := make_replica(number)) or made  # type: ignore[func-returns-value]
    stats = simulated.run()
    assert stats.num_resent and len(replicas) > 3
    assert sum(replica.num_tokens for replica in replicas) == stats.num_output_tokens + stats.num_lost_tokens


@pytest.mark.slow
@pytest.mark.parametrize("router", ROUTERS)
def test_what_is_over_goes_without_a_garbage_collector(router: str) -> None:
    """In a run there is none. So nothing may refer to itself in a circle, also after deaths and refusals."""
    workload = synthetic(rate=300.0, queries=80, turns=2.0, think_seconds=0.3, cv=2.0)
    simulated = fleet(workload, router, engine=config(max_num_seqs=2), max_retries=1, **STORMY)
    collects: set[bool] = set()
    simulated.on_progress = lambda now: collects.add(gc.isenabled())
    gc.collect()
    gc.disable()  # also after the run, which leaves it as it was
    try:
        simulated.run()
        assert not gc.isenabled() and gc.collect() == 0
    finally:
        gc.enable()
    assert simulated.statistics.num_resent and simulated.statistics.num_refused, "else this would prove little"
    again = fleet(synthetic(queries=3), router)
    again.on_progress = simulated.on_progress
    again.run()
    assert collects == {False} and gc.isenabled()


@pytest.mark.parametrize("router", ROUTER)
def test_the_same_seed_gives_the_same_result(router: str) -> None:
    def run(seed: int) -> str:
        workload = synthetic(turns=2.0, shared_prefix=64, num_prefixes=3, think_seconds=1.0, queries=40, seed=seed)
        return json.dumps(fleet(workload, router, replicas=3, deaths=((1.0, 1),)).run().report())

    assert run(1) == run(1) != run(2)


@pytest.mark.parametrize("rate", [pytest.param(20.0, id="half empty", marks=pytest.mark.slow), 200.0])
def test_a_slower_card_is_never_better(rate: float) -> None:
    def run(slower: float) -> dict[str, Any]:
        return fleet(synthetic(rate=rate, queries=100), costs=Linear(slower), replicas=2).run().report()

    found = [run(slower) for slower in (1.0, 1.3, 2.0)]
    for fast, slow in pairwise(found):
        assert slow["tokens"]["output_per_second"] <= fast["tokens"]["output_per_second"]
        for times in ("first_token_seconds", "token_seconds", "whole_seconds"):
            assert all(slow[times][name] >= fast[times][name] for name in ("mean", "p50", "p99")), times


@pytest.mark.parametrize("utilisation", [0.5, pytest.param(0.8, marks=pytest.mark.slow)])
def test_one_at_a_time_is_the_queue_of_the_textbook(utilisation: float) -> None:
    """Poisson arrivals, one server, constant service: the mean wait is that of Pollaczek and Khinchine."""
    costs = Linear(step=0.9, host=0.1, decode=0.0, key=0.0, prompt_token=0.0)
    num_queries = 2_000 if utilisation < 0.6 else 30_000
    one = Lengths.parse("1")
    workload = synthetic(rate=utilisation, queries=num_queries, prompt_tokens=one, output_tokens=one)
    stats = fleet(workload, engine=config(max_num_seqs=1, async_scheduling=False), costs=costs).run()
    wait = stats.whole.mean - 1.0
    assert wait == pytest.approx(utilisation / (2 * (1 - utilisation)), rel=0.12 if utilisation < 0.6 else 0.08)
    assert stats.busy_seconds == pytest.approx(0.9 * num_queries)


def test_queries_wait_at_the_router_while_all_replicas_are_full() -> None:
    stats = fleet(synthetic(rate=500.0), replicas=2, max_ongoing_requests=4).run()
    assert stats.num_finished == 200 and stats.longest_router_queue > 100
    most = fleet(synthetic(rate=500.0), replicas=2).run()
    assert most.longest_router_queue == 0 and most.whole.mean < stats.whole.mean


def test_who_is_refused_tries_again_a_second_later_and_then_gives_up() -> None:
    def run(**options: Any) -> Statistics:
        return fleet(synthetic(rate=1000.0, queries=100), max_queue=1, **options).run()

    without, once = run(max_retries=0), run(max_retries=1)
    assert without.num_retries == 0 and without.num_refused > 30
    assert once.num_retries == without.num_refused and once.num_refused < without.num_refused
    assert once.first_token.largest > 1.0 > without.first_token.largest


def test_a_text_that_is_too_long_is_counted_and_not_sent_again() -> None:
    stats = fleet(synthetic(prompt_tokens=Lengths.parse("uniform:1500,2500"), queries=50)).run()
    assert stats.num_too_long > 10 and stats.num_finished == 50 - stats.num_too_long and stats.num_retries == 0


def test_an_answer_that_reaches_the_models_limit_is_cut_short() -> None:
    lengths: dict[str, Any] = {"prompt_tokens": Lengths.parse("uniform:1900,2000")}
    lengths |= {"output_tokens": Lengths.parse("100")}
    stats = fleet(synthetic(queries=20, **lengths)).run()
    assert stats.num_finished == 20 and 0 < stats.num_cut_short < 20
    whole = [query for query in synthetic(queries=20, **lengths).queries() if len(query.prompt) + 100 <= 2048]
    assert stats.num_cut_short == 20 - len(whole)
    assert f"{stats.num_cut_short} cut short" in table(stats.report())


@pytest.mark.parametrize(("load", "growth"), [(0.5, 0.0), (0.8, 0.0), (1.05, 0.05), (1.5, 0.5)])
def test_a_queue_without_end_is_seen(load: float, growth: float) -> None:
    """One server, constant service: beyond its capacity, first tokens come later by the excess load."""
    costs = Linear(step=0.9, host=0.1, decode=0.0, key=0.0, prompt_token=0.0)
    one = Lengths.parse("1")
    workload = synthetic(rate=load, queries=400, prompt_tokens=one, output_tokens=one)
    report = fleet(workload, engine=config(max_num_seqs=1, async_scheduling=False), costs=costs).run().report()
    assert report["first_token_growth"] == pytest.approx(growth, abs=0.006)
    assert ("no steady state" in table(report)) == (growth > 0)


def test_the_mean_of_blocks_in_use_is_that_of_littles_law() -> None:
    """Also where a replica is idle most of the time, and where answers have one token."""
    for output, rate in (("1", 1.0), ("60", 1.0), ("60", 40.0)):
        lengths: dict[str, Any] = {"prompt_tokens": Lengths.parse("256"), "output_tokens": Lengths.parse(output)}
        stats = fleet(synthetic(rate=rate, queries=100, **lengths), engine=config(max_num_batched_tokens=512)).run()
        blocks = (256 + int(output) / 2) / 16  # of a query, on average over its time
        assert stats.block_seconds == pytest.approx(blocks * stats.whole.total, rel=0.1), (output, rate)


def test_a_replica_that_dies_while_it_starts_starts_anew() -> None:
    def run(*deaths: tuple[float, int]) -> Statistics:
        return fleet(synthetic(rate=60.0), deaths=deaths, startup_seconds=2.0).run()

    once, twice, nobody = run((1.0, 0)), run((1.0, 0), (2.5, 1)), run((1.0, 0), (2.5, 9))
    assert (once.num_deaths, twice.num_deaths, nobody.num_deaths) == (1, 2, 1)
    assert twice.first_token.largest == pytest.approx(once.first_token.largest + 1.5, abs=0.3)
    assert nobody.report() == once.report()
    assert twice.replica_seconds == pytest.approx(twice.seconds), "one was there, or started, at any time"


def grows(**options: Any) -> tuple[Fleet, list[tuple[float, int]]]:
    """A fleet under a load that begins at once and ends; and when it had how many replicas."""
    rule = Autoscaling(**{"max_replicas": 4, "target_ongoing_requests": 4, "look_back_period_s": 2.0} | options)
    simulated = fleet(synthetic(rate=60.0, queries=600), autoscaling=rule, startup_seconds=3.0)
    sizes: list[tuple[float, int]] = []

    def changed(replicas: Sequence[Replica]) -> None:
        sizes.append((simulated.now, len(replicas)))

    simulated.router.replicas_changed = changed  # type: ignore[method-assign]
    simulated.run()
    return simulated, sizes


def test_replicas_are_added_after_the_delay_and_the_start_up() -> None:
    simulated, sizes = grows(upscale_delay_s=5.0)
    assert sizes[0] == (0.0, 1) and sizes[1][1] == 2
    assert 5.0 + 3.0 <= sizes[1][0] <= 5.0 + 3.0 + 3.0
    assert simulated.statistics.num_finished == 600
    hours = simulated.statistics.report()["replicas"]["gpu_hours"]
    assert simulated.statistics.seconds / 3600 < hours < 4 * simulated.statistics.seconds / 3600


def test_replicas_that_are_too_many_finish_what_they_have() -> None:
    simulated, sizes = grows(upscale_delay_s=0.0, downscale_delay_s=1.0, target_ongoing_requests=6)
    numbers = [number for _, number in sizes]
    assert max(numbers) > 1 and any(b < a for a, b in pairwise(numbers))
    assert simulated.statistics.num_finished == 600 and simulated.statistics.num_resent == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"replicas": 0}, "replicas must be at least 1; got 0"),
        ({"startup_seconds": -1.0}, "startup_seconds must be at least 0; got -1.0"),
        ({"max_ongoing_requests": 0}, "max_ongoing_requests must be at least 1"),
        (
            {"replicas": 3, "autoscaling": Autoscaling(max_replicas=2)},
            "replicas=3 must be from min_replicas=1 to max_re",
        ),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        fleet(**options)


def test_autoscaling_that_makes_no_sense() -> None:
    for options, name in [({"min_replicas": 3}, "max_replicas"), ({"target_ongoing_requests": 0}, "target_ongoing")]:
        with pytest.raises(ValueError, match=name):
            Autoscaling(**options)


def test_the_table_says_what_the_report_says() -> None:
    stats = Statistics(target_first=0.01, target_gap=0.004)
    report = fleet(statistics=stats, replicas=2).run().report(ranks=4)
    text = table(report)
    assert "200 of 200 finished" in text and "first token within 10 ms, 4 ms per token" in text
    assert f"{1e3 * report['first_token_seconds']['p99']:,.1f}" in text
    assert 0 < report["goodput"]["share"] < 1
    assert report["replicas"]["gpu_hours"] == pytest.approx(2 * 4 * report["seconds"] / 3600)


def test_a_report_of_nothing_is_json() -> None:
    report = fleet(synthetic(queries=None, seconds=1e-9)).run().report()
    assert json.loads(json.dumps(report, allow_nan=False))["first_token_seconds"]["p50"] is None
    assert "0 of 0" in table(report)
