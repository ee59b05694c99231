"""How long an all-reduce takes, by the size of the message and by who does it.

nccl:      what the engine does with large messages (on a CPU: gloo).
symmetric: what it does with small ones, over memory that the GPUs share (see `nanovllm/distributed/one_shot.py`).

On GPUs each also with the residual addition and norm behind it. Each is measured as it would run in a recorded decode
step: 20 behind one another in a CUDA graph. Each result is compared with the sum first.
`benchmarks/engine/tensor_parallel.py` asks for all this and has the table.
"""

import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.harness import Contender, Measured, run_process
from nanovllm.distributed.group import Group, devices_of
from nanovllm.distributed.one_shot import SWITCH, default_bytes
from nanovllm.workers.spawned import SpawnedTeam

SIZES = [1 << k for k in range(12, 25)]  # 4 KiB to 16 MiB: 4096 numbers of a token are 8 KiB
WIDTH = 4096  # numbers of a token
QUICK_SIZES = [1 << 12, 1 << 16]
CALLS = 20
SECONDS = 100  # a kernel that waits for ever is given up

Way = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """What each rank does. Sent to its process."""

    kind: str
    sizes: list[int]

    def __call__(self, group: Group) -> Callable[[Any], None]:
        self.measure(group)
        return lambda message: None

    def ways(self, group: Group) -> dict[str, Way]:
        """Each gives the sum, and may do more."""
        if group.device.type == "cpu":
            return {"gloo": group.all_reduce}
        from nanovllm.kernels.fused.add_rms_norm import add_rms_norm

        weight = torch.ones(WIDTH, dtype=torch.bfloat16, device=group.device)
        nothing = torch.zeros(max(self.sizes), dtype=torch.uint8, device=group.device).view(torch.bfloat16)

        def apart(x: Tensor) -> Tensor:
            x = group.all_reduce(x)
            add_rms_norm(x, x, weight[: x.shape[1]], 1e-6)
            return x

        def at_once(x: Tensor) -> Tensor:
            return group.all_reduce_add_rms_norm(x, nothing[: x.numel()].view_as(x), weight[: x.shape[1]], 1e-6)[1]

        if self.kind == "nccl":
            return {"NCCL": group.all_reduce, "NCCL and norm": apart}
        return {"one-shot": group.all_reduce, "one-shot with norm": at_once}

    def measure(self, group: Group) -> list[dict[str, Any]]:
        """Microseconds of each way for each size that it can do."""
        dtype = torch.bfloat16 if group.device.type == "cuda" else torch.float32
        rows: list[dict[str, Any]] = [{"bytes": size} for size in self.sizes]
        for name, way in self.ways(group).items():
            for row in rows:
                numbers = row["bytes"] // dtype.itemsize
                shape = max(1, numbers // WIDTH), min(numbers, WIDTH)
                if self.kind == "symmetric" and not group.can_fuse_all_reduce(shape, dtype):
                    continue
                x = torch.full(shape, group.rank + 1, dtype=dtype, device=group.device)
                if not (way(x) == group.size * (group.size + 1) / 2).all():
                    raise RuntimeError(f"{name} gave a wrong sum of {row['bytes']} bytes")
                row[name] = microseconds(way, torch.zeros_like(x))
        return rows


def microseconds(way: Way, x: Tensor) -> float:
    if x.is_cuda:
        from benchmarks.kernels.ceilings import graph_microseconds

        return graph_microseconds(lambda: way(x), calls=CALLS, rounds=15)
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        way(x)
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def bandwidth(device: torch.device) -> float | None:
    """Bytes a second that a GPU reads at best."""
    if device.type == "cpu":
        return None
    from benchmarks.kernels.ceilings import read_bandwidth

    return float(read_bandwidth()["bytes_per_second"])


def measure(ranks: int, device: str, kind: str, sizes: list[int]) -> list[Measured]:
    """In a process that leads the ranks: the rows of one kind, as the one repetition."""
    os.environ[SWITCH] = str(max(sizes) if kind == "symmetric" else 0)
    part, devices = Part(kind, sizes), devices_of(torch.device(device), ranks)
    bytes_per_second = bandwidth(devices[0]) if kind == "nccl" else None
    team = SpawnedTeam(devices, part)
    try:
        team.join()
        with team.in_step(loading=True):
            return [{kind: {"rows": part.measure(team.group), "bytes_per_second": bytes_per_second}}]
    finally:
        team.close()


def latencies(ranks: int, device: str, quick: bool) -> dict[str, Any]:
    """All ways side by side; those that cannot run here are named in `failures`."""
    found: dict[str, Any] = {"ranks": ranks, "rows": [], "bytes_per_second": None, "failures": {}}
    # Up to how many bytes the engine uses it in this run
    found["one_shot_bytes"] = int(os.environ.get(SWITCH, default_bytes(ranks)))
    options = Namespace(model=None, device=device)
    for kind in ("nccl", "symmetric") if device != "cpu" else ("nccl",):
        arguments = {"ranks": ranks, "device": device, "kind": kind, "sizes": QUICK_SIZES if quick else SIZES}
        contender = Contender(f"the all-reduce by {kind}", {})
        try:
            done = run_process(contender, "benchmarks.kernels.all_reduce", arguments, options, seconds=SECONDS)
        except RuntimeError as error:
            found["failures"][kind] = str(error).splitlines()[-1]
            continue
        result = done["repetitions"][0][kind]
        found["bytes_per_second"] = found["bytes_per_second"] or result["bytes_per_second"]
        rows = found["rows"] or [{"bytes": row["bytes"]} for row in result["rows"]]
        found["rows"] = [old | new for old, new in zip(rows, result["rows"], strict=True)]
    return found
