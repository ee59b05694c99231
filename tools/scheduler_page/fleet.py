"""A run of several replicas behind a router, for the page: where each request went, why, and how things stood.

Loop, replicas, routers and the time of a step are those of `nanovllm.simulate`. Here they are only watched.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import count
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.simulate.arrivals import VOCAB_SIZE, Lengths, Query, Texts, Workload
from nanovllm.simulate.costs import Costs, load_costs
from nanovllm.simulate.fleet import Fleet, FleetOptions
from nanovllm.simulate.histogram import Histogram
from nanovllm.simulate.replica import Job, Replica
from nanovllm.simulate.report import Statistics
from nanovllm.simulate.routers import ROUTERS
from tools.scheduler_page.reasons import number as counted
from tools.scheduler_page.routing_reasons import Draws, ToldRouter

CARD, MODEL = "h200", "Qwen3-0.6B"  # measured, so that times are real
SECONDS = 1.0  # in which requests arrive
SEED = 291  # one of those with which about as many requests come as the rate says, at any rate
FRAME = 0.01  # s
MOST_FRAMES = 250
BLOCK_SIZE = 256  # the engine's default on a GPU
BEGINNING = 15 * BLOCK_SIZE  # tokens that requests may have in common: a long system prompt
OWN = Lengths("lognormal", 200.0, 0.6)  # tokens of a prompt behind that
OUTPUT = Lengths("lognormal", 48.0, 0.6)


@dataclass(frozen=True, kw_only=True)
class FleetSetup:
    """What the reader may choose."""

    router: str  # of ROUTERS
    replicas: int
    rate: int  # requests per second
    shared: int  # percent of the requests that begin like others
    beginnings: int  # how many different ones there are
    num_blocks: int  # of each replica
    seats: int  # max_num_seqs
    threshold: int = 0  # imbalanced_threshold of the router "prefix"; 0: none
    startup: int = 300  # ms until another replica takes the place of a dead one
    deaths: tuple[tuple[int, int], ...] = ()  # when (ms), and the number of the replica

    @classmethod
    def parse(cls, values: dict[str, Any]) -> FleetSetup:
        """From JSON or TOML, where other keys may stand beside these."""
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        return cls(**known | {"deaths": tuple((time, number) for time, number in values.get("deaths", ()))})


class Clients(Workload):
    """Requests at random times. At another rate they are the same, only closer together."""

    def __init__(self, setup: FleetSetup) -> None:
        self.setup = setup

    def queries(self) -> Iterator[Query]:
        setup, draw, texts, time = self.setup, random.Random(SEED), Texts(), 0.0
        beginnings = [texts.new(BEGINNING) for _ in range(setup.beginnings)]
        for i in count():
            # Whole microseconds: the last bit of a logarithm is not the same in every C library.
            time = round(time + draw.expovariate(setup.rate), 6)
            if time >= SECONDS:
                return
            own, output, alike, which = OWN.draw(draw), OUTPUT.draw(draw), draw.random(), draw.random()
            if 100 * alike < setup.shared:
                which = int(which * setup.beginnings)
                yield Query(i, time, beginnings[which] + texts.new(own), output, f"beginning {which}")
            else:
                yield Query(i, time, texts.new(BEGINNING + own), output)


@cache
def costs() -> Costs:
    return load_costs(CARD, MODEL)


class WatchedReplica(Replica):
    """Tells the run how things stand whenever that changes."""

    run: FleetRun

    def add(self, query: Query, now: float) -> None:
        super().add(query, now)
        self.run.look(self, now)

    def end_turn(self, now: float, gaps: Histogram) -> list[Job]:
        done = super().end_turn(now, gaps)
        self.run.look(self, now)
        return done

    def die(self) -> list[Job]:
        jobs = super().die()
        self.run.died(self, jobs)
        return jobs


class WatchedStatistics(Statistics):
    def __init__(self, run: FleetRun) -> None:
        super().__init__()
        self.run = run

    def finished(self, job: Job) -> None:
        super().finished(job)
        self.run.finished(job)


def play_fleet(setup: FleetSetup) -> dict[str, Any]:
    """What the page draws: sentences and states of every hundredth of a second, and what came of it."""
    return FleetRun(setup).result()


class FleetRun:
    """A run in the making."""

    def __init__(self, setup: FleetSetup) -> None:
        self.setup = setup
        engine = EngineConfig(
            num_kv_blocks=setup.num_blocks,
            kvcache_block_size=BLOCK_SIZE,
            max_num_seqs=setup.seats,
            max_model_len=32 * BLOCK_SIZE,
        )
        self.config = engine.resolve(on_gpu=True, model_max_len=32 * BLOCK_SIZE)
        self.said: list[tuple[int, str, str]] = []  # frame, kind, sentence
        self.states: dict[int, dict[int, list[int]]] = {}  # by replica and frame: waiting, running, blocks in use
        self.lanes: dict[int, list[Any]] = {}  # by replica: whose place it has, first frame, frame of its death
        self.vacant: deque[int] = deque()  # places of the dead
        self.requests: list[list[Any]] = []  # number, replica, frame and ms of its first token, cached, prompt tokens
        self.replica_of: dict[int, int] = {}  # by request, where it went last
        draws = Draws(0)
        kwargs = {"imbalanced_threshold": setup.threshold} if setup.router == "prefix" and setup.threshold else {}
        router = ToldRouter(ROUTERS[setup.router](draws, BLOCK_SIZE, **kwargs), draws, self.routed)
        deaths = tuple((ms / 1000, number) for ms, number in setup.deaths)
        options = FleetOptions(replicas=setup.replicas, startup_seconds=setup.startup / 1000, deaths=deaths)
        self.fleet = Fleet(self.make_replica, router, Clients(setup), options, WatchedStatistics(self))

    def make_replica(self, number: int) -> Replica:
        replica = WatchedReplica(number, self.config, costs(), vocab_size=VOCAB_SIZE, intake=costs().intake)
        replica.run = self
        place = number if number < self.setup.replicas else self.lanes[self.vacant[0]][0]
        self.lanes[number] = [place, self.frame(), None]
        self.states[number] = {self.frame(): [0, 0, 0]}
        if number >= self.setup.replicas:
            dead = self.vacant.popleft()
            self.note("start", f"Replica {number} serves in the place of replica {dead}. Its cache is empty.")
        return replica

    def frame(self, now: float | None = None) -> int:
        return int((self.fleet.now if now is None else now) / FRAME + 1e-6)  # 0.29 / 0.01 is a little less than 29

    def note(self, kind: str, sentence: str) -> None:
        self.said.append((self.frame(), kind, sentence))

    # --- what is told by those who are watched ---

    def look(self, replica: Replica, now: float) -> None:
        engine = replica.engine
        state = [engine.num_waiting, engine.num_running, replica.num_blocks_in_use]
        self.states[replica.number][self.frame(now)] = state

    def routed(self, query: Query, replica: Replica, sentence: str) -> None:
        self.replica_of[query.number] = replica.number
        self.note("route", sentence)

    def died(self, replica: Replica, jobs: Sequence[Job]) -> None:
        lost = sum(job.num_delivered for job in jobs)
        self.lanes[replica.number][2] = self.frame()
        self.vacant.append(replica.number)
        begun = f"What it has begun is lost: {counted(len(jobs), 'request')}, {counted(lost, 'token')}"
        self.note("death", f"Replica {replica.number} dies. {begun}. The clients send it again.")

    def finished(self, job: Job) -> None:
        assert job.first_token_time is not None
        query, first = job.query, job.first_token_time
        place = self.replica_of[query.number]
        ms = round(1e3 * (first - query.time), 3)
        self.requests.append([query.number, place, self.frame(first), ms, job.seq.num_cached_tokens, len(query.prompt)])

    # --- the end ---

    def result(self) -> dict[str, Any]:
        statistics = self.fleet.run()
        num_frames = min(MOST_FRAMES, self.frame() + 1)
        frames: list[dict[str, Any]] = [{"why": [], "replicas": {}} for _ in range(num_frames)]
        for frame, kind, sentence in self.said:
            if frame < num_frames:
                frames[frame]["why"].append([kind, sentence])
        for number, (_, first, death) in self.lanes.items():
            state = [0, 0, 0]
            for frame in range(first, num_frames if death is None else min(death, num_frames)):
                state = self.states[number].get(frame, state)
                frames[frame]["replicas"][str(number)] = state
        if self.frame() >= num_frames:
            stop = f"The page stops after {MOST_FRAMES * FRAME:g} s. The totals are of the whole run."
            frames[-1]["why"].append(["error", stop])
        return {
            "frames": frames,
            "lanes": {str(number): place for number, (place, _, _) in self.lanes.items()},
            "requests": sorted(self.requests),
            "totals": totals(statistics),
            "error": None,
        }


def totals(statistics: Statistics) -> dict[str, Any]:
    """p50, p99: ms to the first token. cached: percent of the prompt tokens. by_replica: requests that it ever got."""
    return {
        "requests": statistics.num_finished,
        "p50": round(1e3 * statistics.first_token.percentile(50), 1),
        "p99": round(1e3 * statistics.first_token.percentile(99), 1),
        "cached": round(100 * statistics.num_cached_tokens / max(1, statistics.num_prompt_tokens)),
        "preemptions": statistics.num_preemptions,
        "resent": statistics.num_resent,
        "by_replica": {str(number): n for number, n in sorted(statistics.queries_by_replica.items())},
    }
