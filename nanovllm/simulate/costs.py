"""What a step costs on a card: read from what was measured there, or derived from the nearest that was.

`cards/` has a file for each card, model and number of ranks, written by `python -m benchmarks.engine step_costs`. A
model that was measured gets its own factors. Any other gets those of the measured model that is nearest in size, each
grown with the bytes or operations behind it; `Costs.source` says which.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from nanovllm.models.checkpoint import find_checkpoint, read_json
from nanovllm.simulate.needs import Architecture, Needs, read_architecture
from nanovllm.simulate.step_shape import StepShape, shape_of
from nanovllm.simulate.step_time import StepTime

__all__ = ["Card", "Costs", "IntakeTime", "ServerTime", "StepCosts", "StepShape", "load_costs", "shape_of"]

CARDS = Path(__file__).parent / "cards"
OPTION = "--card FILE"


class StepCosts(Protocol):
    """What a simulation asks. With asynchronous scheduling steps follow each other every max(device, host), without it
    every device + host."""

    def device_seconds(self, shape: StepShape) -> float: ...

    def host_seconds(self, shape: StepShape) -> float: ...


HALF_ASLEEP = 0.004  # seconds: a pause of this length costs half of what a long one does (on the host of an H200)


class IntakeTime(NamedTuple):
    """What a request costs the host beside its steps, in seconds."""

    request: float = 0.0  # to check and to add it
    prompt_token: float = 0.0  # to copy a token of its prompt
    wake: float = 0.0  # after a long pause: a processor that has been idle is slow at first
    # What `LLM.generate` takes for parameters and outputs, in addition to the above
    call: float = 0.0  # per call
    answer: float = 0.0  # per request

    def wake_seconds(self, idle: float) -> float:
        """Seconds by which the first step takes longer after `idle` seconds without a step."""
        return self.wake * idle / (idle + HALF_ASLEEP)

    def seconds(self, num_prompt_tokens: int) -> float:
        return self.request + self.prompt_token * num_prompt_tokens


class ServerTime(NamedTuple):
    """What HTTP, Ray Serve, or a caller of `AsyncLLM` adds to the engine's own time, in seconds."""

    request: float = 0.0  # in the time to the first token; here all of it passes before the query is queued
    engine_token: float = 0.0  # per token, in the engine's process: it lengthens the host's share of a step
    api_token: float = 0.0  # per token, in an API process, from the end of the step to the client
    engine_step: float = 0.0  # per step, as `engine_token`
    api_step: float = 0.0  # per step, as `api_token`


@dataclass(frozen=True)
class Card:
    """One file of `cards/`: a model that was measured on a card with so many ranks."""

    card: str  # "h200"
    shape: str  # the model's name: "Qwen3-0.6B"
    tensor_parallel_size: int
    architecture: Architecture
    itemsize: int  # bytes of a number
    source: str  # "a grid of steps", or which records the factors were fitted to
    rates: Mapping[str, float]  # bytes_per_second, operations_per_second; of a GPU also cache_bytes
    kv_tokens: int  # of the pool that was measured, with all the memory that the engine's defaults take
    time: StepTime
    intake: IntakeTime
    server: ServerTime
    # By the number of ranks, [seconds, seconds per byte] of a sum over the ranks
    all_reduce: Mapping[str, tuple[float, float]]
    residuals: Mapping[str, Any]
    machine: Mapping[str, Any]
    commit: Mapping[str, Any]
    points: list[dict[str, Any]]  # what was measured, for whoever wants to look

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ValueError for a file that is no card."""
        raw = read_json(path)
        try:
            return cls.from_json(raw)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"card={str(path)!r} is no file of step costs: {error}; write one with "
                "`python -m benchmarks.engine step_costs --out DIR`"
            ) from None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        times = {"time": StepTime.from_json(raw["time"]), "intake": IntakeTime(**raw["intake"])}
        times |= {"server": ServerTime(**raw["server"])}
        return cls(**{**raw, **times, "architecture": Architecture(**raw["architecture"])})

    def write(self, directory: Path) -> Path:
        ranks = f".tp{self.tensor_parallel_size}" if self.tensor_parallel_size > 1 else ""
        path = directory / f"{self.card}.{self.shape.lower()}{ranks}.json"
        own = {"architecture": asdict(self.architecture), "time": self.time.as_json()}
        own |= {"intake": self.intake._asdict(), "server": self.server._asdict()}
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(vars(self) | own | {"points": []}, indent=1)
        points = ",\n  ".join(map(json.dumps, self.points))  # a line for each
        path.write_text(text.replace('"points": []', f'"points": [\n  {points}\n ]') + "\n", encoding="utf-8")
        return path


@dataclass(frozen=True)
class Costs:
    """`StepCosts` of a model on a card, and what else a simulation wants to know of the two."""

    card: str
    model: str
    measured: bool  # on this card with this model and this number of ranks; else derived
    source: str  # from what, in words
    time: StepTime
    intake: IntakeTime
    server: ServerTime
    kv_tokens: int  # for so many tokens the KV cache of one replica has room, about

    def for_seats(self, seats: int) -> "Costs":
        """In an engine in which so many sequences may run."""
        return replace(self, time=replace(self.time, recordings=self.time.recordings.for_seats(seats)))

    def device_seconds(self, shape: StepShape) -> float:
        return self.time.device_seconds(shape)

    def host_seconds(self, shape: StepShape) -> float:
        return self.time.host_seconds(shape)


def load_costs(card: str, model: str | Path, tensor_parallel_size: int = 1) -> Costs:
    """The costs of `model` on `card`, on each of so many ranks.

    card: a name ("h200"), or the path of a file that `step_costs` has written. model: the name of a model that was
    measured there ("Qwen3-0.6B"), a directory with a config.json, or a hub id.

    Raises ValueError for a card or a model that is not known, and for a number of ranks that does not fit the model.
    """
    cards = find_cards(card)
    name, wanted, itemsize = find_model(model, cards)
    own = wanted.share(tensor_parallel_size)
    if cards[0].machine["device"] == "cpu":  # which computes in float32, whatever the checkpoint has
        itemsize = cards[0].itemsize
    for known in cards:
        if (known.architecture, known.tensor_parallel_size) == (wanted, tensor_parallel_size):
            source = f"measured on {known.card} ({known.source})"
            return Costs(known.card, name, True, source, known.time, known.intake, known.server, known.kv_tokens)

    def distance(known: Card) -> tuple[float, bool, int]:
        ratio = known.architecture.num_parameters / wanted.num_parameters
        return abs(log(ratio)), known.tensor_parallel_size != tensor_parallel_size, known.tensor_parallel_size

    nearest, needs = min(cards, key=distance), Needs(own, itemsize)
    old = nearest.architecture.share(nearest.tensor_parallel_size)
    time = nearest.time.for_model(old, own, (nearest.itemsize, itemsize), nearest.rates)
    if nearest.tensor_parallel_size == 1 and tensor_parallel_size > 1:
        sums = nearest.all_reduce.get(str(tensor_parallel_size))
        if sums is None:
            known_ranks = ", ".join(sorted(nearest.all_reduce)) or "none"
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size}: sums over so many ranks were not measured on "
                f"{nearest.card}; measured are {known_ranks}. Choose one of them, or measure and name it: {OPTION}"
            )
        time = time.with_all_reduces(own, itemsize, *sums)
    before = Needs(old, nearest.itemsize)
    memory = nearest.kv_tokens * before.key_bytes + before.memory_bytes
    kv_tokens = int(memory - needs.memory_bytes) // needs.key_bytes
    if kv_tokens < 1:
        raise ValueError(
            f"model={name!r}: its weights ({needs.memory_bytes / 2**30:.0f} GiB per rank) leave no memory for keys on "
            f"{nearest.card}; raise tensor_parallel_size={tensor_parallel_size}"
        )
    ranks = f" with {n} ranks" if (n := nearest.tensor_parallel_size) > 1 else ""
    source = f"derived from {nearest.shape} on {nearest.card}{ranks}, by bytes and operations; not measured"
    return Costs(nearest.card, name, False, source, time, nearest.intake, nearest.server, kv_tokens)


def find_cards(card: str) -> list[Card]:
    """All that was measured on a card, or the one file of that path. Raises ValueError if there is nothing."""
    if card.endswith(".json") or "/" in card:
        return [Card.read(Path(card))]
    found = [Card.read(path) for path in sorted(CARDS.glob(f"{card.lower()}.*.json"))]
    if not found:
        known = ", ".join(sorted({path.name.partition(".")[0] for path in CARDS.glob("*.json")}))
        raise ValueError(
            f"card={card!r} is not known; known are {known}. Measure another with "
            f"`python -m benchmarks.engine step_costs --out DIR`, and name what that writes: {OPTION}"
        )
    return found


def find_model(model: str | Path, cards: list[Card]) -> tuple[str, Architecture, int]:
    """The name of a model, its numbers, and the bytes of a number."""
    for known in cards:
        if str(model) == known.shape:
            return known.shape, known.architecture, known.itemsize
    try:
        path = find_checkpoint(model, weights=False)
    except ValueError as error:
        shapes = ", ".join(dict.fromkeys(known.shape for known in cards))
        raise ValueError(
            f"{error}; nor was it measured on {cards[0].card}, where {shapes} was. Name that, a directory with a "
            f"config.json, or what you have measured yourself: {OPTION}"
        ) from None
    return Path(model).name, *read_architecture(path)
