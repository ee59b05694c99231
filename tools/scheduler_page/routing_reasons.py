"""Why a router sent a request to a replica, as a sentence, from what the router saw when it decided."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nanovllm.simulate.arrivals import Query
from nanovllm.simulate.replica import Replica
from nanovllm.simulate.routers import (
    ConsistentHash,
    KVAware,
    LeastLoaded,
    PrefixAffinity,
    RoundRobin,
    Router,
    load_of,
)
from tools.scheduler_page.reasons import listed, number


class Draws(random.Random):
    """Remembers the sample that was drawn last."""

    drawn: Sequence[Any] = ()

    def sample(self, population: Sequence[Any], k: int, **kwargs: Any) -> list[Any]:
        self.drawn = drawn = super().sample(population, k, **kwargs)
        return drawn


class ToldRouter(Router):
    """Another router, whose decisions are told: `tell` gets request, replica and sentence."""

    ray_class = None

    def __init__(self, router: Router, draws: Draws, tell: Callable[[Query, Replica, str], None]) -> None:
        super().__init__(draws, router.block_size)
        self.router, self.draws, self.tell = router, draws, tell
        self.sentence = ""

    def choose(self, query: Query, replicas: Sequence[Replica]) -> Iterable[Replica]:
        self.draws.drawn = ()
        for replica in self.router.choose(query, replicas):
            self.sentence = self.told(query, replica, replicas)
            yield replica

    def routed(self, query: Query, replica: Replica) -> None:
        self.router.routed(query, replica)
        self.tell(query, replica, self.sentence)

    def replicas_changed(self, replicas: Sequence[Replica]) -> None:
        self.router.replicas_changed(replicas)

    def told(self, query: Query, replica: Replica, replicas: Sequence[Replica]) -> str:
        held = f"{tokens:,}" if (tokens := self.held(query, replica)) else "none"
        why = self.reason(query, replica, replicas)
        cached = f"Replica {replica.number} holds {held} of the {len(query.prompt):,} prompt tokens."
        return f"Request {query.number} to replica {replica.number}: {why}. {cached}"

    def held(self, query: Query, replica: Replica) -> int:
        """Tokens of the prompt's beginning that are in the replica's prefix cache."""
        found = replica.engine.scheduler.blocks.block_by_digest
        for known, digest in enumerate(self.digests(query)):
            if digest not in found:
                return known * self.block_size
        return len(query.digests) * self.block_size

    def reason(self, query: Query, replica: Replica, replicas: Sequence[Replica]) -> str:
        if len(replicas) == 1:
            return "no other serves"
        others = [other for other in replicas if other is not replica]
        match self.router:
            case RoundRobin():
                return "its turn has come"
            case LeastLoaded():
                elsewhere = listed(str(load_of(other)) for other in others)
                return f"{number(load_of(replica), 'request')} there, {elsewhere} elsewhere"
            case PrefixAffinity() as router:
                return self.affinity(router, query, replica, replicas)
            case KVAware() as router:
                cost, in_use = router.cost(query, replica), replica.num_blocks_in_use
                elsewhere = listed(f"{router.cost(query, other):.0f}" for other in others)
                return (
                    f"the cost there is {cost:.0f} blocks ({cost - in_use:.0f} to compute and {in_use} in use), "
                    f"{elsewhere} elsewhere"
                )
            case ConsistentHash():
                return f"the hash of its {'beginning' if query.session else 'number'} leads there"
            case _:
                return self.two_choices(replica)

    def affinity(self, router: PrefixAffinity, query: Query, replica: Replica, replicas: Sequence[Replica]) -> str:
        if self.draws.drawn:
            most, least = max(replicas, key=load_of), min(replicas, key=load_of)
            lead = (
                f"replica {most.number} has {load_of(most) - load_of(least)} requests more than replica {least.number}"
            )
            return f"{lead}, so two choices decide: {self.two_choices(replica)}"
        known = router.num_known(query, replica) * self.block_size
        if known < router.match_rate_threshold * len(query.prompt):
            return "nobody is known to have its beginning, and the least text was sent there"
        rivals = [other for other in replicas if other is not replica]
        as_much = [r for r in rivals if router.num_known(query, r) * self.block_size == known]
        also = f", as to {listed(f'replica {r.number}' for r in as_much)} with no fewer requests" if as_much else ""
        return f"{known:,} of its tokens were sent there before{also}"

    def two_choices(self, replica: Replica) -> str:
        [other] = [other for other in self.draws.drawn if other is not replica]
        theirs = number(load_of(other), "request")
        return f"drawn were replica {other.number} with {theirs} and this one with {load_of(replica)}"
