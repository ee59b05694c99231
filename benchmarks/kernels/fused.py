"""The kernels of a decode step other than attention: time and GB/s of each, beside PyTorch doing the same.

    python -m benchmarks.kernels.fused --out fused.json [--tokens 1 --tokens 32]

Shape: a layer of Qwen3-0.6B, bf16. The calls follow each other in a CUDA graph: what a kernel hides behind the one
before it is hidden here, too. The linear layers have `benchmarks/kernels/linears.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 1024, 16, 8, 128, 3072, 151936
LAYERS = 28
TOKENS = (1, 8, 16, 32, 64, 256)
Call = Callable[[], object]


def randn(*shape: int, device: str = "cuda") -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def between(n: int) -> Iterator[tuple[str, int, Call, Call]]:
    """What lies between the matrix products of n tokens: name, bytes to read and write, our call, PyTorch's."""
    from nanovllm.kernels.attention.kv_write import kv_write_reference
    from nanovllm.kernels.fused.add_rms_norm import add_rms_norm
    from nanovllm.kernels.fused.norm_rope_write import norm_rope_write
    from nanovllm.kernels.fused.sample import sample_rows
    from nanovllm.kernels.fused.silu_and_mul import silu_and_mul
    from nanovllm.layers.norm import rms_norm
    from nanovllm.layers.rope import RotaryEmbedding, apply_rope
    from nanovllm.sampling.sampler import sample_plain
    from nanovllm.sampling.state import SamplingMetadata

    x, residual, weight = randn(n, HIDDEN), randn(n, HIDDEN), randn(HIDDEN)
    yield (
        "add + RMSNorm",
        8 * n * HIDDEN,
        lambda: add_rms_norm(x, residual, weight, 1e-6),
        lambda: rms_norm(x + residual, weight, 1e-6),
    )
    gate_up = randn(n, 2 * INTERMEDIATE)
    yield (
        "SiLU and multiply",
        6 * n * INTERMEDIATE,
        lambda: silu_and_mul(gate_up),
        lambda: F.silu(gate_up[:, :INTERMEDIATE]) * gate_up[:, INTERMEDIATE:],
    )
    qkv, q_norm, k_norm = randn(n, HEADS + 2 * KV_HEADS, HEAD_DIM), randn(HEAD_DIM), randn(HEAD_DIM)
    kv = randn(2, n + 1, 256, KV_HEADS, HEAD_DIM)
    rotary = RotaryEmbedding(HEAD_DIM, 1e6, None, 4096).to("cuda")
    positions = torch.arange(n, dtype=torch.int32, device="cuda")
    slots = positions.long() * 256

    def one_by_one() -> None:
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        cos, sin = rotary(positions)
        apply_rope(rms_norm(q, q_norm, 1e-6), cos, sin)
        kv_write_reference(kv, apply_rope(rms_norm(k, k_norm, 1e-6), cos, sin), v, slots)

    yield (
        "q/k-norm, RoPE, KV write",
        4 * n * (HEADS + 2 * KV_HEADS) * HEAD_DIM,
        lambda: norm_rope_write(qkv, kv, (q_norm, k_norm), rotary.table, positions, slots, 1e-6),
        one_by_one,
    )
    logits = randn(n, VOCAB)
    rows = torch.arange(n, dtype=torch.int32, device="cuda")
    temperature = torch.full((n,), 0.6, device="cuda")
    seeds = torch.arange(n, device="cuda")
    token_ids = torch.zeros(n, 4096, dtype=torch.int32, device="cuda")
    prompts = torch.zeros_like(rows)
    metadata = SamplingMetadata(temperature, seeds, rows)
    yield (
        "sampling",
        2 * n * VOCAB,
        lambda: sample_rows(logits, rows, rows, temperature, seeds, prompts, token_ids),
        lambda: sample_plain(logits, metadata),
    )


def show(row: dict[str, Any], bytes_per_second: float) -> None:
    text = f"{row['kernel']:<26} {row['tokens']:>4} tokens"
    row["gb_per_second"] = row["bytes"] / row["microseconds"] / 1e3
    row["share_of_limit"] = row["gb_per_second"] * 1e9 / bytes_per_second
    text += f"{row['microseconds']:8.2f} us {row['gb_per_second']:6.0f} GB/s {row['share_of_limit']:6.1%}"
    print(f"{text}   PyTorch {row['torch_microseconds']:8.2f} us", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.fused", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--tokens", type=int, action="append", help=f"batch sizes (default {TOKENS})")
    parser.add_argument("--commit", help="the commit that is measured, where there is no git")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.kernels.fused measures a GPU, and this machine has none", file=sys.stderr)
        return 2
    from benchmarks.kernels.ceilings import graph_microseconds, read_bandwidth
    from benchmarks.lib.harness import commit
    from benchmarks.lib.worker import facts

    tokens = tuple(options.tokens or TOKENS)
    limit = read_bandwidth()["bytes_per_second"]
    rows: list[dict[str, Any]] = []
    tested = {"hash": options.commit, "modified": False} if options.commit else commit()
    result = {"machine": facts("cuda"), "commit": tested, "bytes_per_second": limit, "rows": rows}

    def record(row: dict[str, Any]) -> None:
        show(row, limit)
        rows.append(row)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")  # a cut run keeps its rows

    with torch.inference_mode():
        for n in tokens:
            for name, size, ours, theirs in between(n):
                times = {
                    "microseconds": graph_microseconds(ours, LAYERS),
                    "torch_microseconds": graph_microseconds(theirs, LAYERS),
                }
                record({"kernel": name, "tokens": n, "bytes": size, **times})
    return 0


if __name__ == "__main__":
    sys.exit(main())
