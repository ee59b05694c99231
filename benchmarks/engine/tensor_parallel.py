"""A step of an 8B model on 1, 2 and 4 GPUs, beside vLLM, and where its time goes.

Random weights of the shape of Qwen3-8B, greedy, 128 tokens in, 257 out, at batch 1 and 32. A step is the difference
between generating 257 tokens and generating one, over the 256 steps between (see `benchmarks/engine/speed.py`).

Where it goes is reckoned, not traced: reading the weights and keys of a rank at the bandwidth that a plain read kernel
reaches, and as many all-reduces as the model has, at what one takes by itself. What is left is all the rest.

The all-reduces are measured as they would run in a recorded decode step, 20 behind one another in a CUDA graph, with
and without the residual addition and norm behind them: by NCCL, as the engine does with large messages (on a CPU: by
gloo), and over memory that the GPUs share, as with small ones (`nanovllm/distributed/one_shot.py`).
"""

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from timeit import repeat
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import ours, speed, vllm
from benchmarks.lib import harness, tables
from benchmarks.lib.harness import Contender, Measured, Showcase
from benchmarks.lib.tables import Result, cell, row
from nanovllm.distributed.group import Group, devices_of
from nanovllm.distributed.one_shot import SWITCH, default_bytes
from nanovllm.simulate.needs import Architecture, Needs, read_architecture
from nanovllm.workers.spawned_team import SpawnedTeam

TARGET = 0.85  # of vLLM's time for a step
MAX_NUM_SEQS = 64
ALL_RANKS = (1, 2, 4, 8)
PARTS = ("weights", "keys", "all-reduces", "rest")
FULL: dict[str, Any] = {"batches": [1, 32], "prompt_len": 128, "num_tokens": 257, "highest_id": 10_000}

SIZES = [1 << k for k in range(12, 25)]  # of the all-reduces' messages: 4 KiB to 16 MiB
QUICK_SIZES = [1 << 12, 1 << 16]
WIDTH = 4096  # numbers of a token: 8 KiB
CALLS = 20
SECONDS = 100  # a kernel that waits for ever is given up

Way = Callable[[Tensor], Tensor]


def name_of(package: str, ranks: int) -> str:
    return f"{package}, {ranks} rank{'s' if ranks > 1 else ''}"


def showcase(options: argparse.Namespace) -> Showcase:
    """The all-reduces, measured now, and the steps of up to `options.ranks` ranks."""
    numbers = [n for n in ALL_RANKS if n <= options.ranks]
    latencies = [all_reduces(n, options) for n in numbers if n > 1]
    for found in latencies:
        print(*(f"{found['ranks']} ranks: {row}" for row in found["rows"]), sep="\n", flush=True)
        print(*(f"{kind}: {why}" for kind, why in found["failures"].items()), sep="\n", flush=True)
    return of_steps(options, numbers, speed.QUICK_SMALL if options.quick else FULL, latencies)


def of_steps(
    options: argparse.Namespace, numbers: list[int], sizes: dict[str, Any], latencies: list[dict[str, Any]]
) -> Showcase:
    """For each number of ranks first ours, then vLLM if it can be imported. latencies: of `all_reduces`."""
    contenders: list[Contender] = []
    for n in numbers:
        config: dict[str, Any] = {"tensor_parallel_size": n, "max_num_seqs": MAX_NUM_SEQS}
        contenders.append(ours(options, name_of("nanovllm", n), **config))
        contenders += vllm(options, name_of("vLLM", n), **config)
    theirs, model = name_of("vLLM", numbers[-1]), read_architecture(options.model)[0]
    return speed.of_small_batches(
        "tensor_parallel",
        "A step on several GPUs",
        contenders,
        sizes,
        "a step",
        contender=name_of("nanovllm", numbers[-1]),
        rival=theirs if theirs in {c.name for c in contenders} else name_of("nanovllm", numbers[0]),
        extra={"all_reduce": latencies},
        derive=lambda result: {"where": where_it_goes(result, latencies, model, sizes)},
    )


def share_of_step(
    model: Architecture, ranks: int, batch: int, keys: float, latencies: dict[str, Any], itemsize: int = 2
) -> dict[str, float]:
    """Milliseconds of a decode step of one rank: {"weights": ..., "keys": ..., "all-reduces": ...}, each at its best.

    keys: how many a sequence has, on average over the steps. latencies: of `all_reduces`.
    """
    needs, rate = Needs(model.share(ranks), itemsize), latencies["bytes_per_second"]
    parts = {"weights": 1e3 * needs.read_bytes(batch) / rate, "keys": 1e3 * batch * keys * needs.key_bytes / rate}
    if ranks > 1:
        message = batch * model.hidden_size * itemsize
        fitting = next((row for row in latencies["rows"] if row["bytes"] >= message), latencies["rows"][-1])
        by_one_shot = message <= latencies["one_shot_bytes"] and "one-shot" in fitting
        parts["all-reduces"] = model.num_all_reduces * fitting["one-shot" if by_one_shot else "NCCL"] / 1e3
    return parts


def where_it_goes(
    result: Result, latencies: list[dict[str, Any]], model: Architecture, sizes: dict[str, Any]
) -> list[dict[str, float]]:
    """For each number of ranks and each batch: what the parts take, and the rest. Empty on a CPU."""
    by_ranks = {found["ranks"]: found for found in latencies if found["bytes_per_second"]}
    found = []
    keys = sizes["prompt_len"] + sizes["num_tokens"] / 2
    for batch in sizes["batches"] if by_ranks else ():
        steps = tables.figures(result)[f"ms_per_token_{batch}"]["values"]
        for ranks in [1, *by_ranks]:
            if (name := name_of("nanovllm", ranks)) in steps:
                fitting = by_ranks.get(ranks, next(iter(by_ranks.values())))
                parts = share_of_step(model, ranks, batch, keys, fitting)
                step = steps[name]["median"]
                rest = step - sum(parts.values())
                found.append({"ranks": ranks, "batch": batch, "step": step, **parts, "rest": rest})
    return found


# --- all-reduces by themselves ----------------------------------------------------------------------------------------


def all_reduces(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """All ways side by side; those that cannot run here are named in `failures`."""
    found: dict[str, Any] = {"ranks": ranks, "rows": [], "bytes_per_second": None, "failures": {}}
    # Up to how many bytes the engine uses it in this run
    found["one_shot_bytes"] = int(os.environ.get(SWITCH, default_bytes(ranks)))
    sizes = QUICK_SIZES if options.quick else SIZES
    for kind, switch in {"nccl": 0, "symmetric": max(sizes)}.items() if options.device != "cpu" else [("gloo", 0)]:
        arguments = {"ranks": ranks, "device": options.device, "kind": kind, "sizes": sizes}
        contender, environment = Contender(f"the all-reduce by {kind}"), {SWITCH: str(switch)}
        try:
            done = harness.run_process(contender, measure, arguments, options, environment, SECONDS)
        except RuntimeError as error:
            found["failures"][kind] = str(error).splitlines()[-1]
            continue
        result = done["repetitions"][0][kind]
        found["bytes_per_second"] = found["bytes_per_second"] or result["bytes_per_second"]
        rows = found["rows"] or [{"bytes": row["bytes"]} for row in result["rows"]]
        found["rows"] = [old | new for old, new in zip(rows, result["rows"], strict=True)]
    return found


def measure(ranks: int, device: str, kind: str, sizes: list[int]) -> list[Measured]:
    """In a process that leads the ranks: the rows of one kind, as the one repetition."""
    devices, bytes_per_second = devices_of(torch.device(device), ranks), None
    if kind == "nccl":
        from benchmarks.kernels.ceilings import read_bandwidth

        bytes_per_second = read_bandwidth()
    team = SpawnedTeam(devices, partial(measure_once, kind, sizes))
    try:
        team.join()
        with team.in_step(loading=True):
            rows = measure_rows(kind, sizes, team.group)
            return [{kind: {"rows": rows, "bytes_per_second": bytes_per_second}}]
    finally:
        team.close()


def measure_once(kind: str, sizes: list[int], group: Group) -> Callable[[Any], None]:
    """What a worker does: its part of each sum, and nothing more."""
    measure_rows(kind, sizes, group)
    return lambda message: None


def measure_rows(kind: str, sizes: list[int], group: Group) -> list[dict[str, Any]]:
    """Microseconds of each way for each size that it can do. Raises RuntimeError if a sum is wrong."""
    dtype = torch.bfloat16 if group.device.type == "cuda" else torch.float32
    rows: list[dict[str, Any]] = [{"bytes": size} for size in sizes]
    for name, way in ways(kind, sizes, group).items():
        for entry in rows:
            numbers = entry["bytes"] // dtype.itemsize
            shape = max(1, numbers // WIDTH), min(numbers, WIDTH)
            if kind == "symmetric" and not group.can_fuse_all_reduce(shape, dtype):
                continue
            x = torch.full(shape, group.rank + 1, dtype=dtype, device=group.device)
            if not (way(x) == group.size * (group.size + 1) / 2).all():
                raise RuntimeError(f"{name} gave a wrong sum of {entry['bytes']} bytes")
            entry[name] = microseconds(way, torch.zeros_like(x))
    return rows


def ways(kind: str, sizes: list[int], group: Group) -> dict[str, Way]:
    """Each gives the sum, and may do more."""
    if kind == "gloo":
        return {"gloo": group.all_reduce}
    from nanovllm.kernels.fused.add_rms_norm import add_rms_norm

    weight = torch.ones(WIDTH, dtype=torch.bfloat16, device=group.device)
    nothing = torch.zeros(max(sizes), dtype=torch.uint8, device=group.device).view(torch.bfloat16)

    def apart(x: Tensor) -> Tensor:
        x = group.all_reduce(x)
        add_rms_norm(x, x, weight[: x.shape[1]], 1e-6)
        return x

    def at_once(x: Tensor) -> Tensor:
        return group.all_reduce_add_rms_norm(x, nothing[: x.numel()].view_as(x), weight[: x.shape[1]], 1e-6)[1]

    if kind == "nccl":
        return {"NCCL": group.all_reduce, "NCCL and norm": apart}
    return {"one-shot": group.all_reduce, "one-shot with norm": at_once}


def microseconds(way: Way, x: Tensor) -> float:
    if x.is_cuda:
        from benchmarks.kernels.ceilings import graph_microseconds

        return graph_microseconds(lambda: way(x), calls=CALLS, rounds=15)
    return 1e6 * statistics.median(repeat(lambda: way(x), number=1, repeat=CALLS))


# --- tables -----------------------------------------------------------------------------------------------------------


def steps_table(result: dict[str, Any]) -> list[str]:
    """A row for each batch and number of ranks: ours, vLLM's, ours in parts of vLLM's, and against one rank."""
    share = f"of vLLM's (goal: at most {TARGET})"
    lines = tables.head("ranks", "batch", "nanovllm (ms)", "vLLM (ms)", share, "against 1 rank", left=0)
    for figure in result["figures"]:
        if not figure["key"].startswith("ms_per_token_"):
            continue
        values = figure["values"]
        alone = values.get(name_of("nanovllm", 1))
        for ranks in ALL_RANKS:
            ours, theirs = (values.get(name_of(package, ranks)) for package in ("nanovllm", "vLLM"))
            if ours is None:
                continue
            batch = figure["key"].rpartition("_")[2]
            cells = (cell(figure, name_of(package, ranks)) for package in ("nanovllm", "vLLM"))
            of_theirs = "–" if theirs is None else f"{ours['median'] / theirs['median']:.2f}"
            against = "–" if alone is None else f"{alone['median'] / ours['median']:.2f}×"
            lines.append(row(str(ranks), batch, *cells, of_theirs, against))
    return lines


def parts_table(result: dict[str, Any]) -> list[str]:
    """Where a step goes; nothing on a CPU."""
    if not result["where"]:
        return []
    lines = tables.head("ranks", "batch", "a step (ms)", *PARTS, left=0)
    for where in result["where"]:
        parts = (f"{where[part]:.2f}" if part in where else "–" for part in PARTS)
        lines.append(row(str(where["ranks"]), str(where["batch"]), f"{where['step']:.2f}", *parts))
    return ["", *lines]


def all_reduce_table(result: dict[str, Any]) -> list[str]:
    """Microseconds by the size of the message, for each number of ranks and each way."""
    measured = [found for found in result["all_reduce"] if found["rows"]]
    if not measured:
        return []
    columns = [(found, way) for found in measured for way in found["rows"][0] if way != "bytes"]
    names = [f"{way}, {found['ranks']} ranks (us)" for found, way in columns]
    lines = ["", *tables.head("all-reduce of (KiB)", *names, left=0)]
    for i, entry in enumerate(measured[0]["rows"]):
        times = [found["rows"][i].get(way) for found, way in columns]
        cells = ("–" if time is None else tables.number(time, "us") for time in times)
        lines.append(row(f"{entry['bytes'] / 1024:g}", *cells))
    return lines


def table(results: dict[str, Result]) -> list[str]:
    """Steps beside vLLM, where they go, and the all-reduces."""
    result = results["tensor_parallel"]
    lines = steps_table(result) + parts_table(result) + all_reduce_table(result)
    return [*lines, "", f"Workload: {result['workload']}.", "", tables.origin(results)]
