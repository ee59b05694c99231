"""Which replica a query goes to: the rules of Ray Serve's routers, under names of their own.

Every rule names replicas in the order in which they are tried. The first that is not full gets the query. `ray_class`
is the router that behaves so in Ray Serve, and `ray_kwargs` what to give it there.
"""

import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar

import xxhash

from nanovllm.engine.block_manager import chained_digest, packed, root_digest
from nanovllm.simulate.arrivals import Query
from nanovllm.simulate.replica import Replica


@dataclass
class Router(ABC):
    """Made once for a fleet, and told of every change in it."""

    ray_class: ClassVar[str | None]  # None: Ray Serve has no such router

    rng: random.Random
    block_size: int  # tokens of a KV block of the replicas

    @abstractmethod
    def choose(self, query: Query, replicas: Sequence[Replica]) -> Iterable[Replica]:
        """The replicas to try, in this order. `replicas`: one or more, all that take queries, oldest first."""

    def routed(self, query: Query, replica: Replica) -> None:  # noqa: B027  # most do not care
        """The replica has taken the query."""

    def replicas_changed(self, replicas: Sequence[Replica]) -> None:  # noqa: B027
        """From now on these take queries."""

    @property
    def ray_kwargs(self) -> dict[str, Any]:
        return {}

    def digests(self, query: Query) -> list[bytes]:
        """Names of the prompt's full blocks, by their content and all before them: those that the engines use."""
        if not query.digests:
            parent, size = root_digest(None), self.block_size
            for start in range(0, len(query.prompt) - size + 1, size):
                parent = chained_digest(parent, packed(query.prompt[start : start + size]))
                query.digests.append(parent)
        return query.digests


class RoundRobin(Router):
    """One after the other."""

    ray_class = "ray.serve.experimental.round_robin_router.RoundRobinRouter"
    _next = 0

    def choose(self, query: Query, replicas: Sequence[Replica]) -> Iterable[Replica]:
        start = self._next % len(replicas)
        self._next += 1
        yield replicas[start]
        yield from replicas[start + 1 :]
        yield from replicas[:start]


class LeastLoaded(Router):
    """The replica with the fewest queries, of equals the oldest."""

    ray_class = "ray.serve.experimental.capacity_queue_router.CapacityQueueRouter"

    def choose(self, query: Query, replicas: Sequence[Replica]) -> Iterable[Replica]:
        return [min(replicas, key=load_of)]


class PowerOfTwoChoices(Router):
    """Of two replicas drawn at random, the one with fewer queries (Mitzenmacher 2001); Ray Serve's default. While both
    are full, two others are drawn."""

    ray_class = "ray.serve._private.request_router.pow_2_router.PowerOfTwoChoicesRequestRouter"

    def choose(self, query: Query, replicas: Sequence[Replica]) -> Iterable[Replica]:
        left = list(replicas)
        while left:
            drawn = self.rng.sample(left, min(2, len(left)))
            yield from sorted(drawn, key=load_of)
            left = [replica for replica in left if replica not in drawn]


def load_of(replica: Replica) -> int:
    return replica.num_ongoing


@dataclass
class PrefixAffinity(PowerOfTwoChoices):
    """The replica that has seen most of the prompt's beginning, as far as the router knows from what it sent there.

    imbalanced_threshold:  if the longest and the shortest queue differ by more queries, two choices decide.
    match_rate_threshold:  if a smaller share of the prompt is known anywhere, the query goes to who has been sent the
                           least text.

    Ray Serve's `PrefixCacheAffinityRouter`, but for three things. Beginnings match in whole blocks, not in characters.
    The router remembers as many blocks per replica as the replica can hold, and forgets what it has not met for longest
    (Ray's does so with `do_eviction`). Where the chosen replica is full, two choices decide; the query does not wait.
    """

    ray_class = "ray.serve.llm.request_router.PrefixCacheAffinityRouter"

    imbalanced_threshold: float = inf
    match_rate_threshold: float = 0.1
    # Digests, least recently met first
    _seen: dict[Replica, OrderedDict[bytes, None]] = field(default_factory=dict, init=False)

    def choose(self, query: Query, replicas: Sequence[Replica]) -> Iterable[Replica]:
        loads = [replica.num_ongoing for replica in replicas]
        if max(loads) - min(loads) <= self.imbalanced_threshold:
            known = {replica: self.num_known(query, replica) for replica in replicas}
            most = max(known.values())
            if most * self.block_size >= self.match_rate_threshold * len(query.prompt):
                yield from sorted((r for r in replicas if known[r] == most), key=load_of)
            else:
                least = min(len(self._seen[replica]) for replica in replicas)
                yield from sorted((r for r in replicas if len(self._seen[r]) == least), key=load_of)
        yield from super().choose(query, replicas)

    def num_known(self, query: Query, replica: Replica) -> int:
        seen = self._seen[replica]
        for count, digest in enumerate(self.digests(query)):
            if digest not in seen:
                return count
        return len(query.digests)

    def routed(self, query: Query, replica: Replica) -> None:
        seen, most = self._seen[replica], replica.engine.config.num_kv_blocks or 0
        for digest in reversed(self.digests(query)):  # so that the end of a text is forgotten before its beginning
            seen[digest] = None
            seen.move_to_end(digest)
        while len(seen) > most:
            seen.popitem(last=False)

    def replicas_changed(self, replicas: Sequence[Replica]) -> None:
        self._seen = {replica: self._seen.get(replica, OrderedDict()) for replica in replicas}

    @property
    def ray_kwargs(self) -> dict[str, Any]:
        threshold = {} if self.imbalanced_threshold == inf else {"imbalanced_threshold": self.imbalanced_threshold}
        return threshold | {"match_rate_threshold": self.match_rate_threshold, "do_eviction": True}


@dataclass
class KVAware(Router):
    """The replica where the query costs least: blocks of prompts that are still to be computed there, its own included,
    and blocks in use.

    overlap_weight: how much a block to compute counts against a block in use.

    The rule of NVIDIA's Dynamo, to which Ray Serve's `KVAwareRouter` delegates. Replicas tell what they have cached.
    """

    ray_class = "ray.serve.llm.request_router.KVAwareRouter"

    overlap_weight: float = 1.0

    def choose(self, query: Query, replicas: Sequence[Replica]) -> Iterable[Replica]:
        return sorted(replicas, key=lambda replica: self.cost(query, replica))

    def cost(self, query: Query, replica: Replica) -> float:
        cached, found = 0, replica.engine.scheduler.blocks.block_by_digest
        for digest in self.digests(query):
            if digest not in found:
                break
            cached += self.block_size
        to_compute = (replica.prompt_backlog + len(query.prompt) - cached) / self.block_size
        return self.overlap_weight * to_compute + replica.num_blocks_in_use


@dataclass
class ConsistentHash(Router):
    """A conversation stays with its replica, and only those of a replica that is gone move (Karger et al. 1997). A full
    replica's queries go to the next ones on the ring. A query without a conversation goes anywhere.

    num_virtual_nodes:      places of each replica on the ring.
    num_fallback_replicas:  how many other replicas may be tried.
    """

    ray_class = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"

    num_virtual_nodes: int = 100
    num_fallback_replicas: int = 2
    _places: list[int] = field(default_factory=list, init=False)
    _owners: list[Replica] = field(default_factory=list, init=False)

    def replicas_changed(self, replicas: Sequence[Replica]) -> None:
        ring = {place(f"{r.number}:{i}"): r for r in replicas for i in range(self.num_virtual_nodes)}
        self._places = sorted(ring)
        self._owners = [ring[p] for p in self._places]

    def choose(self, query: Query, replicas: Sequence[Replica]) -> Iterable[Replica]:
        start = bisect_right(self._places, place(query.session or f"query {query.number}"))
        tried: list[Replica] = []
        for step in range(len(self._owners)):
            replica = self._owners[(start + step) % len(self._owners)]
            if replica not in tried:
                yield replica
                tried.append(replica)
            if len(tried) > self.num_fallback_replicas:
                return

    @property
    def ray_kwargs(self) -> dict[str, Any]:
        return {"num_virtual_nodes": self.num_virtual_nodes, "num_fallback_replicas": self.num_fallback_replicas}


def place(name: str) -> int:
    """On the ring: 64 bits."""
    return xxhash.xxh3_64_intdigest(name.encode())


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "two-choices": PowerOfTwoChoices,
    "prefix": PrefixAffinity,
    "kv": KVAware,
    "sessions": ConsistentHash,
}
