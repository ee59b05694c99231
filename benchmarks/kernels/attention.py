"""Attention against what the GPU can do: GB/s of KV read in decode, TFLOP/s in prefill, as shares of the limits.

    python -m benchmarks.kernels.attention --out DIR

Shape: 16 query heads, 8 KV heads, head_dim 128, bf16. Our kernels as the engine chooses them, and flash-attn's prefill
where it is installed. Commit a1442d1 has a sweep over the layouts of each kernel, with its figures.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import Any

import torch

from benchmarks.kernels import record
from benchmarks.lib import tables
from benchmarks.lib.tables import Result

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128
RECORD = "kernels"
SCALE = HEAD_DIM**-0.5
L2_FLUSH = 256 * 2**20  # bytes of KV between two readings of the same: more than any cache holds
NAMES = {"triton": "ours", "flash_attn": "flash-attn"}  # of the backends, in the table


@dataclass
class Problem:
    """Sequences of (query_len, context_len) over shuffled blocks, and as many layers' caches as defeat the L2 cache."""

    name: str
    lengths: list[tuple[int, int]]
    block_size: int
    head_dim: int = HEAD_DIM
    dtype: torch.dtype = torch.bfloat16

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
        self.q = torch.randn(sum(query_lens), NUM_HEADS, self.head_dim, dtype=self.dtype, device="cuda")
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
        shape = layers, 2, sum(needed) + 1, self.block_size, NUM_KV_HEADS, self.head_dim
        self.kvs = torch.randn(shape, dtype=self.dtype, device="cuda")

    @property
    def kv_bytes(self) -> int:
        return sum(context for _, context in self.lengths) * 2 * NUM_KV_HEADS * self.head_dim * 2

    @property
    def operations(self) -> int:
        """Multiplications and additions of q K^T and p V over the pairs that the causal mask leaves."""
        pairs = sum(n * context - n * (n - 1) // 2 for n, context in self.lengths)
        return 4 * pairs * NUM_HEADS * self.head_dim

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


def decode_problems(dtype: torch.dtype = torch.bfloat16) -> list[Problem]:
    rng = random.Random(0)
    contexts = [rng.randint(100, 1600) for _ in range(256)]  # mean 850
    problems = [Problem(f"decode {n}", [(1, c) for c in contexts[:n]], 256, dtype=dtype) for n in (256, 64, 32, 8, 1)]
    problems += [
        Problem(f"decode {n}, all at {c}", [(1, c)] * n, 256, dtype=dtype)
        for n, c in ((256, 700), (256, 768), (32, 384))
    ]
    return [*problems, Problem("decode 256", [(1, c) for c in contexts], 16, dtype=dtype)]


def prefill_problems(dtype: torch.dtype = torch.bfloat16, head_dim: int = HEAD_DIM) -> list[Problem]:
    rng = random.Random(0)
    prompts = [(n, n) for n in (rng.randint(100, 1024) for _ in range(29))]
    chunks = [(1024, 1536)] * 16
    sizes = (
        ("chunks of 1024 at 1536", chunks, 256),
        ("chunks of 1024 at 1536", chunks, 16),
        ("whole prompts", prompts, 256),
    )
    return [Problem(*size, head_dim, dtype) for size in sizes]


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


def rows(limits: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each problem by each kernel, with its share of what the GPU can do."""
    decodes = [("triton", problem) for problem in decode_problems()]
    for kernel, problem in [*decodes, *((kernel, p) for p in prefill_problems() for kernel in NAMES)]:
        row = by_backend(kernel, problem)
        if "error" not in row and row["problem"].startswith("decode"):
            row["share_of_limit"] = row["gb_per_second"] * 1e9 / limits["read"]["bytes_per_second"]
        elif "error" not in row:
            row["share_of_limit"] = row["tflop_per_second"] * 1e12 / limits["matmul"]["operations_per_second"]
        yield row


def say(row: dict[str, Any]) -> str:
    text = f"{row['kernel']:<12} {row['problem']:<24} block {row['block_size']:>3}  "
    return text + (row["error"] if "error" in row else "{} us {} of the limit".format(*cells_of(row)))


def measure() -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    import triton

    from benchmarks.kernels.ceilings import matmul_rate, read_bandwidth

    limits = {"read": {"bytes_per_second": read_bandwidth()}, "matmul": {"operations_per_second": matmul_rate()}}
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    return {"card": torch.cuda.get_device_name(), "versions": versions, "limits": limits}, rows(limits)


def table(results: dict[str, Result]) -> list[str]:
    """A row for each problem: our kernels and flash-attn, beside what the card can do."""
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
    record("attention", __doc__, RECORD, measure, say)
