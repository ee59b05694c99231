"""An experiment: what explicit warp specialisation would gain in prefill attention.

    python -m benchmarks.prefill_gluon --out prefill_gluon.json [--variant NAME ...]

One warp orders keys by TMA, and two groups of four compute. Each group has 64 of a program's 128 rows. It multiplies
with the next keys and the last values while it takes the exponentials between (as FlashAttention-3 does), which
Triton's own pipelining does not do: there every product is waited for before the softmax. So this one is written in
Gluon, where waiting is explicit. Of one tile of keys both groups read the same copy. The tiles are walked from the last
one down, so that the masked ones come first. "In turns": one group's products are issued while the other takes
exponentials. "Resident": as many programs as multiprocessors, so that the keys of the next tile of queries are on their
way while the last one's result is written.

Prediction for an H200, chunks of 1024 queries at 1536 keys: 420 to 480 TFLOP/s with a program for every tile, because
one begins when its predecessor has ended; 470 to 540 resident; turns add 0 to 5%.
Measured (docs/kernels.md): as predicted with a program for every tile, but resident ones are slower than that, except
for whole prompts, and turns add nothing. No layout is the best of both.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from benchmarks.prefill_gluon_kernel import prefill_kernel
from nanovllm.attention.interface import AttentionMetadata
from nanovllm.kernels.launch import is_hopper
from nanovllm.kernels.paged_prefill import paged_prefill, prefill_config
from nanovllm.kernels.paged_tile import LOG2_E, padded_sequences

ROUNDS = 3
WRONG = 5e-3  # relative error


@dataclass(frozen=True)
class Variant:
    """The engine's kernel, by TMA where it does that, or by pointers everywhere."""

    name: str
    pointers: bool = False

    def attend(self, q: Tensor, kv: Tensor, meta: AttentionMetadata, scale: float, out: Tensor) -> None:
        _, _, block_size, _, head_dim = kv.shape
        config = prefill_config(head_dim, q.element_size(), block_size, is_hopper(q.device) and not self.pointers)
        paged_prefill(q, kv, meta.block_table, meta.query_start, meta.context_len, scale, out, config)

    def fits(self, block_size: int) -> bool:
        return True


@dataclass(frozen=True)
class Specialized(Variant):
    """keys: of a tile; stages: copies of K and of V in shared memory; resident: one program a multiprocessor, which
    does many tiles."""

    keys: int = 128
    stages: int = 2
    turns: bool = False
    resident: bool = False

    def attend(self, q: Tensor, kv: Tensor, meta: AttentionMetadata, scale: float, out: Tensor) -> None:
        _, num_blocks, block_size, num_kv_heads, head_dim = kv.shape
        num_sequences = meta.context_len.shape[0]
        group = q.shape[1] // num_kv_heads
        rows = 64  # of each of the two groups of warps
        programs = num_kv_heads * (q.shape[0] // (2 * rows // group) + num_sequences)
        if self.resident:
            programs = min(programs, torch.cuda.get_device_properties(q.device).multi_processor_count)
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        keys = TensorDescriptor.from_tensor(kv.view(-1, num_kv_heads * head_dim), [self.keys, head_dim], layout)
        prefill_kernel[(programs,)](
            q, keys, out, meta.block_table, meta.query_start, meta.context_len,
            num_sequences, scale * LOG2_E, q.stride(0), num_blocks * block_size, meta.block_table.stride(0),
            HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, ROWS=rows,
            KEYS=self.keys, STAGES=self.stages, SEQUENCES=padded_sequences(num_sequences), TURNS=self.turns,
            num_warps=4,
        )  # fmt: skip

    def fits(self, block_size: int) -> bool:
        return block_size >= self.keys


VARIANTS = [
    Variant("by pointers", pointers=True),
    Variant("engine"),
    Specialized("128 keys"),
    Specialized("128 keys, in turns", turns=True),
    Specialized("128 keys, resident", resident=True),
    Specialized("128 keys, in turns, resident", turns=True, resident=True),
    Specialized("64 keys, resident", keys=64, stages=4, resident=True),
    Specialized("64 keys, in turns, resident", keys=64, stages=4, turns=True, resident=True),
]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def brief(exception: Exception) -> str:
    return f"{type(exception).__name__}: {str(exception).strip()}".split("\n")[0][:100]


def attempt(variant: Variant, problem: Any, scale: float, expected: Tensor) -> Callable[[Tensor], Tensor] | str:
    """What to measure, or why it cannot be."""
    out = torch.full_like(problem.q, float("nan"))

    def attend(kv: Tensor) -> Tensor:
        variant.attend(problem.q, kv, problem.meta, scale, out)
        return out

    try:
        error = relative_error(attend(problem.kvs[0]), expected)
    except Exception as exception:  # whatever a compiler thinks up
        return brief(exception)
    print(f"  {variant.name:<30} relative error {error:.1e}", flush=True)
    return attend if error < WRONG else f"WRONG: relative error {error:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefill_gluon", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--variant", action="append", choices=[v.name for v in VARIANTS], help="only these")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.prefill_gluon measures a GPU, and this machine has none", file=sys.stderr)
        return 2
    from benchmarks.harness import commit
    from benchmarks.kernels import SCALE, prefill_problems

    chosen = [v for v in VARIANTS if v is VARIANTS[0] or not arguments.variant or v.name in arguments.variant]
    rows: list[dict[str, Any]] = []
    result = {
        "card": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "commit": commit(),
        "rows": rows,
    }
    for problem in prefill_problems():
        print(f"{problem.name}, block {problem.block_size}", flush=True)
        expected = torch.empty_like(problem.q)
        VARIANTS[0].attend(problem.q, problem.kvs[0], problem.meta, SCALE, expected)
        started = time.perf_counter()
        tried = {v: attempt(v, problem, SCALE, expected) for v in chosen if v.fits(problem.block_size)}
        print(f"  compiled and compared in {time.perf_counter() - started:.1f} s", flush=True)
        rates: dict[str, list[float]] = {v.name: [] for v in tried}
        for _ in range(ROUNDS):
            for variant, attend in list(tried.items()):
                if isinstance(attend, str):
                    continue
                try:
                    rates[variant.name].append(problem.measure(attend)["tflop_per_second"])
                except Exception as exception:
                    tried[variant] = brief(exception)
        for variant, attend in tried.items():
            text = attend if isinstance(attend, str) else " ".join(f"{r:6.0f}" for r in rates[variant.name])
            print(f"  {variant.name:<30} {text}{'' if isinstance(attend, str) else ' TFLOP/s'}", flush=True)
            row = {"variant": variant.name, "problem": problem.name, "block_size": problem.block_size}
            rows.append(
                row | ({"error": attend} if isinstance(attend, str) else {"tflop_per_second": rates[variant.name]})
            )
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")  # a run that is cut short keeps its rows
    return 0


if __name__ == "__main__":
    sys.exit(main())
