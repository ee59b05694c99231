"""Linear layers for 17 to 256 tokens: a tiled kernel of ours beside the library's, alone and within a decode step.

    python -m benchmarks.medium_linear --out medium_linear.json

With so many tokens a linear layer of a small model still is little more than the reading of its weights, 2 to 4
microseconds on an H100, but the library's kernels take five to seven: they cannot begin before the kernel in front of
them has ended (see `nanovllm/kernels/launch.py`), and the gate is a kernel of its own. The tiled kernel asks for its
weights while its predecessor runs, folds the gate in, and leaves split sums to the norm that follows. Prediction: 10
microseconds of a layer, 0.3 ms of a step, if its inner loop is as good as the library's.

First every layout is timed by itself, one layer's weights after another; then the best of each shape together in
decode steps, alternating with the engine as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import overlaps_launches
from nanovllm.kernels.prefetch import prefetch

# name, inputs, outputs (of each half, if gated), gated, partial: a layer of Qwen3-0.6B
LINEARS = [
    ("qkv", 1024, 4096, False, False),
    ("o", 2048, 1024, False, True),
    ("gate and up", 1024, 3072, True, False),
    ("down", 3072, 1024, False, True),
]
LAYERS = 28
TOKENS = (32, 64, 128, 256)
STEPS = [(24, 384), (32, 384), (64, 850), (128, 850), (192, 850), (256, 850)]


@dataclass(frozen=True)
class Layout:
    tokens: int
    columns: int
    inner: int
    splits: int = 1  # of the inputs, among programs
    num_warps: int = 4
    num_stages: int = 4


WHOLE = [
    Layout(64, 32, 128, num_stages=3), Layout(64, 64, 64), Layout(64, 64, 128, num_stages=3), Layout(64, 128, 64),
    Layout(128, 32, 64), Layout(128, 64, 64), Layout(128, 64, 128, num_warps=8, num_stages=3),
    Layout(128, 128, 64, num_warps=8), Layout(32, 32, 128), Layout(32, 64, 128),
]  # fmt: skip
SPLIT = [
    Layout(64, 32, 128, 2), Layout(64, 32, 128, 4, num_stages=3), Layout(64, 64, 64, 4),
    Layout(64, 64, 128, 2, num_stages=3), Layout(128, 32, 64, 2), Layout(128, 32, 64, 4), Layout(128, 64, 64, 4),
    Layout(128, 64, 64, 8), Layout(128, 128, 64, 8, num_warps=8), Layout(32, 32, 128, 4), Layout(32, 32, 128, 2),
]  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def tiled_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, num_tokens,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    DEPTH: tl.constexpr, AHEAD: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    inner = tl.program_id(1) * DEPTH + tl.arange(0, INNER)
    is_token = (token < num_tokens)[:, None]
    x_ptr += token[:, None] * INPUTS + inner[None, :]
    row = column[:, None] * INPUTS
    if PDL:
        gdc_launch_dependents()
        line = tl.program_id(1) * DEPTH + tl.arange(0, AHEAD // 64) * 64
        prefetch(weight_ptr + row + line[None, :])
        if GATED:
            prefetch(weight_ptr + OUTPUTS * INPUTS + row + line[None, :])
        gdc_wait()
    weight_ptr += row + inner[None, :]
    acc = tl.zeros([TOKENS, COLUMNS], tl.float32)
    acc_up = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for start in range(0, DEPTH, INNER):
        x = tl.load(x_ptr + start, mask=is_token, other=0.0)
        w = tl.load(weight_ptr + start)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if GATED:
            up = tl.load(weight_ptr + OUTPUTS * INPUTS + start)
            acc_up = tl.dot(x, tl.trans(up), acc_up, input_precision="ieee")
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_up
    out_ptr += (tl.program_id(1) * num_tokens + token)[:, None] * OUTPUTS + column[None, :]
    tl.store(out_ptr, acc.to(out_ptr.dtype.element_ty), mask=is_token)


def tiled_linear(
    x: Tensor, weight: Tensor, layout: Layout, *, gated: bool = False, partial: bool = False, ahead: int = 1024
) -> Tensor:
    """x [T, in], weight [out, in] -> [T, out]; gated [T, out / 2]; partial [S, T, out] float32. As `skinny_linear`."""
    num_tokens, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    splits = layout.splits if partial else 1
    depth = inputs // splits
    shape = (splits, num_tokens, outputs) if partial else (num_tokens, outputs)
    out = x.new_empty(shape, dtype=torch.float32 if partial else x.dtype)
    pdl = overlaps_launches(x.device)
    tiled_linear_kernel[(outputs // layout.columns, splits, triton.cdiv(num_tokens, layout.tokens))](
        x, weight, out, num_tokens, INPUTS=inputs, OUTPUTS=outputs, TOKENS=layout.tokens, COLUMNS=layout.columns,
        INNER=layout.inner, DEPTH=depth, AHEAD=min(ahead, depth & -depth), GATED=gated, PDL=pdl,
        num_warps=layout.num_warps, num_stages=layout.num_stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def microseconds(call: Callable[[], object]) -> float:
    from benchmarks.ceilings import graph_microseconds

    return graph_microseconds(call, LAYERS)


def sweep(record: Callable[[dict[str, Any]], None]) -> dict[tuple[int, int, int], Layout]:
    """The best layout for each (inputs, rows of the weight, tokens), and a row for each that was tried."""
    from nanovllm.kernels.silu_and_mul import silu_and_mul

    best: dict[tuple[int, int, int], Layout] = {}
    for name, inputs, outputs, gated, partial in LINEARS:
        rows = outputs * (1 + gated)
        weights = [torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda") / 32 for _ in range(LAYERS)]
        for n in TOKENS:
            x, layers = torch.randn(n, inputs, dtype=torch.bfloat16, device="cuda"), cycle(weights)

            def library(x: Tensor = x, layers: Iterator[Tensor] = layers, gated: bool = gated) -> Tensor:
                y = F.linear(x, next(layers))
                return silu_and_mul(y) if gated else y

            expected = F.linear(x.float(), weights[0].float())
            if gated:
                expected = F.silu(expected[:, :outputs]) * expected[:, outputs:]
            theirs, fastest = microseconds(library), float("inf")
            for layout in SPLIT if partial else WHOLE:
                if layout.tokens > 2 * n:
                    continue
                row: dict[str, Any] = {
                    "kernel": name,
                    "tokens": n,
                    "layout": astuple(layout),
                    "library_microseconds": theirs,
                }

                def ours(
                    x: Tensor = x,
                    layers: Iterator[Tensor] = layers,
                    layout: Layout = layout,
                    gated: bool = gated,
                    partial: bool = partial,
                ) -> Tensor:
                    return tiled_linear(x, next(layers), layout, gated=gated, partial=partial)

                try:
                    found = tiled_linear(x, weights[0], layout, gated=gated, partial=partial).float()
                    error = float(((found.sum(0) if partial else found) - expected).norm() / expected.norm())
                    if not error < 1e-2:
                        raise ValueError(f"off by {error:.2%}")
                    row["microseconds"] = microseconds(ours)
                except Exception as problem:  # Triton raises its own for what does not fit into shared memory
                    record({**row, "error": str(problem)[:200]})
                    continue
                record(row)
                if row["microseconds"] < fastest:
                    best[inputs, rows, n], fastest = layout, row["microseconds"]
    return best


def choose(best: dict[tuple[int, int, int], Layout], usual: Callable[..., Any], least: int) -> Callable[..., Any]:
    def few_tokens_kernel(x: Tensor, weight: Tensor, partial: bool = False) -> Callable[..., Tensor] | None:
        outputs, inputs = weight.shape
        n = next((n for n in TOKENS if n >= x.shape[0]), None)
        if x.shape[0] <= least or n is None or (inputs, outputs, n) not in best:
            chosen: Callable[..., Tensor] | None = usual(x, weight, partial)
            return chosen

        def run(x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: bool) -> Tensor:
            return tiled_linear(x, weight, best[inputs, outputs, n], **how)

        return run

    return few_tokens_kernel


@contextmanager
def tiled(best: dict[tuple[int, int, int], Layout], least: int, _: list[Tensor]) -> Iterator[None]:
    from nanovllm.layers import linear
    from nanovllm.models import transformer

    usual = linear.few_tokens_kernel
    linear.few_tokens_kernel = transformer.few_tokens_kernel = choose(best, usual, least)
    try:
        yield
    finally:
        linear.few_tokens_kernel = transformer.few_tokens_kernel = usual


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.medium_linear", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--commit", help="the commit that is measured, where there is no git")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.medium_linear measures a GPU, and this machine has none", file=sys.stderr)
        return 2
    from functools import partial as bind

    from benchmarks import decode_step
    from benchmarks.harness import commit
    from benchmarks.worker import facts

    rows: list[dict[str, Any]] = []
    tested = {"hash": options.commit, "modified": False} if options.commit else commit()
    result: dict[str, Any] = {"machine": facts("cuda"), "commit": tested, "layouts": rows}

    def record(row: dict[str, Any]) -> None:
        rows.append(row)
        told = row.get("error") or f"{row['microseconds']:6.2f} us"
        theirs = f"library {row['library_microseconds']:.2f}"
        print(f"{row['kernel']:<12} {row['tokens']:>4} {row['layout']!s:<28} {told}, {theirs}", flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    with torch.inference_mode():
        best = sweep(record)
        for (inputs, outputs, n), layout in best.items():
            print("best", inputs, outputs, n, layout, flush=True)
        decode_step.VARIANTS["tiled linear"] = bind(tiled, best, 16)
        decode_step.VARIANTS["tiled linear from 33 tokens"] = bind(tiled, best, 32)
        names = [decode_step.BASE, "tiled linear", "tiled linear from 33 tokens"]
        result["steps"] = decode_step.measure(STEPS, [*names, *options_of_decode(decode_step)], 3)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def options_of_decode(decode_step: Any) -> list[str]:
    """Layouts of the decode kernel that were best by themselves."""
    from functools import partial as bind

    from nanovllm.kernels.paged_decode import DecodeConfig

    found = []
    for layout in ((64, 4, 7, 2), (32, 4, 5, 4), (32, 4, 7, 4), (64, 4, 5, 3)):
        name = f"decode {','.join(map(str, layout))}"
        decode_step.VARIANTS[name] = bind(decode_step.decode_layout, DecodeConfig(*layout))
        found.append(name)
    return found


if __name__ == "__main__":
    sys.exit(main())
