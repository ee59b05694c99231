"""A card whose steps cost a little for everything, and fleets of it in a few words."""

import random
from dataclasses import dataclass
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.simulate.arrivals import VOCAB_SIZE, Lengths, Synthetic, Workload, WorkloadOptions
from nanovllm.simulate.costs import StepShape
from nanovllm.simulate.fleet import Fleet, FleetOptions
from nanovllm.simulate.replica import Replica
from nanovllm.simulate.report import Statistics
from nanovllm.simulate.routers import ROUTERS


@dataclass(frozen=True)
class Linear:
    """Seconds. `slower`: how many times as long everything takes."""

    slower: float = 1.0
    step: float = 2e-3
    decode: float = 1e-5
    key: float = 1e-8
    prompt_token: float = 2e-5
    host: float = 2e-4

    def device_seconds(self, shape: StepShape) -> float:
        work = (
            self.decode * shape.decodes
            + self.key * (shape.decode_keys + shape.shared_keys)
            + self.prompt_token * shape.prompt_tokens
        )
        return self.slower * (self.step + work + self.decode * shape.guesses)

    def host_seconds(self, shape: StepShape) -> float:
        return self.slower * self.host


def config(**options: Any) -> EngineConfig:
    values = {"kvcache_block_size": 16, "num_kv_blocks": 400, "max_model_len": 2048, "max_num_seqs": 16}
    return EngineConfig(**values | {"max_num_batched_tokens": 256, "async_scheduling": True} | options)


def synthetic(seed: int = 1, **options: Any) -> Synthetic:
    values: dict[str, Any] = {"rate": 40.0, "queries": 200}
    values |= {"prompt_tokens": Lengths.parse("uniform:20,300"), "output_tokens": Lengths.parse("uniform:1,60")}
    return Synthetic(WorkloadOptions(**values | options), seed)


def fleet(
    workload: Workload | None = None,
    router: str = "two-choices",
    costs: Linear = Linear(),  # it is frozen
    engine: EngineConfig | None = None,
    max_queue: int | None = None,
    acceptance: float = 0.0,
    statistics: Statistics | None = None,
    **options: Any,
) -> Fleet:
    chosen = engine or config()

    def make_replica(number: int) -> Replica:
        return Replica(number, chosen, costs, vocab_size=VOCAB_SIZE, max_queue=max_queue, acceptance=acceptance)

    rule = ROUTERS[router](random.Random(7), chosen.kvcache_block_size or 0)
    return Fleet(make_replica, rule, workload or synthetic(), FleetOptions(**options), statistics)
