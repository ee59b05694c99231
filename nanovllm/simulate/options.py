"""The options of `nanovllm simulate` and `nanovllm plan`, and what these two commands do."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.server.options import ABOUT, ENGINE, json_object
from nanovllm.simulate.arrivals import SHAPES, Lengths
from nanovllm.simulate.autoscaling import Autoscaling
from nanovllm.simulate.fleet import FleetOptions
from nanovllm.simulate.plan import Planner, SetUp, Target
from nanovllm.simulate.report import table
from nanovllm.simulate.routers import ROUTERS
from nanovllm.simulate.scenario import ENGINE_OPTIONS, Scenario, WorkloadOptions

LEAST_QUERIES = 300  # in each simulation of a plan: fewer say little about the slowest 1%
SCALING = [field.name for field in fields(Autoscaling) if field.name != "max_replicas"]


def seconds(text: str) -> float:
    """Raises ValueError, which argparse reports, for what is no time: 0.2, 0.2s, 200ms, 10min or 1h."""
    found = re.fullmatch(r"([\d.]+)(ms|s|min|h)?", text)
    if not found:
        raise ValueError(text)
    return float(found[1]) * {"ms": 1e-3, "s": 1.0, None: 1.0, "min": 60.0, "h": 3600.0}[found[2]]


def lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def death(text: str) -> tuple[float, int]:
    """Raises ValueError, which argparse reports, for what is not like 300:2."""
    time, number = text.split(":")
    return seconds(time), int(number)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Those of both commands."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a shape that was measured, a directory with a config.json, or a hub id")
    add("--card", required=True, help="h200, or a file that `python -m benchmarks.engine step_costs` has written")
    add("--seed", type=int, default=0, help="of all that is drawn: the same seed gives the same results (default 0)")
    add("--json", type=Path, metavar="FILE", help="all results")
    add("--target-first", type=seconds, help="time to the first token, such as 200ms: for the goodput, and for a plan")
    add("--target-gap", type=seconds, help="time between two tokens, such as 20ms; for the goodput a query's mean")
    clients = parser.add_argument_group("clients").add_argument
    clients("--rate", type=float, help="queries per second, the later turns of conversations included")
    clients("--cv", type=float, default=1.0, help="of the gaps between arrivals: 1 is Poisson, more comes in bursts")
    clients("--replay", type=Path, metavar="FILE", help="a trace in place of --rate: Azure's columns, or BurstGPT's")
    clients("--speed", type=float, default=1.0, help="of the replay")
    clients("--prompt-tokens", type=lengths, default=WorkloadOptions.prompt_tokens, help=SHAPES)
    clients("--output-tokens", type=lengths, default=WorkloadOptions.output_tokens, help="the same")
    clients("--shared-prefix", type=int, default=0, help="tokens before each prompt that others share")
    clients("--num-prefixes", type=int, default=1, help="how many different ones there are")
    clients("--turns", type=float, default=1.0, help="of a conversation, on average")
    clients("--think-seconds", type=seconds, default=10.0, help="from an answer to the next turn, on average")
    clients("--max-retries", type=int, default=2, help="after a refusal, each a second later")
    engine = parser.add_argument_group("the engine of a replica").add_argument
    for name in ENGINE_OPTIONS:
        is_switch = name.startswith("enable_") or name == "async_scheduling"
        kind: Any = {"action": argparse.BooleanOptionalAction} if is_switch else {"type": ENGINE.get(name, int)}
        engine(f"--{name.replace('_', '-')}", **kind, help=ABOUT[name])
    engine("--acceptance", type=float, default=0.6, help="probability that a guess is right if all before it are")
    engine("--max-queue", type=int, default=512, help="sequences that may wait before more are refused")
    engine("--engine-only", action="store_true", help="the engine is called directly: no HTTP, no API process")
    routing = parser.add_argument_group("the router").add_argument
    routing("--router", choices=ROUTERS, default="two-choices", help="by which rule a query finds its replica")
    routing(
        "--router-kwargs", type=json_object, default={}, metavar="JSON", help="such as '{\"imbalanced_threshold\": 8}'"
    )
    routing("--max-ongoing-requests", type=int, help="of a replica; more wait at the router")


def add_simulate(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument("--seconds", type=seconds, help="in which queries come")
    parser.add_argument("--queries", type=int, help="so many first turns at most")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="distributions, and load over time, as a picture")
    group = parser.add_argument_group("the fleet").add_argument
    group("--replicas", type=int, help="at the start (default 1, or --min-replicas)")
    group("--startup-seconds", type=seconds, default=60.0, help="until a new replica serves")
    group("--die", type=death, action="append", default=[], metavar="T:N", help="at time T the replica N dies (from 0)")
    group("--max-replicas", type=int, help="scale by the queue, as Ray Serve does; with this the next ones count")
    for name in SCALING:
        kind, default = (int, 1) if name == "min_replicas" else (seconds, getattr(Autoscaling, name))
        group(f"--{name.replace('_', '-')}", type=kind, help=f"as Ray Serve's (default {default})")


def add_plan(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    add = parser.add_argument
    add("--percentile", type=float, default=99.0, help="of the first tokens and of the gaps that must be in time")
    add("--max-gpus", type=int, default=256, help="at which the search gives up")
    add(
        "--seconds",
        type=seconds,
        help="of each simulation; the best set-ups are simulated four times as long (default 30, "
        f"longer if fewer than {LEAST_QUERIES} queries would come; all of a trace)",
    )
    whole: dict[str, Any] = {"type": numbers, "metavar": "N,N"}
    add("--ranks", **whole, default=[1, 2, 4, 8], help="values of tensor_parallel_size to try")
    add("--budgets", **whole, default=[2048, 8192, 16384], help="values of max_num_batched_tokens to try")
    add("--block-sizes", **whole, default=[256], help="values of kvcache_block_size to try")


def numbers(text: str) -> list[int]:
    """Raises ValueError, which argparse reports, for what is no list of numbers with commas between."""
    return [int(part) for part in text.split(",")]


def scenario(args: argparse.Namespace, **fleet: Any) -> Scenario:
    """What the options of both commands say. `fleet`: fields of `FleetOptions`, in place of their defaults."""
    names = {field.name for field in fields(WorkloadOptions)}
    workload = {name: value for name, value in vars(args).items() if name in names}
    engine = {name: value for name in ENGINE_OPTIONS if (value := getattr(args, name)) is not None}
    direct = "model", "card", "router", "router_kwargs", "max_queue", "acceptance", "seed", "target_first", "target_gap"
    return Scenario(
        **{name: getattr(args, name) for name in direct},
        engine=EngineConfig(**engine),
        workload=WorkloadOptions(**workload),
        fleet=FleetOptions(max_retries=args.max_retries, max_ongoing_requests=args.max_ongoing_requests, **fleet),
        with_server=not args.engine_only,
    )


def check_writable(*paths: Path | None) -> None:
    """Before hours of simulation. Raises ValueError for a file in a directory that there is not."""
    for path in paths:
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"{path}: there is no directory {path.resolve().parent}")


def run_simulate(args: argparse.Namespace) -> None:
    check_writable(args.json, args.plot)
    if args.plot is not None:
        from nanovllm.simulate.plots import check_matplotlib

        check_matplotlib()
    scaling, given = None, {name: value for name in SCALING if (value := getattr(args, name)) is not None}
    if args.max_replicas is not None:
        scaling = Autoscaling(max_replicas=args.max_replicas, **given)
    elif given:
        raise ValueError(f"{', '.join(given)}: without max_replicas nothing is scaled; give max_replicas, too")
    least = 1 if scaling is None else scaling.min_replicas
    start = {"replicas": least if args.replicas is None else args.replicas, "startup_seconds": args.startup_seconds}
    chosen = scenario(args, **start, autoscaling=scaling, deaths=tuple(args.die))
    described = chosen.described()
    print(f"{described['model']} on {described['card']}: {described['costs']}")
    with progress(args.seconds, args.queries) as arrived:
        statistics = chosen.run(arrived)
    report = statistics.report(chosen.config.tensor_parallel_size)
    print(table(report))
    if args.json is not None:
        args.json.write_text(json.dumps({"scenario": described} | report, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        from nanovllm.simulate.plots import plot

        plot(statistics, args.plot)


def run_plan(args: argparse.Namespace) -> None:
    check_writable(args.json)
    target = Target(args.target_first, args.target_gap, args.percentile)
    if args.seconds is None and args.replay is None:
        args.seconds = max(30.0, LEAST_QUERIES / (args.rate or LEAST_QUERIES))
    chosen = scenario(args)
    guesses = [None] if chosen.engine.speculative is None else [None, chosen.engine.speculative]
    possible, not_tried = possible_ranks(chosen, args.ranks)
    set_ups = [
        SetUp(ranks, budget, block_size, guessing)
        for ranks in possible
        for budget in args.budgets
        for block_size in args.block_sizes
        for guessing in guesses
    ]
    planner = Planner(chosen, target, set_ups, args.max_gpus, lambda said: print(f"  {said}", file=sys.stderr))
    found = planner.find()
    described = found.scenario.described()
    print(f"{described['model']} on {described['card']}: {described['costs']}")
    print(f"{found.best.num_gpus} GPUs: {found.best.replicas} x {found.best.set_up}")
    print(f"    {found.best.numbers(target)}")
    for outcome, why in found.others:
        print(f"not {outcome.replicas} x {outcome.set_up}: {why}\n    {outcome.numbers(target)}")
    for why in not_tried:
        print(f"not tried: {why}")
    if args.json is not None:
        others = [outcome.as_json() | {"why_not": why} for outcome, why in found.others]
        told = {"scenario": described, "target": asdict(target), "best": found.best.as_json(), "others": others}
        told["not_tried"] = not_tried
        args.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def possible_ranks(chosen: Scenario, wanted: list[int]) -> tuple[list[int], list[str]]:
    """The ranks whose costs are known and whose memory suffices, and for each of the others the reason.

    Raises ValueError, with the first reason, if none are possible.
    """
    good, why = [], []
    for ranks in wanted:
        try:
            _ = replace(chosen, engine=replace(chosen.engine, tensor_parallel_size=ranks)).config
            good.append(ranks)
        except ValueError as error:
            why.append(str(error))
    if not good:
        raise ValueError(why[0])
    return good, why


@contextmanager
def progress(seconds: float | None, queries: int | None) -> Iterator[Callable[[float], None]]:
    """A bar, and the function that is told the virtual time of each arrival."""
    from tqdm import tqdm

    by_time = queries is None and seconds is not None
    total, unit = (seconds, "s") if by_time else (queries, " queries")
    with tqdm(total=total, unit=unit, desc="simulated", dynamic_ncols=True, disable=None, mininterval=0.3) as bar:

        def arrived(now: float) -> None:
            if not by_time:
                bar.update()
            elif now - bar.n > 0.1:
                bar.update(round(now - bar.n, 1))

        yield arrived
