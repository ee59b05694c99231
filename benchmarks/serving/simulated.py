"""The simulation beside what it simulates, under the same arrivals: `AsyncLLM`, the server, and Ray Serve's replicas.

    python -m benchmarks.serving.simulated [--card FILE | --fake-device] [--rates 2 6 12] [--seconds 30] [--only NAME]

With --fake-device nothing is computed: steps take the time of `mock.LIKE_A_GPU`. What is off then is due to callers and
server, and to how these are simulated. Without --card the cost of steps is measured first (`python -m benchmarks.engine
step_costs`). Arrivals are a Poisson process. Every real run is a fresh process, and is warm before the clock starts.
"engine" is the engine's own loop on one thread, whose clock is the CPU time of this thread. A busy machine spoils the
comparison all the same, for cores share caches and memory: `load` in the result is the number of processes that wanted
a core when a run began.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine import step_costs
from benchmarks.lib import harness, tables
from benchmarks.lib.harness import Contender, Measure
from benchmarks.lib.process import facts
from benchmarks.lib.tables import Result
from benchmarks.serving import added, mock, speed
from benchmarks.serving.drive import (
    SHARES,
    WARM_UP,
    Asked,
    Figures,
    Seen,
    arrivals,
    measure_async,
    measure_engine,
    over_http,
)
from benchmarks.serving.started import started
from nanovllm.config import EngineConfig
from nanovllm.simulate.arrivals import Query, Workload
from nanovllm.simulate.costs import Costs, IntakeTime, ServerTime, load_costs
from nanovllm.simulate.fleet import Fleet, FleetOptions
from nanovllm.simulate.replica import Replica
from nanovllm.simulate.routers import PowerOfTwoChoices
from nanovllm.simulate.step_time import StepTime

VOCAB_SIZE = 4096
RAY = "two replicas, Ray Serve"
LABELS = {
    "tokens_per_second": "output tokens/s",
    "first_p50": "first token, median (ms)",
    "first_p99": "first token, p99 (ms)",
    "gap_p50": "gap, median (ms)",
    "gap_p99": "gap, p99 (ms)",
}


# --- the simulation ---------------------------------------------------------------------------------------------------


class Given(Workload):
    """Requests that are all known."""

    def __init__(self, asked: list[Asked]) -> None:
        self.asked = asked

    def queries(self) -> Iterator[Query]:
        return (Query(i, one.time, one.prompt, one.max_tokens) for i, one in enumerate(self.asked))


def simulate(costs: Costs, asked: list[Asked], config: EngineConfig, replicas: int, server: ServerTime) -> Figures:
    """The same figures in virtual time."""

    def make(number: int) -> Replica:
        return Replica(number, config, costs, vocab_size=VOCAB_SIZE, intake=costs.intake, server=server)

    router = PowerOfTwoChoices(random.Random(0), config.kvcache_block_size or 16)
    told = Fleet(make, router, Given(asked), FleetOptions(replicas=replicas, server=server)).run().report()
    found = {"tokens_per_second": told["tokens"]["output_per_second"]}
    for name, key in ("first", "first_token_seconds"), ("gap", "gap_seconds"):
        found |= {f"{name}_{share}": 1e3 * (told[key][share] or 0.0) for share in SHARES}
    return found


# --- both -------------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """One way of serving: how the real one is run, and what its simulation has."""

    title: str
    rates: list[float]
    real: Callable[[list[Asked]], Seen]
    replicas: int
    server: ServerTime


def settings(options: argparse.Namespace) -> list[Setting]:
    gpu = options.device != "cpu"
    config = engine_options(options)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in config.items()]
    serve = [sys.executable, "-m", "nanovllm.cli", "serve", str(options.model), "--port", "0", "--max-queue", "100000"]
    ray = [sys.executable, "examples/ray_serve.py", str(options.model), "--replicas", "2", "--port", str(options.port)]
    clients = speed.CLIENTS if gpu else 1
    callers = ServerTime(**asyncio.run(added.async_time()))

    def in_process(title: str, measure: Measure, asked: list[Asked]) -> Seen:
        arguments: dict[str, Any] = {
            "waves": [arrivals(*WARM_UP), asked],
            "model": str(options.model),
            "config": config,
        }
        if options.fake_device:
            arguments["fake"] = mock.LIKE_A_GPU
        [found] = harness.run_process(Contender(title), measure, arguments, options)["repetitions"]
        return Seen(*found)

    if options.fake_device:
        serve, flags = mock.SERVER, [f"--{name}={value}" for name, value in mock.LIKE_A_GPU.items()]

    def server(command: list[str], asked: list[Asked]) -> Seen:
        with started(command, stderr=subprocess.STDOUT) as (_, port):
            return over_http(port, asked, clients)

    found = [
        Setting(title, options.rates, partial(in_process, title, measure), 1, time)
        for title, measure, time in (("engine", measure_engine, ServerTime()), ("AsyncLLM", measure_async, callers))
        if title == "AsyncLLM" or not (gpu or options.fake_device)
    ]
    if (options.model / "tokenizer.json").is_file():
        if options.only is None or "server" in options.only:
            http = ServerTime(**added.server_time(seconds=6))
            found.append(Setting("server", options.rates, partial(server, [*serve, *flags]), 1, http))
        if options.ray_rates and (options.only is None or RAY in options.only):
            way = ServerTime(**added.ray_time(options.port, seconds=6))
            found.append(Setting(RAY, options.ray_rates, partial(server, ray), 2, way))
    return [setting for setting in found if options.only is None or setting.title in options.only]


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    if options.device != "cpu":
        return {"device": options.device, "max_model_len": 4096}
    return {"device": "cpu", "num_kv_blocks": 4096} | ({"async_scheduling": True} if options.fake_device else {})


def compare(options: argparse.Namespace, costs: Costs) -> Iterator[dict[str, Any]]:
    """A row for each way of serving, and each rate."""
    gpu = options.device != "cpu"
    chosen = EngineConfig(**engine_options(options)).resolve(on_gpu=gpu, model_max_len=4096 if gpu else 2048)
    assert chosen.kvcache_block_size is not None
    blocks = chosen.num_kv_blocks or costs.kv_tokens // chosen.kvcache_block_size
    config = EngineConfig(**{**vars(chosen), "num_kv_blocks": blocks})
    for title, rates, real, replicas, server in settings(options):
        for rate in rates:
            asked = arrivals(rate, options.seconds, 1, gpu or options.fake_device)
            if options.fake_device:
                asked = [one for one in asked if len(one.prompt) + one.max_tokens < 2000]  # nearly all
            busy = os.getloadavg()[0]
            seen = real(asked)
            sent = [one._replace(time=time) for one, time in zip(asked, seen.sent, strict=True)]
            row = {"where": title, "rate": rate, "load": busy, "server": server._asdict(), "measured": seen.figures}
            row["simulated"] = simulate(costs, sent, config, replicas, server)
            print(*rows_of(row), sep="\n", flush=True)
            yield row


def rows_of(row: dict[str, Any]) -> list[str]:
    """Lines of the table: of each figure what was simulated and measured, and how far the first is off."""
    lines = []
    for key, label in LABELS.items():
        simulated, measured = row["simulated"][key], row["measured"][key]
        off = f"{100 * (simulated / measured - 1):+.1f}%"
        cells = f"{row['rate']:g}", label, *(tables.number(value, "ms") for value in (simulated, measured)), off
        lines.append(tables.row(row["where"], *cells))
    return lines


def table(results: dict[str, Result]) -> list[str]:
    """A row for each way of serving, each rate and each figure."""
    result = results["serving_simulated"]
    lines = tables.head("", "requests/s", "", "simulated", "measured", "off")
    lines += [line for row in result["rows"] for line in rows_of(row)]
    machine = result["machine"]
    where = machine["device"] if machine["device"] != "cpu" else f"{machine['processor']}, {machine['cores']} cores"
    lines += ["", f"Each rate for {result['seconds']:g} s. Costs: {result['source']}."]
    adds = {row["where"]: row["server"] for row in result["rows"] if any(row.get("server", {}).values())}
    for title, time in adds.items():
        request, step, token = (1e3 * time.get(name, 0.0) for name in ("request", "engine_step", "engine_token"))
        lines[-1] += f" {title} adds {request:.1f} ms to a request and {token:.2f} ms per token to a step"
        lines[-1] += f", and {step:.2f} ms to each step." if step else "."
    return [*lines, "", f"Measured on {where}, torch {machine['torch']}; commit {tables.commit(result)}."]


def main(arguments: list[str] | None = None) -> None:
    parser = harness.make_parser("serving.simulated", __doc__)
    parser.add_argument("--card", help="a name or a file (default: measured now)")
    parser.add_argument("--model", type=Path, help="default: the story model; on a GPU that of serving.speed")
    parser.add_argument("--tokenizer", type=Path, default=speed.TOKENIZER, help="of that model (default %(default)s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fake-device", action="store_true", help="compare the callers and the server alone")
    parser.add_argument("--rates", type=float, nargs="+", default=[2, 6, 12], help="requests a second")
    parser.add_argument("--ray-rates", type=float, nargs="*", default=[1, 2], help="the same of two Ray replicas")
    parser.add_argument("--seconds", type=float, default=30, help="how long each rate is kept up (default 30)")
    parser.add_argument("--only", action="append", metavar="NAME", help=f"engine, AsyncLLM, server, or {RAY}")
    parser.add_argument("--port", type=int, default=8765, help="of Ray's server")
    parser.add_argument("--quick", action="store_true", help="a low rate for three seconds, and no Ray: for tests")
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    options = parser.parse_args(arguments)
    if options.model is None:
        cpu = options.device == "cpu"
        options.model = harness.EMBEDDED_MODEL if cpu else speed.checkpoint(options.tokenizer)
    options.threads = 1 if options.device == "cpu" else None
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = "1"  # of the servers
    if options.quick:
        options.rates, options.ray_rates, options.seconds = [3.0], [], 3.0
    if options.fake_device:
        costs, options.ray_rates = fake_costs(), []
    else:
        with tempfile.TemporaryDirectory() as scratch:
            card = options.card or measure_costs(options, Path(scratch))
            costs = load_costs(card, options.model)
    result: dict[str, Any] = {
        "name": "serving_fake" if options.fake_device else "serving_simulated",
        "machine": facts(options.device),
        "commit": harness.commit("nanovllm", "benchmarks/serving/*.py"),
        "seconds": options.seconds,
        "source": costs.source,
        "rows": [],
    }
    path = harness.result_path(result["name"], result["machine"]["device"], options.out)
    for row in compare(options, costs):  # written after each, so that a run that is cut short keeps what it has
        result["rows"].append(row)
        harness.write_json(result, path)


def fake_costs() -> Costs:
    """Of the fake device, with the engine's own time on this machine."""
    host = dict(zip(("step", "sequence"), added.line(*[(n, mock.engine_alone(n)) for n in (1, 32)]), strict=True))
    device = {"sample": 1 / mock.LIKE_A_GPU["rate"], "prompt": mock.LIKE_A_GPU["prompt"]}
    time = StepTime(((0, mock.LIKE_A_GPU["step"]),), device, host)
    return Costs("none", "none", True, "a device that computes nothing", time, IntakeTime(), ServerTime(), kv_tokens=0)


def measure_costs(options: argparse.Namespace, directory: Path) -> str:
    """The file of a card that is measured now."""
    chosen = argparse.Namespace(**vars(options) | {"out": directory, "repeats": 1 if options.quick else None})
    step_costs.run(argparse.Namespace(**vars(chosen) | {"flash_path": None, "vllm_path": None}))
    [path] = directory.glob("*.json")
    return str(path)


if __name__ == "__main__":
    main()
