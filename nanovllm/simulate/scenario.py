"""All that a simulation depends on, in one value: model, card, engine, fleet, router, clients."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.simulate.arrivals import VOCAB_SIZE, Lengths, WorkloadOptions
from nanovllm.simulate.costs import Costs, load_costs
from nanovllm.simulate.fleet import Fleet, FleetOptions
from nanovllm.simulate.replica import Replica
from nanovllm.simulate.report import Statistics
from nanovllm.simulate.routers import ROUTERS, Router

# Options of the engine that change a schedule. The card tells what depends on the memory of a GPU.
ENGINE_OPTIONS = (
    "tensor_parallel_size max_num_batched_tokens max_num_seqs max_model_len kvcache_block_size num_kv_blocks "
    "enable_prefix_caching enable_chunked_prefill async_scheduling speculative".split()
)
LONGEST = 2**20  # tokens of a model's context: what the model itself allows is not looked up


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A simulation that can be run, and run again with something changed.

    model, card:     see `load_costs`.
    engine:          of each replica. Without `num_kv_blocks` the pool is as large as the card leaves room for.
    max_queue:       sequences that may wait on a replica before it refuses more.
    acceptance:      the probability that a guess is right if all before it are, with `engine.speculative`.
    with_server:     the replicas are servers; else engines that are called directly.
    target_first, target_gap:  seconds, for the goodput: see `Statistics`.
    """

    model: str
    card: str
    engine: EngineConfig
    workload: WorkloadOptions
    fleet: FleetOptions
    router: str = "two-choices"
    router_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_queue: int | None = 512
    acceptance: float = 0.6
    with_server: bool = True
    target_first: float | None = None
    target_gap: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.router not in ROUTERS:
            raise ValueError(f"router must be one of {', '.join(ROUTERS)}; got {self.router!r}")
        for name in "kv_cache_dtype", "quantization", "enable_expert_parallel", "enforce_eager":
            if (value := getattr(self.engine, name)) != getattr(EngineConfig, name):
                raise ValueError(f"{name}={value!r} cannot be simulated; leave {name} out")
        if self.engine.speculation and self.engine.speculation.method == "draft":
            raise ValueError(
                f"speculative={self.engine.speculative} cannot be simulated, since the costs of a draft model were not "
                'measured; choose {"method": "ngram"}'
            )
        if not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance must be from 0 to 1; got {self.acceptance!r}")
        if self.max_queue is not None and self.max_queue < 1:
            raise ValueError(f"max_queue must be at least 1; got {self.max_queue!r}")
        for name in ("target_first", "target_gap"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name} must be a positive number of seconds; got {value!r}")

    @cached_property
    def costs(self) -> Costs:
        return load_costs(self.card, self.model, self.engine.tensor_parallel_size).for_seats(self.engine.max_num_seqs)

    @cached_property
    def config(self) -> EngineConfig:
        """The engine's, with nothing left open. Raises ValueError if the card has no room for a block."""
        resolved = self.engine.resolve(on_gpu=self.costs.card != "cpu", model_max_len=LONGEST)
        assert resolved.kvcache_block_size is not None
        blocks = resolved.num_kv_blocks or self.costs.kv_tokens // resolved.kvcache_block_size
        if not blocks:
            raise ValueError(
                f"the memory of {self.costs.card} has room for the keys of {self.costs.kv_tokens} tokens, less than a "
                f"block of kvcache_block_size={resolved.kvcache_block_size}; raise tensor_parallel_size"
            )
        return replace(resolved, num_kv_blocks=blocks)

    def make_router(self) -> Router:
        """Raises TypeError for an option that the router does not have."""
        assert self.config.kvcache_block_size is not None
        try:
            return ROUTERS[self.router](random.Random(self.seed), self.config.kvcache_block_size, **self.router_kwargs)
        except TypeError as error:
            raise TypeError(f"router_kwargs of {self.router}: {error}") from None

    def run(self, on_progress: Callable[[float], None] | None = None) -> Statistics:
        options = self.fleet
        if self.with_server:
            options = replace(options, server=self.costs.server)

        def make_replica(number: int) -> Replica:
            return Replica(
                number,
                self.config,
                self.costs,
                vocab_size=VOCAB_SIZE,
                max_queue=self.max_queue,
                intake=self.costs.intake,
                server=options.server,
                acceptance=self.acceptance,
                seed=self.seed,
            )

        statistics = Statistics(self.target_first, self.target_gap)
        workload = self.workload.make(self.seed)
        return Fleet(make_replica, self.make_router(), workload, options, statistics, on_progress).run()

    def described(self) -> dict[str, Any]:
        """What was simulated, for the report, and what makes Ray Serve do the same (`examples/ray_serve.py`)."""
        config, router, fleet = self.config, self.make_router(), self.fleet
        ray: dict[str, Any] = {"num_replicas": fleet.replicas}
        if fleet.autoscaling is not None:
            ray = {"autoscaling_config": vars(fleet.autoscaling) | {"initial_replicas": fleet.replicas}}
        if fleet.max_ongoing_requests is not None:
            ray["max_ongoing_requests"] = fleet.max_ongoing_requests
        ray["request_router_config"] = {
            "request_router_class": router.ray_class,
            "request_router_kwargs": router.ray_kwargs,
        }
        return {
            "model": self.model,
            "card": self.costs.card,
            "costs": self.costs.source,
            "measured": self.costs.measured,
            "engine": {name: getattr(config, name) for name in ENGINE_OPTIONS},
            "clients": {name: told(value) for name, value in vars(self.workload).items()},
            **{name: value for name, value in vars(fleet).items() if name not in ("autoscaling", "server")},
            "autoscaling": fleet.autoscaling and vars(fleet.autoscaling),
            "with_server": self.with_server,
            "max_queue": self.max_queue,
            "acceptance": self.acceptance,
            "router": self.router,
            "router_kwargs": dict(self.router_kwargs),
            "seed": self.seed,
            "ray": ray,
        }


def told(value: Any) -> Any:
    """As JSON has it, and the command line."""
    return str(value) if isinstance(value, Lengths | Path) else value
