"""What a step costs on this machine: the engine's own steps over a grid, and the factors that explain them.

The grid is that of `benchmarks/engine/step_scenes.py`. What HTTP adds is measured with a model that computes nothing
(`benchmarks/serving/added.py`). The result is a card for `nanovllm simulate --card FILE`; those that come with the
package are in nanovllm/simulate/cards.

    python -m benchmarks.engine.step_costs FILE

fits the steps that a card's file holds once more, and writes the file anew. This is for a change of the fit.
"""

import math
import statistics
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine import ours, step_scenes
from benchmarks.lib import harness, roofline, tables
from benchmarks.lib.harness import Contender
from benchmarks.lib.process import choose_clock
from benchmarks.serving import added
from nanovllm.graphs.sizes import (
    CHUNK_WEIGHT,
    MAX_READ,
    MAX_REPLAYED,
    OPERATIONS_WHILE_LAUNCHING,
    PROMPT_SIZES,
    batch_sizes,
)
from nanovllm.simulate.costs import Card, IntakeTime, ServerTime
from nanovllm.simulate.fit import (
    Observation,
    fit_counts,
    fit_device,
    fit_host,
    non_negative_least_squares,
    residuals,
)
from nanovllm.simulate.needs import Needs, read_architecture
from nanovllm.simulate.step_shape import StepShape
from nanovllm.simulate.step_time import Kind, Recordings, StepTime

MOST_SEQUENCES = 512  # the engine's default
GPU_ENGINE: dict[str, Any] = {"max_model_len": 17_408, "max_num_seqs": MOST_SEQUENCES}
CPU_ENGINE: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 64, "kv_cache_gib": 0.25}
RECORDINGS = Recordings(
    decodes=tuple(batch_sizes(MOST_SEQUENCES, 0)),
    prompts=PROMPT_SIZES,
    max_several=MAX_REPLAYED,
    max_read=MAX_READ,
    max_sequences=MOST_SEQUENCES + 1,
    max_operations=OPERATIONS_WHILE_LAUNCHING,
    chunk_weight=CHUNK_WEIGHT,
)
NOT_FITTED = StepTime(((0, 0.0),), {}, {})


def run(options: Namespace) -> bool:
    """Measure, fit and write the card. Prints what the fit misses.

    Raises RuntimeError for a mixture of experts: a card has no factor for the reading of experts.
    """
    if read_architecture(options.model)[0].num_experts:
        raise RuntimeError(f"{options.model.name} is a mixture of experts; measure a model without experts")
    cpu = options.device == "cpu"
    options = Namespace(**vars(options) | ({"threads": 1} if cpu else {}))
    grid = step_scenes.QUICK_GRID if options.quick or cpu else step_scenes.GRID
    engine = CPU_ENGINE if cpu else GPU_ENGINE
    server = measure_server(2 if options.quick else 6)
    # On a CPU attention copies the keys of each sequence, so shared keys cost as much as others
    scenes = ["decodes", "chunks", "mixed", *([] if cpu else ["shared"]), "masked"]
    points, told = measure_scenes(ours(options, **engine), scenes, grid, options, not cpu)
    numbers = grid["guesses"]["numbers"]
    guessing = ours(options, "guesses", **engine, speculative={"method": "ngram", "k": max(numbers)})
    points += measure_scenes(guessing, ["guesses"], grid, options, False)[0]
    rates_job = Contender("the card's rates"), measure_rates, {"device": options.device}
    [rates] = harness.run_process(*rates_job, options)["repetitions"]
    card = make_card(options.model, points, rates, told, server)
    path = card.write(options.out)
    print(describe(card), f"written: {path}", sep="\n", flush=True)
    return True


def measure_scenes(
    contender: Contender, scenes: list[str], grid: dict[str, Any], options: Namespace, overlapped: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Medians over the repetitions of each point; and what else the process told: machine, intake, calls, KV cache."""
    # A GPU computes while this thread does not: only on a CPU is its CPU time that of a step.
    clock = choose_clock(options.device, 1)
    arguments = {"grid": grid, "scenes": scenes, "overlapped": overlapped, "clock": clock}
    measured = harness.run_process(
        contender, step_scenes.measure, {"repeats": options.repeats or 3, **arguments}, options
    )
    by_name: dict[str, list[dict[str, Any]]] = {}
    for repetition in measured["repetitions"]:
        for point in repetition["points"]:
            by_name.setdefault(point["name"], []).append(point)
    points = []
    for same in by_name.values():
        hosts = [p["host"] for p in same if p["host"] is not None]
        host = statistics.median(hosts) if hosts else None
        points.append({**same[0], "device": statistics.median(p["device"] for p in same), "host": host})
    return points, {**measured["repetitions"][-1], "machine": measured["facts"]}


def measure_server(seconds: float) -> ServerTime:
    """What HTTP adds; nothing, with a word, where the server's packages are missing."""
    if missing := [name for name in ("fastapi", "msgspec", "zmq") if find_spec(name) is None]:
        print(f"what the server adds is not measured, since {', '.join(missing)} cannot be imported", flush=True)
        return ServerTime()
    return ServerTime(**added.server_time(seconds))


def measure_rates(device: str) -> list[dict[str, float]]:
    rates = asdict(roofline.measure_limits(device))
    if torch.device(device).type == "cuda":
        rates["cache_bytes"] = torch.cuda.get_device_properties(device).L2_cache_size
    return [rates]


def make_card(
    model: Path, points: list[dict[str, Any]], rates: dict[str, float], told: dict[str, Any], server: ServerTime
) -> Card:
    """The factors that explain the points, with all that says where they are from."""
    architecture, itemsize = read_architecture(model)
    machine = told["machine"]
    request, token = fit_counts([(*each, each[-1]) for each in told["intake"]])
    call, answer = fit_counts([(1, *called) for called in told["calls"]])
    cpu = machine["device"] == "cpu"
    card = Card(
        card="cpu" if cpu else harness.card_slug(machine["device"]),
        shape=model.name,
        tensor_parallel_size=1,
        architecture=architecture,
        itemsize=4 if cpu else itemsize,
        source=f"a grid of {len(points)} steps",
        rates=rates,
        kv_tokens=told["kv_tokens"],
        time=NOT_FITTED if cpu else replace(NOT_FITTED, recordings=RECORDINGS.for_model(architecture, itemsize)),
        intake=IntakeTime(request, token, told["wake"], call, answer),
        server=server,
        all_reduce={},
        residuals={},
        machine=machine,
        commit=harness.commit(),
        points=points,
    )
    return fitted(card)


def fitted(card: Card) -> Card:
    """The card with the factors that explain its points best. Its recordings are those of the measured engine."""
    cpu = card.machine["device"] == "cpu"
    needs, recordings = Needs(card.architecture, card.itemsize), card.time.recordings
    points = [with_its_launches(p, recordings) for p in card.points]
    # A chunk costs the host less if it does not begin a sequence. But in traffic nearly all chunks begin one.
    known = [p for p in points if p["host"] is not None and not p["name"].startswith("chunks")]
    host = fit_host([(StepShape(*p["shape"]), p["host"], p["device"] + p["host"]) for p in known])
    only_host = replace(NOT_FITTED, host=host, recordings=recordings)
    least = {} if cpu else least_factors(needs, card.rates)  # a CPU may have it all in its caches
    seen = observations(points, only_host)
    possible = [o for o in seen if o.seconds >= least_seconds(o.shape, least)]
    cache_bytes = card.rates.get("cache_bytes", math.inf)
    time = replace(fit_device(possible, recordings, least, cache_bytes), host=host)
    apart = {
        "launched": [o for o in possible if recordings.run(o.shape)[1] is Kind.LAUNCHED],
        "prompts behind what they share": [o for o in possible if "behind a shared" in o.name],
    }
    rest = [o for o in possible if not any(o in some for some in apart.values())]
    missed: dict[str, Any] = residuals(rest, time).as_json()
    missed |= {name: residuals(some, time).as_json() for name, some in apart.items() if some}
    missed["left_out"] = [o.name for o in seen if o not in possible]
    points = [{**p, "fitted": time.device_seconds(StepShape(*p["shape"]))} for p in points]
    return replace(card, time=time, residuals=missed, points=points, all_reduce=all_reduces(card.card))


def observations(points: list[dict[str, Any]], host: StepTime) -> list[Observation]:
    """One for each shape, with the median of its times. host: what the host takes. The measured time of a step that is
    launched contains the host's time, which is taken off here."""
    alike: dict[StepShape, list[float]] = {}
    names: dict[StepShape, str] = {}
    for point in points:
        shape = StepShape(*point["shape"])
        launched = host.recordings.run(shape)[1] is Kind.LAUNCHED
        alike.setdefault(shape, []).append(point["device"] - launched * host.host_seconds(shape))
        names.setdefault(shape, point["name"])
    return [Observation(names[shape], shape, statistics.median(seconds)) for shape, seconds in alike.items()]


def with_its_launches(point: dict[str, Any], recordings: Recordings) -> dict[str, Any]:
    """A step that is launched kernel by kernel keeps host and device busy at the same time. So the result of the step
    before is only read when this one is launched, and what seems the host's time belongs to this step."""
    launched = recordings.run(StepShape(*point["shape"]))[1] is Kind.LAUNCHED
    if not launched or point["host"] is None:
        return point
    return {**point, "device": point["device"] + point["host"], "host": None}


def least_factors(needs: Needs, rates: Mapping[str, float]) -> dict[str, float]:
    """What a key, and a product, takes at the card's best rates."""
    operations = {"token": needs.token_operations, "prompt_pair": needs.pair_operations}
    least = {name: number / rates["operations_per_second"] for name, number in operations.items()}
    return least | {"decode_key": needs.key_bytes / rates["bytes_per_second"]}


def least_seconds(shape: StepShape, least: Mapping[str, float]) -> float:
    """What a step's products take at least. A step that seems to take less was launched while the step before was
    computed, so a part of its time is not known."""
    tokens = shape.decodes + shape.prompt_tokens
    return tokens * least.get("token", 0.0) + shape.prompt_pairs * least.get("prompt_pair", 0.0)


def all_reduces(card: str) -> dict[str, tuple[float, float]]:
    """By the number of ranks, seconds and seconds per byte of a sum, from what `tensor_parallel` has measured."""
    with suppress(ValueError):
        found = tables.load(f"tensor_parallel.{card}", harness.RESULTS)["all_reduce"]
        return {str(each["ranks"]): line_through(each["rows"]) for each in found}
    return {}


def line_through(rows: list[dict[str, float]]) -> tuple[float, float]:
    """The best of the kinds of sums that were measured, in microseconds by bytes, as seconds and seconds per byte."""
    best = np.array([1e-6 * min(value for name, value in row.items() if name != "bytes") for row in rows])
    a = np.array([[1.0, row["bytes"]] for row in rows]) / best[:, None]
    seconds, per_byte = non_negative_least_squares(a, np.ones(len(rows)))
    return float(seconds), float(per_byte)


def describe(card: Card) -> str:
    """The factors, and what they miss."""
    missed, time = card.residuals, card.time
    lines = [f"{card.shape} on {card.card}, from {card.source}"]
    lines.append(f"  ms by tokens: {', '.join(f'{n}: {1e3 * seconds:.3g}' for n, seconds in time.table)}")
    lines += [f"  device, {name}: {1e6 * value:.4g} us" for name, value in time.device.items() if value]
    lines += [f"  host, {name}: {1e6 * value:.4g} us" for name, value in time.host.items() if value]
    lines.append(f"  launching kernel by kernel: {1e3 * time.launch:.2f} ms")
    request, token, wake, call, answer = (1e6 * seconds for seconds in card.intake)
    lines.append(f"  intake: {request:.3g} us per request, {token:.3g} us per token of its prompt")
    lines.append(f"  a call of generate: {call:.3g} us more, and {answer:.3g} us more per request")
    lines.append(f"  the first step after a pause: {wake:.3g} us more")
    lines.append(f"  server: {', '.join(f'{1e6 * v:.3g} us per {n}' for n, v in card.server._asdict().items())}")
    lines.append(
        f"  the fit misses {missed['median_percent']:.1f}% in the median, {missed['worst_percent']:.1f}% at most "
        f"({missed['worst_of']})"
    )
    if missed["left_out"]:
        lines.append(f"  left out, since the card cannot be that fast: {'; '.join(missed['left_out'])}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = harness.make_parser("engine.step_costs", __doc__)
    parser.add_argument("card", type=Path, metavar="FILE", help="of a card")
    path: Path = parser.parse_args(arguments).card
    card = fitted(Card.read(path))
    print(describe(card), f"written: {card.write(path.parent)}", sep="\n")


if __name__ == "__main__":
    main()
