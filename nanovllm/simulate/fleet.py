"""Replicas, a router before them, and clients: one loop over what happens next, in virtual time.

    fleet = Fleet(make_replica, PowerOfTwoChoices(rng, block_size), workload, FleetOptions(replicas=4))
    fleet.run()

Nothing here waits or draws a random number that the seed does not fix, so the same seed gives the same result.
"""

import gc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any

from nanovllm.admission import QueueFull
from nanovllm.simulate.arrivals import Query, Workload
from nanovllm.simulate.autoscaling import Autoscaler, Autoscaling
from nanovllm.simulate.costs import ServerTime
from nanovllm.simulate.replica import NO_SERVER, Job, Replica
from nanovllm.simulate.report import Statistics
from nanovllm.simulate.routers import Router

RETRY_AFTER = 1.0  # s: what the server's 429 tells clients to wait
CONTROL_PERIOD = 1.0  # s between two decisions of the autoscaler
MakeReplica = Callable[[int], Replica]  # from its number


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """What a fleet is like, apart from its replicas and the router.

    replicas:              at the start; they serve at once.
    max_ongoing_requests:  queries that a replica may have at once; others wait at the router, first come first served.
                           None: any number. (Ray Serve's name.)
    max_retries:           how often a client sends a query again that was refused (the default of OpenAI's client).
    startup_seconds:       until a new replica serves.
    deaths:                (time, number of a replica) of each that dies, even while it starts. Another one is started
                           at once. If no replica has this number then, nothing happens. `Statistics.num_deaths` counts.
    autoscaling:           None: the number of replicas stays. Raises ValueError if `replicas` is outside its bounds.
    server:                what HTTP adds. Nothing for engines that are called directly.
    """

    replicas: int = 1
    max_ongoing_requests: int | None = None
    max_retries: int = 2
    startup_seconds: float = 60.0
    deaths: tuple[tuple[float, int], ...] = ()
    autoscaling: Autoscaling | None = None
    server: ServerTime = NO_SERVER

    def __post_init__(self) -> None:
        for name in ("replicas", "max_ongoing_requests"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value!r}")
        for name in ("max_retries", "startup_seconds"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)!r}")
        if (rule := self.autoscaling) and not rule.min_replicas <= self.replicas <= rule.max_replicas:
            raise ValueError(
                f"replicas={self.replicas} must be from min_replicas={rule.min_replicas} to "
                f"max_replicas={rule.max_replicas}"
            )


class Fleet:
    """All replicas there are, were and will be. `run` is called once; `statistics` has what came of it."""

    def __init__(
        self,
        make_replica: MakeReplica,
        router: Router,
        workload: Workload,
        options: FleetOptions,
        statistics: Statistics | None = None,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """`on_progress` is told the time of every first arrival."""
        self.make_replica = make_replica
        self.router = router
        self.workload = workload
        self.options = options
        self.statistics = statistics or Statistics()
        self.on_progress = on_progress
        self.now = 0.0
        self.serving: list[Replica] = []  # that take queries, oldest first
        self.draining: list[Replica] = []  # that finish what they have
        self.starting: list[int] = []  # numbers of those that do not serve yet
        self.queued: deque[Query] = deque()  # at the router: every replica that may take the first one is full
        self.num_open = 0  # queries that were sent and are not over
        self._num_thinking = 0  # clients that have an answer, and will send the next turn of their conversation
        self._born: dict[int, float] = {}  # by number, of all that are alive
        self._numbers = count()
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []  # a heap: time, order, what to call
        self._order = count()
        self._scaler = None if options.autoscaling is None else Autoscaler(options.autoscaling)

    def run(self) -> Statistics:
        # What is over goes at once, since nothing here refers to itself in a circle (a test sees to that). A collector
        # would look at all queries again and again, and find nothing.
        collects = gc.isenabled()
        gc.disable()
        try:
            return self._run()
        finally:
            if collects:
                gc.enable()

    def _run(self) -> Statistics:
        for _ in range(self.options.replicas):
            self._serve(self._new_number())
        for time, number in self.options.deaths:
            self._at(time, self._die, number)
        if self._scaler is not None:
            self._at(CONTROL_PERIOD, self._scale, self._scaler)
        queries = self.workload.queries()
        coming = next(queries, None)
        while coming is not None or self.num_open or self._num_thinking:
            if coming is not None and (not self._events or coming.time <= self._events[0][0]):
                self.now = coming.time
                self._arrive(coming)
                if self.on_progress is not None:
                    self.on_progress(self.now)
                coming = next(queries, None)
            else:
                self.now, _, call, argument = heappop(self._events)
                call(argument)
        for replica in (*self.serving, *self.draining):
            self._retire(replica)
        for number in list(self.starting):
            self._give_up(number)
        self.statistics.seconds = self.now
        return self.statistics

    def _at(self, time: float, call: Callable[[Any], None], argument: Any) -> None:
        heappush(self._events, (time, next(self._order), call, argument))

    # --- queries ---

    def _arrive(self, query: Query) -> None:
        self.num_open += 1
        self.statistics.num_sent += 1
        self.statistics.timeline.add(self.now, self.num_open, len(self.serving))
        self._send(query)

    def _send(self, query: Query) -> None:
        if self.options.server.request:
            self._at(self.now + self.options.server.request, self._route, query)
        else:
            self._route(query)

    def _route(self, query: Query) -> None:
        if self.queued or not self._place(query):
            self.queued.append(query)
            self.statistics.longest_router_queue = max(self.statistics.longest_router_queue, len(self.queued))

    def _place(self, query: Query) -> bool:
        """Hand the query to a replica. Returns False if no replica may take it."""
        limit = self.options.max_ongoing_requests
        for replica in self.router.choose(query, self.serving) if self.serving else ():
            if limit is None or replica.num_ongoing < limit:
                self._hand_over(query, replica)
                return True
        return False

    def _hand_over(self, query: Query, replica: Replica) -> None:
        try:
            replica.add(query, self.now)
        except QueueFull:
            self._refused(query)
        except ValueError:  # a text that is too long for the model
            self.statistics.num_too_long += 1
            self.num_open -= 1
        else:
            self.router.routed(query, replica)
            if not replica.awake:  # the turn begins when all that come in this moment are there
                replica.awake = True
                self._at(self.now, self._turn, replica)

    def _refused(self, query: Query) -> None:
        query.num_refusals += 1
        if query.num_refusals > self.options.max_retries:
            self.statistics.num_refused += 1
            self.num_open -= 1
        else:
            self.statistics.num_retries += 1
            self._at(self.now + RETRY_AFTER, self._send, query)

    def _place_queued(self) -> None:
        while self.queued and self._place(self.queued[0]):
            self.queued.popleft()

    # --- replicas ---

    def _turn(self, replica: Replica) -> None:
        """A turn of the replica's step loop is over, and the next one begins."""
        if replica.number not in self._born:
            return
        if replica.in_turn:
            for job in replica.end_turn(self.now, self.statistics.gap):
                self._finished(job)
            self._place_queued()
        over = replica.begin_turn(self.now)
        if over is not None:
            self._at(over, self._turn, replica)
        else:
            replica.awake = False
            if replica in self.draining:
                self.draining.remove(replica)
                self._retire(replica)

    def _finished(self, job: Job) -> None:
        query = job.query
        self.statistics.finished(job)
        self.num_open -= 1
        following = self.workload.follow_up(query, job.seq.token_ids, self.now)
        if following is not None:
            self._num_thinking += 1
            self._at(following.time, self._follow_up, following)

    def _follow_up(self, query: Query) -> None:
        self._num_thinking -= 1
        self._arrive(query)

    def _new_number(self) -> int:
        number = next(self._numbers)
        self._born[number] = self.now
        return number

    def _start(self) -> None:
        number = self._new_number()
        self.starting.append(number)
        self._at(self.now + self.options.startup_seconds, self._ready, number)

    def _ready(self, number: int) -> None:
        if number in self.starting:  # else nobody wants it any more
            self.starting.remove(number)
            self._serve(number)

    def _serve(self, number: int) -> None:
        self.serving.append(self.make_replica(number))
        self.statistics.most_replicas = max(self.statistics.most_replicas, len(self.serving))
        self.router.replicas_changed(self.serving)
        self._place_queued()

    def _give_up(self, number: int) -> None:
        """A replica that is starting will never serve."""
        self.starting.remove(number)
        self.statistics.replica_seconds += self.now - self._born.pop(number)

    def _die(self, number: int) -> None:
        self.statistics.num_deaths += number in self._born
        if number in self.starting:
            self._give_up(number)
            self._start()
        for replica in (*self.serving, *self.draining):
            if replica.number == number:
                self._bury(replica)

    def _bury(self, replica: Replica) -> None:
        """A replica is dead. Its clients see that at once, and send their queries again."""
        jobs = replica.die()
        if replica in self.serving:
            self.serving.remove(replica)
            self._start()
            self.router.replicas_changed(self.serving)
        else:
            self.draining.remove(replica)
        self._retire(replica)
        for job in jobs:
            self.statistics.num_resent += 1
            self.statistics.num_lost_tokens += job.num_delivered
            self._send(job.query)

    def _retire(self, replica: Replica) -> None:
        self.statistics.retired(replica, self.now - self._born.pop(replica.number))

    def _scale(self, scaler: Autoscaler) -> None:
        self._at(self.now + CONTROL_PERIOD, self._scale, scaler)
        num_queries = len(self.queued) + sum(replica.num_ongoing for replica in self.serving)
        wanted = scaler.decide(self.now, num_queries, len(self.serving), len(self.serving) + len(self.starting))
        for _ in range(wanted - len(self.serving) - len(self.starting)):
            self._start()
        for _ in range(len(self.serving) + len(self.starting) - wanted):
            if self.starting:
                self._give_up(self.starting[-1])
            else:
                self._drain(self.serving.pop())

    def _drain(self, replica: Replica) -> None:
        self.router.replicas_changed(self.serving)
        if replica.awake:
            self.draining.append(replica)
        else:
            self._retire(replica)
