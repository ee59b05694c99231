"""Attention against what the GPU can do: GB/s of KV read in decode, TFLOP/s in prefill, as shares of the limits.

    python -m benchmarks.kernels.attention --out kernels.json
    python -m benchmarks.kernels.attention --out sweep.json --decode 64,4,3,3 --ring 32,4,3,1,160 --prefill 128,64,8,3

Shape: 16 query heads, 8 KV heads, head_dim 128, bf16. A layout of the decode kernel is keys,warps,stages,programs a
multiprocessor; of the decode kernel for Hopper, the ring: keys,heads,stages,programs a multiprocessor, and perhaps
the most registers of a thread; of the prefill kernel rows,keys,warps,stages, and if keys shall come by TMA (Hopper and
later) 1 and the most registers of a thread, 0 for the compiler's choice. Without any, a small set of each is tried.
Every layout's output is compared with that of the layout the engine uses.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass
from itertools import accumulate, cycle, product
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import harness, tables

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128
SCALE = HEAD_DIM**-0.5
L2_FLUSH = 256 * 2**20  # bytes of KV between two readings of the same: more than any cache holds

DECODE_LAYOUTS = [
    (64, 4, 3, 3), (64, 4, 2, 3), (64, 4, 5, 3), (64, 4, 5, 2), (64, 8, 3, 2), (64, 4, 3, 4),
    (32, 4, 3, 4), (32, 4, 5, 4), (32, 2, 3, 5), (128, 4, 3, 2), (128, 8, 3, 1), (128, 8, 5, 1),
]  # fmt: skip
NAMES = {"triton": "ours", "flash_attn": "flash-attn"}  # in the table
RING_LAYOUTS = [(32, 4, 3, 1, 160), (32, 4, 3, 1), (16, 4, 2, 2, 112), (16, 8, 2, 1, 128)]
PREFILL_LAYOUTS = [
    (128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 5), (64, 64, 4, 3), (64, 128, 4, 3),
    (128, 64, 8, 2, 1, 128), (128, 64, 8, 3, 1, 128), (64, 64, 4, 3, 1, 0), (64, 32, 4, 2, 1, 128),
]  # fmt: skip


@dataclass
class Problem:
    """Sequences of (query_len, context_len) over shuffled blocks, and as many layers' caches as defeat the L2 cache."""

    name: str
    lengths: list[tuple[int, int]]
    block_size: int

    def __post_init__(self) -> None:
        from nanovllm.attention.interface import AttentionMetadata

        torch.manual_seed(0)
        needed = [-(-context // self.block_size) for _, context in self.lengths]
        order = torch.randperm(sum(needed)).int()
        table = torch.zeros(len(needed), max(needed), dtype=torch.int32)
        for row, count, start in zip(table, needed, accumulate(needed, initial=0), strict=False):
            row[:count] = order[start : start + count]
        query_lens = [n for n, _ in self.lengths]
        query_start = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device="cuda")
        self.q = torch.randn(sum(query_lens), NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self.meta = AttentionMetadata(
            slots=torch.empty(0, dtype=torch.int64, device="cuda"),
            query_start=query_start,
            context_len=torch.tensor([c for _, c in self.lengths], dtype=torch.int32, device="cuda"),
            block_table=table.cuda(),
            num_decodes=len(needed) if max(query_lens) == 1 else 0,
            max_query_len=max(query_lens),
            max_context_len=max(c for _, c in self.lengths),
        )
        layers = max(1, min(28, -(-L2_FLUSH // self.kv_bytes)))
        shape = layers, 2, sum(needed) + 1, self.block_size, NUM_KV_HEADS, HEAD_DIM
        self.kvs = torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    @property
    def kv_bytes(self) -> int:
        return sum(context for _, context in self.lengths) * 2 * NUM_KV_HEADS * HEAD_DIM * 2

    @property
    def operations(self) -> int:
        """Multiplications and additions of q K^T and p V over the pairs that the causal mask leaves."""
        pairs = sum(n * context - n * (n - 1) // 2 for n, context in self.lengths)
        return 4 * pairs * NUM_HEADS * HEAD_DIM

    def measure(self, attend: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """`attend` maps a layer's KV cache to the output; each call of it gets another layer's."""
        layers = cycle(self.kvs)
        from benchmarks.kernels.ceilings import graph_microseconds

        microseconds = graph_microseconds(lambda: attend(next(layers)), calls=max(10, len(self.kvs)))
        return {
            "microseconds": microseconds,
            "gb_per_second": self.kv_bytes / microseconds / 1e3,
            "tflop_per_second": self.operations / microseconds / 1e6,
        }


def decode_problems() -> list[Problem]:
    rng = random.Random(0)
    contexts = [rng.randint(100, 1600) for _ in range(256)]  # mean 850
    problems = [Problem(f"decode {n}", [(1, c) for c in contexts[:n]], 256) for n in (256, 64, 32, 8, 1)]
    problems += [Problem(f"decode {n}, all at {c}", [(1, c)] * n, 256) for n, c in ((256, 700), (256, 768), (32, 384))]
    return [*problems, Problem("decode 256", [(1, c) for c in contexts], 16)]


def prefill_problems() -> list[Problem]:
    rng = random.Random(0)
    prompts = [(n, n) for n in (rng.randint(100, 1024) for _ in range(29))]
    chunks = [(1024, 1536)] * 16
    return [Problem("chunks of 1024 at 1536", chunks, b) for b in (256, 16)] + [Problem("whole prompts", prompts, 256)]


def by_backend(name: str, problem: Problem) -> dict[str, Any]:
    from nanovllm.attention import select_backend

    row = {"kernel": name, "problem": problem.name, "block_size": problem.block_size}
    try:
        backend = select_backend(name, problem.q.device, HEAD_DIM, problem.block_size, torch.bfloat16)
    except ValueError as error:
        return {**row, "error": str(error)}
    shared: dict[str, Any] = {}  # as in a step, where the layers share what depends on lengths alone
    source = problem.q.clone()

    def attend(kv: torch.Tensor) -> torch.Tensor:
        """A decode comes after a kernel that writes its few queries, as in a layer: it may start while that one runs.
        Behind another decode it would find no room, and then have too few programs at once."""
        q = problem.q.copy_(source) if problem.meta.num_decodes else problem.q
        return backend.attend(q, kv, problem.meta, SCALE, shared)

    return row | problem.measure(attend)


def by_layout(kind: str, layout: tuple[int, ...], problem: Problem) -> dict[str, Any]:
    """One layout of our kernel. A layout that does not fit the GPU, or whose output is wrong, is reported as such."""
    from triton.runtime.errors import OutOfResources

    from nanovllm.attention import select_backend
    from nanovllm.kernels.attention.paged_decode import DecodeConfig, DecodeWorkspace, paged_decode, plan_decode
    from nanovllm.kernels.attention.paged_prefill import PrefillConfig, paged_prefill
    from nanovllm.kernels.hopper.ring_layout import RingLayout
    from nanovllm.kernels.launch import gluon_kernel

    row = {"kernel": kind, "layout": layout, "problem": problem.name, "block_size": problem.block_size}
    q, meta = problem.q, problem.meta
    out = torch.empty_like(q)
    inputs = meta.block_table, meta.query_start, meta.context_len, SCALE, out
    if kind == "ring decode" and gluon_kernel("ring_decode", q.device) is None:
        return {**row, "error": "this GPU has no ring of keys"}
    if kind != "prefill":
        ring = RingLayout(*layout) if kind == "ring decode" else None
        config = DecodeConfig(*layout) if ring is None else ring.config
        num_sms = torch.cuda.get_device_properties().multi_processor_count
        pieces = num_sms * config.programs_per_sm // NUM_KV_HEADS
        workspace = DecodeWorkspace.allocate(pieces, 1, NUM_HEADS, HEAD_DIM, q.device)
        plan = plan_decode(meta.context_len, pieces, config)

        def attend(kv: torch.Tensor) -> torch.Tensor:
            if ring is None:
                paged_decode(q, kv, *inputs, workspace, plan, config)
            else:
                from nanovllm.kernels.hopper.ring_decode import ring_decode

                ring_decode(q, kv, *inputs, workspace, plan, ring)
            return out
    else:
        rows, keys, warps, stages = layout[:4]
        tma, registers = layout[4:] or (0, 0)
        if tma and torch.cuda.get_device_capability()[0] < 9:
            return {**row, "error": "this GPU has no TMA"}
        prefill = PrefillConfig(rows, keys, warps, stages, bool(tma), registers or None)

        def attend(kv: torch.Tensor) -> torch.Tensor:
            paged_prefill(q, kv, *inputs, prefill)
            return out

    try:
        found = attend(problem.kvs[0]).clone()
    except (OutOfResources, ValueError) as error:
        return {**row, "error": str(error)}
    usual = select_backend("triton", q.device, HEAD_DIM, problem.block_size, q.dtype)
    expected = usual.attend(q, problem.kvs[0], meta, SCALE)
    if not (found - expected).abs().max() < 2e-2:
        return {**row, "error": f"output is off by {(found - expected).abs().max():.3f}"}
    return row | problem.measure(attend)


def layout(*lengths: int) -> Callable[[str], tuple[int, ...]]:
    """An argument of so many numbers."""

    def read(text: str) -> tuple[int, ...]:
        numbers = tuple(map(int, text.split(",")))
        if len(numbers) not in lengths:
            raise argparse.ArgumentTypeError(f"{' or '.join(map(str, lengths))} numbers are needed, not {text!r}")
        return numbers

    return read


def show(row: dict[str, Any], limits: dict[str, Any]) -> None:
    name = f"{row['kernel']} {','.join(map(str, row.get('layout', ())))}".strip()
    text = f"{name:<24} {row['problem']:<24} block {row['block_size']:>3}  "
    if "error" in row:
        print(text + row["error"], flush=True)
        return
    if row["problem"].startswith("decode"):
        row["share_of_limit"] = row["gb_per_second"] * 1e9 / limits["read"]["bytes_per_second"]
        figure = f"{row['gb_per_second']:7.0f} GB/s"
    else:
        row["share_of_limit"] = row["tflop_per_second"] * 1e12 / limits["matmul"]["operations_per_second"]
        figure = f"{row['tflop_per_second']:7.0f} TFLOP/s"
    print(f"{text}{row['microseconds']:8.1f} us {figure}  {row['share_of_limit']:.1%} of the limit", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.attention", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--decode", type=layout(4), action="append", metavar="KEYS,WARPS,STAGES,PROGRAMS")
    parser.add_argument("--ring", type=layout(4, 5), action="append", metavar="KEYS,HEADS,STAGES,PROGRAMS[,REGISTERS]")
    parser.add_argument("--prefill", type=layout(4, 6), action="append", metavar="ROWS,KEYS,WARPS,STAGES[,1,REGISTERS]")
    parser.add_argument("--commit", help="the commit that is measured, where there is no git")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.kernels.attention measures a GPU, and this machine has none", file=sys.stderr)
        return 2
    import triton

    from benchmarks.kernels.ceilings import matmul_rate, read_bandwidth
    from nanovllm.kernels.attention.paged_decode import decode_config
    from nanovllm.kernels.attention.paged_prefill import prefill_config
    from nanovllm.kernels.hopper.ring_layout import ring_layout
    from nanovllm.kernels.hopper.warp_layout import KEYS, ROWS, STAGES
    from nanovllm.kernels.launch import gluon_kernel, is_hopper

    limits = {"read": read_bandwidth(), "matmul": matmul_rate()}
    print(f"read {limits['read']['bytes_per_second'] / 1e9:.0f} GB/s, ", end="")
    print(f"matmul {limits['matmul']['operations_per_second'] / 1e12:.0f} TFLOP/s", flush=True)
    rows: list[dict[str, Any]] = []
    decodes = decode_problems()
    ring = ring_layout(decodes[0].q, decodes[0].kvs[0], len(decodes[0].lengths))
    result = {
        "card": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "commit": harness.commit(told=arguments.commit),
        "layouts_in_use": {
            "decode": astuple(decode_config(HEAD_DIM, 2)),
            "ring decode": None if ring is None else astuple(ring),
            "prefill": astuple(prefill_config(HEAD_DIM, 2, 256, is_hopper(torch.device("cuda", 0)))),
            "warp prefill": (ROWS, KEYS, STAGES) if gluon_kernel("warp_prefill", torch.device("cuda", 0)) else None,
        },
        "limits": limits,
        "rows": rows,
    }

    def record(row: dict[str, Any]) -> None:
        show(row, limits)
        rows.append(row)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(
            json.dumps(result, indent=1) + "\n"
        )  # after each row: a run that is cut short keeps its rows

    chosen = arguments.decode or arguments.ring or arguments.prefill
    for kind, problems, layouts in (
        ("decode", decodes, arguments.decode if chosen else DECODE_LAYOUTS),
        ("ring decode", decodes, arguments.ring if chosen else RING_LAYOUTS),
        ("prefill", prefill_problems(), arguments.prefill if chosen else PREFILL_LAYOUTS),
    ):
        for problem in problems if kind != "ring decode" else ():
            record(by_backend("triton", problem))
            if kind == "prefill":
                record(by_backend("flash_attn", problem))
        shown = [problems[0], problems[-1] if kind == "prefill" else problems[2]]
        for each, problem in product(layouts or [], shown):
            record(by_layout(kind, each, problem))
    return 0


def table(card: str, directory: Path) -> list[str]:
    """A row for each problem: our kernels and flash-attn, beside what the card can do."""
    results = tables.find(("kernels",), card, directory)
    if not results:
        return []
    result = results["kernels"]
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}  # by problem and size of a block, then by kernel
    for row in result["rows"]:
        if row["kernel"] in NAMES and "microseconds" in row:
            found.setdefault((row["problem"], row["block_size"]), {})[row["kernel"]] = row
    columns = [f"{name} {of}" for name in NAMES.values() for of in ("(us)", "of the limit")]
    lines = tables.head("attention of a layer", "blocks of", *columns)
    for (problem, block_size), rows in found.items():
        cells = [text for kernel in NAMES for text in cells_of(rows.get(kernel))]
        lines.append(tables.row(problem, str(block_size), *cells))
    limits, versions = result["limits"], ", ".join(f"{n} {result['versions'][n]}" for n in ("torch", "triton"))
    read, multiplied = limits["read"]["bytes_per_second"] / 1e9, limits["matmul"]["operations_per_second"] / 1e12
    return [
        *lines,
        "",
        f"16 query heads, 8 KV heads, head_dim 128, bf16. The limit is {read:,.0f} GB/s for decodes and "
        f"{multiplied:.0f} TFLOP/s for the others. Measured on {result['card']}, {versions}; commit "
        f"{tables.commit(result)}.",
    ]


def cells_of(row: dict[str, Any] | None) -> tuple[str, str]:
    if row is None:
        return "–", "–"
    decodes = row["problem"].startswith("decode")
    rate = f"{row['gb_per_second']:,.0f} GB/s" if decodes else f"{row['tflop_per_second']:.0f} TFLOP/s"
    return f"{row['microseconds']:.1f}", f"{rate}, {100 * row['share_of_limit']:.0f}%"


if __name__ == "__main__":
    sys.exit(main())
