"""The plan is the fewest GPUs, and says why the others lose."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, Self

import pytest

from nanovllm.config import EngineConfig
from nanovllm.simulate import scenario as scenarios
from nanovllm.simulate.arrivals import Lengths
from nanovllm.simulate.costs import IntakeTime, ServerTime
from nanovllm.simulate.fleet import FleetOptions
from nanovllm.simulate.plan import Outcome, Planner, SetUp, Target
from nanovllm.simulate.scenario import Scenario, WorkloadOptions
from tests.simulate.linear import Linear


class Card(Linear):
    """Two ranks are 1.6 times as fast as one."""

    card, model, measured, source, kv_tokens = "made up", "any", True, "made up", 6400
    server, intake = ServerTime(), IntakeTime()

    def for_seats(self, seats: int) -> Self:
        return self


@pytest.fixture
def scenario(monkeypatch: pytest.MonkeyPatch) -> Scenario:
    monkeypatch.setattr(scenarios, "load_costs", lambda card, model, ranks: Card(slower=1.6 ** (1 - ranks)))
    lengths = Lengths.parse("uniform:20,300")
    workload = WorkloadOptions(rate=400.0, queries=100, prompt_tokens=lengths, output_tokens=Lengths.parse("20"))
    return Scenario(model="any", card="made up", engine=EngineConfig(), workload=workload, fleet=FleetOptions())


@pytest.mark.parametrize(
    "option",
    [{"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}, {"enable_expert_parallel": True}, {"enforce_eager": True}],
)
def test_what_no_card_knows_the_cost_of_is_not_simulated(scenario: Scenario, option: dict[str, Any]) -> None:
    [(name, value)] = option.items()
    with pytest.raises(ValueError, match=f"{name}={value!r} cannot be simulated; leave {name} out"):
        replace(scenario, engine=EngineConfig(**option))


def test_a_pool_is_not_smaller_than_a_block(scenario: Scenario) -> None:
    with pytest.raises(
        ValueError, match="room for the keys of 6400 tokens, less than a block of kvcache_block_size=8192"
    ):
        _ = replace(scenario, engine=EngineConfig(kvcache_block_size=8192)).config
    assert replace(scenario, engine=EngineConfig(kvcache_block_size=4096)).config.num_kv_blocks == 1


def test_a_draft_model_is_not_simulated_as_if_it_cost_nothing(scenario: Scenario) -> None:
    with pytest.raises(ValueError, match="the costs of a draft model were not measured; choose"):
        replace(scenario, engine=EngineConfig(speculative={"model": "large", "k": 4}))


ONE, TWO = SetUp(1, 256, 16), SetUp(2, 256, 16)


@pytest.mark.parametrize("set_ups", [[ONE, TWO], [TWO, ONE]], ids=["small first", "large first"])
def test_the_plan_is_the_fewest_gpus(scenario: Scenario, set_ups: list[SetUp]) -> None:
    target = Target(0.03, 0.012, 90.0)
    planner = Planner(scenario, target, set_ups)
    plan = planner.find()
    trials = planner.num_trials

    def meets(set_up: SetUp, replicas: int) -> bool:
        return planner._trial(set_up, replicas).excess(target) <= 1

    fewest = {set_up: next(n for n in range(1, 9) if meets(set_up, n)) for set_up in set_ups}
    assert fewest[ONE] > 1
    assert plan.best.num_gpus == min(fewest[ONE], 2 * fewest[TWO]) and plan.best.excess(target) <= 1
    assert trials < 14
    [(other, why)] = plan.others
    assert {other.set_up, plan.best.set_up} == {ONE, TWO}
    assert f"{other.num_gpus} GPUs" in why or "as many GPUs" in why
    chosen = plan.scenario
    assert chosen.fleet.replicas == plan.best.replicas
    assert chosen.engine.tensor_parallel_size == plan.best.set_up.tensor_parallel_size
    assert chosen.config.num_kv_blocks == 400


def test_what_no_number_of_gpus_can_do_is_said(scenario: Scenario) -> None:
    planner = Planner(scenario, Target(0.03, 0.0005, 90.0), [ONE, TWO])
    with pytest.raises(ValueError, match=r"no plan: the nearest, tensor_parallel_size=2.*gap 1\.\d ms \(target 0.5\)"):
        planner.find()
    assert planner.num_trials == 2, "a query that is alone tells"


def test_a_target_that_is_met_only_while_the_queue_is_short_is_not_met(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an overloaded replica: a simulation that is short enough ends before anybody waits for too long."""
    monkeypatch.setattr(scenarios, "load_costs", lambda card, model, ranks: Card(slower=20.0))
    workload = replace(scenario.workload, rate=8.0, queries=None, seconds=15.0)
    slow = replace(scenario, workload=workload, engine=EngineConfig(max_num_seqs=8))
    target = Target(60.0, None, 90.0)
    planner = Planner(slow, target, [ONE])
    plan, alone = planner.find(), planner._trial(ONE, 1, longer=True)
    assert alone.first < 60.0 and alone.growth > 0.2 and alone.excess(target) > 1
    assert plan.best.replicas > 1 and plan.best.growth < 0.01
    assert "time to the first token grows by" in alone.numbers(target)


def made_up(scenario: Scenario, max_gpus: int) -> Planner:
    """Three replicas seem to suffice. In a longer simulation seven do."""
    planner = Planner(scenario, Target(0.1, None, 90.0), [ONE], max_gpus)

    def simulate(set_up: SetUp, replicas: int, simulated: Scenario) -> Outcome:
        longer = (simulated.workload.queries or 0) > 100
        return Outcome(set_up, replicas, 0.05 if replicas >= (7 if longer else 3) else 0.2, 0.0, 0.0)

    planner._quiet = lambda set_up: Outcome(set_up, 1, 0.01, 0.0, 0.0)  # type: ignore[method-assign]
    planner._simulate = simulate  # type: ignore[method-assign, assignment]
    return planner


def test_the_plan_holds_in_the_longer_simulation(scenario: Scenario) -> None:
    assert made_up(scenario, 256).find().best.replicas == 7
    with pytest.raises(ValueError, match=r"no plan: the nearest, .* with 5 GPUs, has p90 first token 200"):
        made_up(scenario, 5).find()


def test_all_of_a_trace_is_simulated_once(scenario: Scenario, tmp_path: Path) -> None:
    rows = [f"{i / 20},{i},20" for i in range(1, 100)]
    (tmp_path / "trace.csv").write_text("\n".join(["Timestamp,Request tokens,Response tokens", *rows]))
    traced = replace(scenario, workload=WorkloadOptions(replay=tmp_path / "trace.csv"))
    planner = Planner(traced, Target(1.0, None, 90.0), [ONE])
    assert planner.find().best.replicas == 1 and planner.num_trials == 1


def test_queries_that_are_too_long_are_not_served(scenario: Scenario) -> None:
    planner = Planner(replace(scenario, engine=EngineConfig(max_model_len=200)), Target(1.0, None, 90.0), [ONE])
    assert planner._trial(ONE, 1).share_unserved == pytest.approx(120 / 280, abs=0.1)
    with pytest.raises(ValueError, match="% refused, too long or cut short"):
        planner.find()


def test_too_few_gpus(scenario: Scenario) -> None:
    with pytest.raises(ValueError, match="raise the target or max_gpus=1"):
        Planner(scenario, Target(0.01, None), [ONE], max_gpus=1).find()


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ((None, None), "a plan needs target_first or target_gap"),
        ((0.1, -1.0), "target_gap must be a positive number of seconds; got -1.0"),
        ((0.1, None, 100.0), "percentile must be above 0 and below 100; got 100.0"),
    ],
)
def test_targets_that_make_no_sense(values: tuple[Any, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Target(*values)


def test_an_outcome_without_a_query_is_json() -> None:
    told = json.loads(json.dumps(Outcome(ONE, 2, inf, inf, 1.0).as_json(), allow_nan=False))
    assert told["first"] is told["gap"] is None and told["num_gpus"] == 2


def test_an_outcome_is_as_bad_as_its_worst_part() -> None:
    target = Target(0.2, 0.02, 99.0)
    assert Outcome(ONE, 3, 0.1, 0.03, 0.0).excess(target) == pytest.approx(1.5)
    assert Outcome(ONE, 3, 0.1, 0.01, 0.02).excess(target) == pytest.approx(2.0), "2% are refused, and 1% may be late"
    assert Outcome(ONE, 3, 0.1, 0.01, 0.0, growth=0.03).excess(target) == pytest.approx(3.0)
    assert Outcome(ONE, 3, 0.1, 0.01, 0.0, growth=0.009).excess(target) == pytest.approx(0.5), "that is chance"
    assert Outcome(TWO, 3, inf, 0.0, 1.0).excess(target) == inf and Outcome(TWO, 3, 0, 0, 0).num_gpus == 6
    said = Outcome(ONE, 3, 0.1, 0.03, 0.02).numbers(target)
    assert (
        said
        == "p99 first token 100.0 ms (target 200), p99 gap 30.0 ms (target 20), 2.0% refused, too long or cut short"
    )
