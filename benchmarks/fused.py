"""The kernels of a decode step other than attention: time and GB/s of each, beside PyTorch doing the same.

    python -m benchmarks.fused --out fused.json [--tokens 1 --tokens 32] [--sweep]

Shape: a layer of Qwen3-0.6B, bf16. Every call gets other weights, as layers do, so that none come from a cache. The
calls follow each other in a CUDA graph: what a kernel hides behind the one before it is hidden here, too. `--sweep`
tries other layouts of the linear kernel, and more tokens than it is used for.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 1024, 16, 8, 128, 3072, 151936
LAYERS = 28
# name, inputs, outputs of the weight, how the engine calls it
LINEARS: list[tuple[str, int, int, dict[str, Any]]] = [
    ("qkv_proj", HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, {}),
    ("o_proj", HEADS * HEAD_DIM, HIDDEN, {"partial": True}),
    ("gate_up_proj", HIDDEN, 2 * INTERMEDIATE, {"gated": True}),
    ("down_proj", INTERMEDIATE, HIDDEN, {"partial": True}),
]
TOKENS = (1, 8, 16, 32, 64, 256)
LAYOUTS = [(columns, 4, inner) for columns in (16, 32) for inner in (256, 512, 1024)]

Call = Callable[[], object]


def randn(*shape: int, device: str = "cuda") -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def between(n: int) -> Iterator[tuple[str, int, Call, Call]]:
    """What lies between the matrix products of n tokens: name, bytes to read and write, our call, PyTorch's."""
    from nanovllm.kernels.add_rms_norm import add_rms_norm
    from nanovllm.kernels.kv_write import kv_write_reference
    from nanovllm.kernels.norm_rope_write import norm_rope_write
    from nanovllm.kernels.sample import sample_rows
    from nanovllm.kernels.silu_and_mul import silu_and_mul
    from nanovllm.layers.norm import rms_norm
    from nanovllm.layers.rope import RotaryEmbedding, apply_rope
    from nanovllm.runner.sampler import Draws, sample_plain

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
    draws = Draws(temperature, seeds, rows)
    yield (
        "sampling",
        2 * n * VOCAB,
        lambda: sample_rows(logits, rows, rows, temperature, seeds, prompts, token_ids),
        lambda: sample_plain(logits, draws),
    )


def linear_rows(tokens: tuple[int, ...], sweep: bool) -> Iterator[dict[str, Any]]:
    """Our kernel for few tokens beside the library's, for the four linear layers."""
    from benchmarks.ceilings import graph_microseconds
    from nanovllm.kernels.silu_and_mul import silu_and_mul
    from nanovllm.kernels.skinny_linear import MAX_TOKENS, SkinnyConfig, skinny_config, skinny_linear
    from nanovllm.layers.linear import MAX_FEW, MAX_FEW_NARROW

    for name, inputs, outputs, how in LINEARS:
        weights = [randn(outputs, inputs) / 32 for _ in range(LAYERS)]
        for n in tokens:
            x, layers = randn(n, inputs), cycle(weights)

            def library(x: Tensor = x, layers: Iterator[Tensor] = layers, gated: bool = "gated" in how) -> Tensor:
                y = F.linear(x, next(layers))
                return silu_and_mul(y) if gated else y  # as the engine does where it does not use our kernel

            row = {"kernel": name, "tokens": n, "bytes": 2 * (outputs * inputs + n * (inputs + outputs))}
            row["torch_microseconds"] = graph_microseconds(library, LAYERS)
            usual = skinny_config(outputs // (2 if how.get("gated") else 1), bool(how.get("gated")))
            used = n <= (MAX_FEW_NARROW if how.get("partial") else MAX_FEW)  # the partial ones are narrow
            layouts = [usual, *(SkinnyConfig(*layout) for layout in LAYOUTS)] if sweep and n <= 64 else [usual]
            for layout in layouts if used or (sweep and n <= 64) else []:

                def ours(
                    x: Tensor = x,
                    layers: Iterator[Tensor] = layers,
                    how: dict[str, Any] = how,
                    config: SkinnyConfig | None = None if layout is usual else layout,
                ) -> Tensor:
                    return skinny_linear(x, next(layers), config=config, **how)

                tried = {**row, "layout": [layout.columns, layout.num_warps, layout.max_inner], "used": used}
                if layout is usual and how.get("partial") and n > MAX_TOKENS:
                    tried["layout"] = []  # `split_linear`, which has one only
                try:
                    yield {**tried, "microseconds": graph_microseconds(ours, LAYERS)}
                except Exception as error:  # Triton raises its own for what does not fit into shared memory
                    yield {**tried, "error": str(error)[:200]}
            if not (used or sweep):
                yield row


def show(row: dict[str, Any], bytes_per_second: float) -> None:
    layout = ",".join(map(str, row.get("layout", ())))
    text = f"{row['kernel']:<26} {row['tokens']:>4} tokens  {layout:<12}"
    if "error" in row:
        print(f"{text} {row['error']}", flush=True)
        return
    if "microseconds" in row:
        row["gb_per_second"] = row["bytes"] / row["microseconds"] / 1e3
        row["share_of_limit"] = row["gb_per_second"] * 1e9 / bytes_per_second
        text += f"{row['microseconds']:8.2f} us {row['gb_per_second']:6.0f} GB/s {row['share_of_limit']:6.1%}"
    print(f"{text}   PyTorch {row['torch_microseconds']:8.2f} us", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fused", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--tokens", type=int, action="append", help=f"batch sizes (default {TOKENS})")
    parser.add_argument("--sweep", action="store_true", help="other layouts of the linear kernel")
    parser.add_argument("--commit", help="the commit that is measured, where there is no git")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.fused measures a GPU, and this machine has none", file=sys.stderr)
        return 2
    from benchmarks.ceilings import graph_microseconds, read_bandwidth
    from benchmarks.harness import commit
    from benchmarks.worker import facts

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
        for row in linear_rows(tokens, options.sweep):
            record(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
