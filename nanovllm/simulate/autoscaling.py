"""How many replicas there should be: Ray Serve's rule, under Ray Serve's names."""

from collections import deque
from dataclasses import dataclass, field
from math import ceil


@dataclass(frozen=True, kw_only=True)
class Autoscaling:
    """Between `min_replicas` and `max_replicas`, as many as give each `target_ongoing_requests`.

    upscale_delay_s, downscale_delay_s: for so long there must have been too few, or too many, before anything is done.
    look_back_period_s: the queries of so many seconds count, on average.

    (`replica_queue_length_autoscaling_policy` of ray.serve.autoscaling_policy, with its factors left at 1.)
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 2.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_period_s: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(
                f"min_replicas={self.min_replicas} and max_replicas={self.max_replicas} must be at least 1, and the "
                "first no more than the second"
            )
        if not self.target_ongoing_requests > 0:
            raise ValueError(f"target_ongoing_requests must be positive; got {self.target_ongoing_requests!r}")
        for name in ("upscale_delay_s", "downscale_delay_s", "look_back_period_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)!r}")


@dataclass
class Autoscaler:
    """Asked again and again how many replicas there should be."""

    rule: Autoscaling
    _seen: deque[tuple[float, int]] = field(default_factory=deque)  # time, and queries that were not over then
    _total: int = 0  # of those
    _since: float | None = None  # since when there are too few replicas, or too many
    _too_few: bool = False  # which of the two

    def decide(self, now: float, num_queries: int, num_running: int, num_wanted: int) -> int:
        """num_queries: on all replicas, and waiting for one. num_running: replicas that take queries. num_wanted: what
        was decided last, replicas that are starting included."""
        self._seen.append((now, num_queries))
        self._total += num_queries
        while self._seen[0][0] < now - self.rule.look_back_period_s:
            self._total -= self._seen.popleft()[1]
        load = self._total / len(self._seen)
        desired = ceil(load / self.rule.target_ongoing_requests) if num_running else num_wanted
        desired = min(max(desired, self.rule.min_replicas), self.rule.max_replicas)
        too_few = desired > num_wanted
        if desired == num_wanted:
            self._since = None
            return num_wanted
        if self._since is None or too_few != self._too_few:
            self._since, self._too_few = now, too_few
        delay = self.rule.upscale_delay_s if too_few else self.rule.downscale_delay_s
        if now - self._since < delay:
            return num_wanted
        self._since = None
        return desired
