"""A replica decides what the engine decides, at the times that its costs give."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.plan import Scheduled, StepMasks, StepPlan, StepResult
from nanovllm.sampling_params import SamplingParams
from nanovllm.simulate.arrivals import VOCAB_SIZE, Query
from nanovllm.simulate.costs import HALF_ASLEEP, IntakeTime, ServerTime
from nanovllm.simulate.histogram import Histogram
from nanovllm.simulate.replica import Replica
from nanovllm.simulate.step_shape import StepShape, shape_of
from tests.simulate.linear import Linear, config, fleet, synthetic

Planned = tuple[float, list[Scheduled]]  # a step: when it was over, and what it computed


class ByHand:
    """An executor that takes down the plans. Every step samples the same token for all."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def add(self, key: int, token_ids: Sequence[int], params: SamplingParams) -> None: ...
    def remove(self, key: int) -> None: ...
    def close(self) -> None: ...
    def guesses(self) -> dict[int, list[int]]:
        return {}

    def draw(self, masks: StepMasks) -> None: ...

    def submit(self, plan: StepPlan) -> "Result":
        self.plans.append(plan)
        return Result(plan, len(self.plans) % 251)


class Result(ByHand):
    def __init__(self, plan: StepPlan, token: int) -> None:
        self.plan, self.token = plan, token

    def result(self) -> StepResult:
        return StepResult({item.key: ([self.token], None) for item in self.plan.scheduled if item.sample})


def by_hand(queries: list[Query], engine_config: EngineConfig, costs: Linear) -> list[Planned]:
    """What an engine does with the queries, one step at a time, with the times written down as the design has them."""
    executor = ByHand()
    engine = LLMEngine(executor, engine_config, vocab_size=VOCAB_SIZE)
    coming, now, steps = list(queries), 0.0, []
    ends: list[float] = []  # of the steps on the device
    num_committed = 0
    while coming or engine.has_unfinished():
        if not engine.has_unfinished():
            now = max(now, coming[0].time)
        while coming and coming[0].time <= now:
            query = coming.pop(0)
            params = SamplingParams(max_tokens=query.max_tokens, ignore_eos=True, seed=0)
            engine.add_request(str(query.number), query.prompt, params)
        engine.step()
        if len(executor.plans) > len(ends):
            shape = shape_of(executor.plans[-1])
            now += costs.host_seconds(shape)
            ends.append(max(now, ends[-1] if ends else 0.0) + costs.device_seconds(shape))
            steps.append((ends[-1], executor.plans[-1].scheduled))
        in_flight = len(engine._in_flight)
        if len(ends) - in_flight > num_committed:  # a step was committed, when the device was done with it
            num_committed = len(ends) - in_flight
            now = max(now, ends[num_committed - 1])
    return steps


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_blocks": 60}, {"max_num_batched_tokens": 40}, {"enable_prefix_caching": False, "max_num_seqs": 4}],
    ids=["plenty", "few blocks", "small budget", "few seats"],
)
def test_the_schedule_is_the_engines_own(asynchronous: bool, options: dict[str, Any]) -> None:
    chosen, costs = config(async_scheduling=asynchronous, **options), Linear()
    workload: dict[str, Any] = {"rate": 60.0, "queries": 30, "shared_prefix": 40, "num_prefixes": 2}
    expected = by_hand(list(synthetic(**workload).queries()), chosen, costs)
    simulated = fleet(synthetic(**workload), engine=chosen)
    steps: list[Planned] = []
    make_replica = simulated.make_replica

    def spied(number: int) -> Replica:
        replica = make_replica(number)
        submit = replica.executor.submit

        def spy(plan: StepPlan) -> Any:
            step = submit(plan)
            steps.append((step.due, plan.scheduled))
            return step

        replica.executor.submit = spy  # type: ignore[method-assign]
        return replica

    simulated.make_replica = spied
    simulated.run()
    assert len(steps) == len(expected) > 100
    for (time, items), (end, scheduled) in zip(steps, expected, strict=True):
        assert items == scheduled
        assert time == pytest.approx(end)
    if "num_kv_blocks" in options:
        assert simulated.statistics.num_preemptions > 0, "else this would prove little"


@pytest.mark.parametrize(("host", "asynchronous", "period"), [(1, True, 3), (5, True, 5), (1, False, 4), (5, False, 8)])
def test_steps_follow_each_other(host: float, asynchronous: bool, period: float) -> None:
    """With asynchronous scheduling in the longer time of host and device, else in their sum."""
    costs = Linear(step=3.0, host=host, decode=0.0, key=0.0, prompt_token=0.0)
    replica = Replica(0, config(async_scheduling=asynchronous), costs, vocab_size=VOCAB_SIZE)
    gaps, now = Histogram(), 0.0
    replica.add(Query(0, 0.0, [1, 2, 3], max_tokens=10), now)
    ends, done = [], []
    while (over := replica.begin_turn(now)) is not None:
        now = over
        done += replica.end_turn(now, gaps)
        ends += [now] if replica.executor.delivered else []
    assert len(ends) == 10 and [job.finished_time for job in done] == [now]
    # The second step is planned before the first is collected.
    assert ends[0] == pytest.approx(max(2 * host, host + 3) if asynchronous else host + 3)
    assert [b - a for a, b in pairwise(ends[1:-1])] == pytest.approx([period] * 7)
    assert gaps.num_values == 9 and gaps.mean == pytest.approx((ends[-1] - ends[0]) / 9)


def test_what_a_query_costs_beside_its_steps() -> None:
    """Its intake lengthens the turn that takes it in; the server's tokens lengthen steps, and come later."""
    costs = Linear(step=1.0, host=0.0, decode=0.0, key=0.0, prompt_token=0.0)

    def finished(**times: Any) -> list[tuple[float | None, float]]:
        chosen = config(async_scheduling=False)
        replica, now, done = Replica(0, chosen, costs, vocab_size=VOCAB_SIZE, **times), 0.0, []
        for number in range(3):
            replica.add(Query(number, 0.0, [number] * 10, max_tokens=2), 0.0)
        while (over := replica.begin_turn(now)) is not None:
            now = over
            done += replica.end_turn(now, Histogram())
        return [(job.first_token_time, job.finished_time) for job in done]

    assert finished() == [(1.0, 2.0)] * 3
    assert finished(intake=IntakeTime(0.5, 0.1)) == [(pytest.approx(5.5), pytest.approx(6.5))] * 3
    assert finished(intake=IntakeTime(wake=0.5)) == [(1.0, 2.0)] * 3, "nothing was idle before"
    assert finished(server=ServerTime(engine_token=0.5)) == [(2.5, 5.0)] * 3
    assert finished(server=ServerTime(engine_step=0.5)) == [(1.5, 3.0)] * 3
    assert finished(server=ServerTime(api_token=0.5)) == [(2.0, 3.0)] * 3, "the middle one of three"
    assert finished(server=ServerTime(api_step=0.5)) == [(1.5, 2.5)] * 3


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_replica_knows_which_keys_its_sequences_share(enable_prefix_caching: bool) -> None:
    seen: list[StepShape] = []

    class Seen(Linear):
        def device_seconds(self, shape: StepShape) -> float:
            seen.append(shape)
            return super().device_seconds(shape)

    replica = Replica(0, config(enable_prefix_caching=enable_prefix_caching), Seen(), vocab_size=VOCAB_SIZE)
    for number in range(3):  # two blocks that are the same, and the rest of their own
        replica.add(Query(number, 0.0, [*range(32), *[number] * 8], max_tokens=20), 0.0)
        for _ in range(3):
            replica.end_turn(replica.begin_turn(0.0) or 0.0, Histogram())
    shared = [shape.shared_keys for shape in seen if shape.decodes == 3]
    assert len(shared) > 1 and shared == [2 * 32 * enable_prefix_caching] * len(shared)


def test_a_replica_that_was_idle_is_slow_at_first() -> None:
    """The longer it was idle, the slower, up to `wake`. A turn right behind another is not slower."""
    costs = Linear(step=1.0, host=0.0, decode=0.0, key=0.0, prompt_token=0.0)

    def first(idle: float) -> float:
        replica = Replica(0, config(async_scheduling=False), costs, vocab_size=VOCAB_SIZE, intake=IntakeTime(wake=0.5))
        replica.add(Query(0, idle, [1] * 10, max_tokens=2), idle)
        ends = [replica.begin_turn(idle) or 0.0]
        replica.end_turn(ends[-1], Histogram())
        ends.append(replica.begin_turn(ends[-1]) or 0.0)
        assert ends[1] - ends[0] == pytest.approx(1.0)
        return ends[0] - idle - 1.0

    assert first(0.0) == 0 and first(HALF_ASLEEP) == pytest.approx(0.25) and first(1e6) == pytest.approx(0.5)


def test_guesses_are_right_as_often_as_asked() -> None:
    speculative = {"method": "ngram", "k": 3}
    chosen = config(speculative=speculative, async_scheduling=False)
    simulated = fleet(synthetic(queries=100), engine=chosen, acceptance=0.7)
    stats = simulated.run()
    assert stats.num_output_tokens == sum(query.max_tokens for query in synthetic(queries=100).queries())
    plain = fleet(synthetic(queries=100), engine=config(async_scheduling=False)).run()
    per_step = plain.gap.num_values / stats.gap.num_values
    # 1 + 0.7 + 0.49 + 0.343, but for the last tokens of a query, where fewer are guessed
    assert 2.2 < per_step < 2.54


def test_a_histogram_is_as_exact_as_it_says() -> None:
    rng, histogram = random.Random(0), Histogram()
    values = sorted(rng.lognormvariate(-4, 2) for _ in range(20_000))
    for value in values:
        histogram.add(value)
    for percent in (1, 50, 90, 99, 99.9):
        true = values[int(len(values) * percent / 100) - 1]
        assert histogram.percentile(percent) == pytest.approx(true, rel=0.0051)
    assert histogram.mean == pytest.approx(sum(values) / len(values)) and histogram.largest == values[-1]
    assert histogram.percentile(100) == pytest.approx(values[-1], rel=0.0051)
    assert [share for _, share in histogram.curve()][-1] == 1.0


def test_a_histogram_of_nothing() -> None:
    histogram = Histogram()
    assert str(histogram.percentile(50)) == str(histogram.mean) == "nan"
    histogram.add(0.0)
    assert histogram.percentile(99) <= 1e-6
