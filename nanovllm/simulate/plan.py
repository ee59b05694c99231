"""The fewest GPUs that meet a target, by search over simulations: how many replicas, and how each should be set up.

More replicas are never worse, but for chance. So for each set-up the fewest that suffice are found by bisection, and a
set-up that fails with as many GPUs as another one needs is out after one simulation. These are short. The best ones are
then simulated for longer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any

from nanovllm.simulate.report import MOST_GROWTH, number
from nanovllm.simulate.scenario import Scenario

LONGER = 4  # times as many queries for the best set-ups
NUM_OTHERS = 3
QUIET_RATE = 0.01  # queries per second: each one is alone
QUIET_QUERIES = 50


@dataclass(frozen=True)
class Target:
    """So many of 100 first tokens, and of 100 gaps between tokens, in so many seconds. None: no target."""

    first: float | None
    gap: float | None
    percentile: float = 99.0

    def __post_init__(self) -> None:
        if self.first is None and self.gap is None:
            raise ValueError("a plan needs target_first or target_gap, such as --target-first 200ms")
        for name in ("first", "gap"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"target_{name} must be a positive number of seconds; got {value!r}")
        if not 0 < self.percentile < 100:
            raise ValueError(f"percentile must be above 0 and below 100; got {self.percentile!r}")

    def parts(self) -> Iterator[tuple[str, float]]:
        """The name in `Outcome` and the limit, of each part that there is."""
        for name in ("first", "gap"):
            if (limit := getattr(self, name)) is not None:
                yield name, limit


@dataclass(frozen=True)
class SetUp:
    """What may be chosen for a replica: fields of `EngineConfig`."""

    tensor_parallel_size: int
    max_num_batched_tokens: int
    kvcache_block_size: int
    speculative: Mapping[str, Any] | None = field(default=None, hash=False)

    def __str__(self) -> str:
        guesses = "no speculation" if self.speculative is None else f"speculative={dict(self.speculative)}"
        return (
            f"tensor_parallel_size={self.tensor_parallel_size}, max_num_batched_tokens={self.max_num_batched_tokens}, "
            f"kvcache_block_size={self.kvcache_block_size}, {guesses}"
        )


@dataclass(frozen=True)
class Outcome:
    """What a simulation of a set-up brought. Times are in seconds, at the target's percentile."""

    set_up: SetUp
    replicas: int
    first: float
    gap: float
    share_unserved: float  # of the queries: refused, too long, or cut short
    growth: float = 0.0  # of the time to the first token: see `Timeline.growth`

    @property
    def num_gpus(self) -> int:
        return self.replicas * self.set_up.tensor_parallel_size

    def excess(self, target: Target) -> float:
        """How much of what is allowed was used, by the worst of the target's parts: up to 1 is good."""
        allowed = 1 - target.percentile / 100
        endless = self.growth / MOST_GROWTH if self.growth > MOST_GROWTH else 0.0  # below that it is chance
        return max(
            [self.share_unserved / allowed, endless, *(getattr(self, name) / limit for name, limit in target.parts())]
        )

    def numbers(self, target: Target) -> str:
        names = {"first": "first token", "gap": "gap"}
        said = [
            f"p{target.percentile:g} {names[name]} {1e3 * getattr(self, name):.1f} ms (target {1e3 * limit:g})"
            for name, limit in target.parts()
        ]
        if self.share_unserved:
            said.append(f"{100 * self.share_unserved:.1f}% refused, too long or cut short")
        if self.growth > MOST_GROWTH:
            said.append(f"time to the first token grows by {1e3 * self.growth:.0f} ms per second")
        return ", ".join(said)

    def as_json(self) -> dict[str, Any]:
        """As JSON. A time is None if no query was finished."""
        times = {name: number(getattr(self, name)) for name in ("first", "gap")}
        return asdict(self) | times | {"num_gpus": self.num_gpus}


@dataclass(frozen=True)
class Plan:
    best: Outcome
    others: list[tuple[Outcome, str]]  # the runners-up, and why each loses
    scenario: Scenario  # that the best one was simulated in


@dataclass
class Planner:
    """Finds the plan for a scenario, of which clients, router and card are kept."""

    scenario: Scenario  # with the workload of a short simulation
    target: Target
    set_ups: Sequence[SetUp]
    max_gpus: int = 256
    on_trial: Callable[[str], None] = lambda said: None  # told what is being simulated
    num_trials: int = field(default=0, init=False)
    _known: dict[tuple[SetUp, int, bool], Outcome] = field(default_factory=dict, init=False)

    def find(self) -> Plan:
        """Raises ValueError if no number of GPUs up to `max_gpus` meets the target, with what comes nearest."""
        found: list[Outcome] = []
        best = self.max_gpus  # GPUs: no set-up that needs more is of interest
        for set_up in self.set_ups:
            outcome = self._fewest(set_up, best)
            found.append(outcome)
            if self._good(outcome):
                best = min(best, outcome.num_gpus)
        found.sort(key=self._rank)
        if self._good(found[0]):
            finalists = sorted((self._confirmed(o) for o in found[: NUM_OTHERS + 1] if self._good(o)), key=self._rank)
        else:
            finalists = found[:1]
        winner = finalists[0]
        if not self._good(winner):
            raise ValueError(
                f"no plan: the nearest, {winner.set_up} with {winner.num_gpus} GPUs, has "
                f"{winner.numbers(self.target)}; raise the target or max_gpus={self.max_gpus}"
            )
        others = [*finalists[1:], *(o for o in found if o.set_up not in {f.set_up for f in finalists})][:NUM_OTHERS]
        chosen = with_set_up(self.scenario, winner.set_up, winner.replicas)
        return Plan(winner, [(o, self._why(o, winner)) for o in others], chosen)

    def _good(self, outcome: Outcome) -> bool:
        return outcome.excess(self.target) <= 1

    def _rank(self, outcome: Outcome) -> tuple[bool, float, float]:
        """The good ones first, by GPUs; then those that miss the target by least."""
        good, excess = self._good(outcome), outcome.excess(self.target)
        return not good, outcome.num_gpus if good else excess, excess

    def _why(self, outcome: Outcome, best: Outcome) -> str:
        if not self._good(outcome):
            return f"misses the target with {outcome.num_gpus} GPUs"
        if outcome.num_gpus > best.num_gpus:
            return f"needs {outcome.num_gpus} GPUs"
        return "as many GPUs, and nearer to the limit"

    def _fewest(self, set_up: SetUp, max_gpus: int) -> Outcome:
        """The fewest replicas of this set-up that meet the target with at most so many GPUs; if none do, what the most
        replicas brought, or one that has a single query at a time."""
        most = max_gpus // set_up.tensor_parallel_size
        if not most:
            return self._trial(set_up, 1)
        if not self._good(quiet := self._quiet(set_up)):
            return quiet
        if most == self.max_gpus // set_up.tensor_parallel_size:
            return self._upwards(set_up, 1, most)
        if not self._good(outcome := self._trial(set_up, most)):
            return outcome
        high, step = most, 1
        while high > 1 and self._good(self._trial(set_up, max(1, high - step))):
            high, step = max(1, high - step), 2 * step
        return self._bisected(set_up, max(0, high - step), high)

    def _upwards(self, set_up: SetUp, least: int, most: int, longer: bool = False) -> Outcome:
        """The outcome of the fewest replicas, from `least` to `most`, that meet the target; else that of `most`."""
        low, high, step = least - 1, least, 1
        while not self._good(outcome := self._trial(set_up, high, longer)):
            if high == most:
                return outcome
            low, high, step = high, min(high + step, most), 2 * step
        return self._bisected(set_up, low, high, longer)

    def _bisected(self, set_up: SetUp, low: int, high: int, longer: bool = False) -> Outcome:
        """The outcome of the fewest replicas that meet the target. `low` (or 0) do not meet it, and `high` do."""
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._good(self._trial(set_up, middle, longer)) else (middle, high)
        return self._trial(set_up, high, longer)

    def _quiet(self, set_up: SetUp) -> Outcome:
        """What a query finds that is alone. Where this misses the target, more replicas do not help."""
        workload = self.scenario.workload
        if workload.replay is not None:
            return Outcome(set_up, 1, 0.0, 0.0, 0.0)
        workload = replace(workload, rate=QUIET_RATE, seconds=None, queries=QUIET_QUERIES)
        return self._simulate(set_up, 1, replace(self.scenario, workload=workload))

    def _confirmed(self, outcome: Outcome) -> Outcome:
        """The same with more queries, and more replicas if it takes these."""
        most = max(outcome.replicas, self.max_gpus // outcome.set_up.tensor_parallel_size)
        return self._upwards(outcome.set_up, outcome.replicas, most, longer=True)

    def _trial(self, set_up: SetUp, replicas: int, longer: bool = False) -> Outcome:
        ends = {name: end for name in ("seconds", "queries") if (end := getattr(self.scenario.workload, name))}
        longer = longer and bool(ends)  # all of a trace is no longer than that
        key = set_up, replicas, longer
        if key not in self._known:
            scenario = self.scenario
            if longer:
                more = {name: LONGER * end for name, end in ends.items()}
                scenario = replace(scenario, workload=replace(scenario.workload, **more))
            self._known[key] = self._simulate(set_up, replicas, scenario)
        return self._known[key]

    def _simulate(self, set_up: SetUp, replicas: int, scenario: Scenario) -> Outcome:
        self.num_trials += 1
        self.on_trial(f"{replicas} x {set_up}")
        statistics, percentile = with_set_up(scenario, set_up, replicas).run(), self.target.percentile
        first, gap = statistics.first_token.percentile(percentile), statistics.gap.percentile(percentile)
        if not statistics.num_finished:
            first = gap = inf
        unserved = statistics.num_refused + statistics.num_too_long + statistics.num_cut_short
        share = unserved / max(1, statistics.num_sent)
        # A trace ends by itself: a queue that grows in its rush hour has an end.
        growth = statistics.timeline.growth if scenario.workload.replay is None else 0.0
        return Outcome(set_up, replicas, first, 0.0 if gap != gap else gap, share, growth)


def with_set_up(scenario: Scenario, set_up: SetUp, replicas: int) -> Scenario:
    engine = replace(scenario.engine, **vars(set_up))
    if engine.speculative is not None:
        engine = replace(engine, async_scheduling=None)
    return replace(scenario, engine=engine, fleet=replace(scenario.fleet, replicas=replicas))
