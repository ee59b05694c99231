"""The linear layers of a decode step: microseconds of our kernels and of the library's, for few tokens.

    python -m benchmarks.kernels.linears --out linears.json [--shape 0.6B --shape 8B] [--tokens 1 --tokens 32]

bf16. Every call gets other weights, as layers do, so that none come from a cache. The calls follow each other in a CUDA
graph: what a kernel hides behind the one before it is hidden here, too. The library's product has the gate behind it;
the layers whose result may come in parts (o and down) have the norm behind them that sums these.

"chosen" is what the engine takes (`nanovllm/kernels/linear/choice.py`, whose borders come from here), "any GPU"
what it takes where `weight_prefetch_linear` does not run, and beside them are the plausible layouts of that one.
Commit a1442d1 has a sweep over all layouts of all kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial as bind
from itertools import cycle
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import parse, record
from benchmarks.lib import tables
from benchmarks.lib.harness import make_parser
from benchmarks.lib.process import facts
from benchmarks.lib.tables import Result

if TYPE_CHECKING:
    from nanovllm.kernels.hopper.weight_prefetch_linear import PrefetchTile

# hidden, q heads, KV heads, intermediate, of a rank; head_dim is 128
SHAPES = {
    "0.6B": (1024, 16, 8, 3072),
    "8B": (4096, 32, 8, 12288),
    "8B on 2 ranks": (4096, 16, 4, 6144),
    "8B on 4 ranks": (4096, 8, 2, 3072),
}
TOKENS = (1, 8, 16, 32, 48, 64, 96, 128, 192, 256)
SHOWN_TOKENS = (1, 16, 32, 64, 128, 256)  # in the table
EARLY_TOKENS = {16: (16,), 32: (32,), 64: (32, 64), 256: (64, 128)}  # up to so many: the most of a program to try
AT_LEAST = 400e6  # bytes of weights, all layers together: several times what a cache holds
Run = Callable[[Tensor, Tensor], Tensor]


def layers_of(hidden: int, heads: int, kv_heads: int, inner: int) -> list[tuple[str, int, int, dict[str, Any]]]:
    """Name, inputs, outputs of the weight, and what the engine asks of the kernel."""
    return [
        ("qkv_proj", hidden, (heads + 2 * kv_heads) * 128, {}),
        ("o_proj", heads * 128, hidden, {"partial": True}),
        ("gate_up_proj", hidden, 2 * inner, {"gated": True}),
        ("down_proj", inner, hidden, {"partial": True}),
    ]


def candidates(num_tokens: int, weight: Tensor, how: dict[str, Any]) -> Iterator[tuple[str, Run]]:
    """Name of a layout, and what runs it."""
    from nanovllm.kernels.fused.silu_and_mul import silu_and_mul
    from nanovllm.kernels.linear.choice import choose_linear, choose_on_any_gpu, hopper_linear

    yield "library", (lambda x, w: silu_and_mul(F.linear(x, w))) if how.get("gated") else F.linear
    if (chosen := choose_linear(num_tokens, weight, **how)) is not None:
        yield "chosen", chosen
    if (before := choose_on_any_gpu(num_tokens, weight, **how)) is not None:
        yield "any GPU", before
    if (hopper := hopper_linear(weight.device)) is not None:
        for tile in prefetch_tiles(num_tokens, weight, **how):
            if tile != getattr(chosen, "keywords", {}).get("tile"):  # else it is measured by now
                name = f"early {tile.tokens} x {tile.inner} / {tile.splits}, {tile.stages} stages"
                yield name, bind(hopper.weight_prefetch_linear, tile=tile, **how)


def prefetch_tiles(num_tokens: int, weight: Tensor, gated: bool = False, partial: bool = False) -> list[PrefetchTile]:
    """The plausible layouts for Hopper: by the most tokens of a program, and with half as many parts."""
    from nanovllm.kernels.hopper.weight_prefetch_linear import choose_tile

    columns, inputs = weight.shape[0] // 2 if gated else weight.shape[0], weight.shape[1]
    tiles = []
    for most in next(sizes for limit, sizes in EARLY_TOKENS.items() if num_tokens <= limit):
        tile = choose_tile(num_tokens, columns, inputs, most, gated, partial)
        tiles.append(tile)
        if tile.splits > 1 and num_tokens > 64:
            deep = 196608 // (2 * tile.inner * (64 + tile.tokens))  # stages, of a program that has a multiprocessor
            tiles.append(tile._replace(splits=tile.splits // 2, stages=min(6, deep)))
    return list(dict.fromkeys(tiles))


def with_norm(run: Run, x: Tensor, outputs: int) -> Run:
    """Followed by the norm that sums the parts of the result, if it comes in parts."""
    from nanovllm.kernels.fused.add_rms_norm import add_rms_norm

    residual, weight = x.new_zeros(x.shape[0], outputs), x.new_ones(outputs)
    return lambda x, w: add_rms_norm(run(x, w), residual, weight, 1e-6)[0]


def measure(shapes: list[str], tokens: list[int]) -> Iterator[dict[str, Any]]:
    from benchmarks.kernels.ceilings import graph_microseconds

    for shape in shapes:
        for name, inputs, outputs, how in layers_of(*SHAPES[shape]):
            count = max(2, int(AT_LEAST / (2 * inputs * outputs)))
            weights = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda") / 32 for _ in range(count)]
            for n in tokens:
                x, layers = torch.randn(n, inputs, dtype=torch.bfloat16, device="cuda"), cycle(weights)
                for layout, run in candidates(n, weights[0], how):
                    row = {"shape": shape, "layer": name, "tokens": n, "layout": layout, "bytes": 2 * inputs * outputs}
                    call = with_norm(run, x, outputs) if how.get("partial") else run
                    try:
                        row["microseconds"] = graph_microseconds(lambda: call(x, next(layers)), count)  # noqa: B023
                    except Exception as error:  # Triton raises its own for what does not fit into shared memory
                        row["error"] = str(error)[:200]
                    yield row


def say(row: dict[str, Any]) -> str:
    said = row.get("error")
    if said is None:
        said = f"{row['microseconds']:8.2f} us {row['bytes'] / row['microseconds'] / 1e3:6.0f} GB/s"
    return f"{row['shape']:<14} {row['layer']:<13} {row['tokens']:>4} tokens  {row['layout']:<32} {said}"


def main() -> None:
    parser = make_parser("kernels.linears", __doc__)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="(default: all)")
    parser.add_argument("--tokens", type=int, action="append", help=f"batch sizes (default {TOKENS})")
    options = parse(parser)
    with torch.inference_mode():
        rows = measure(options.shape or list(SHAPES), options.tokens or list(TOKENS))
        record(rows, {"machine": facts("cuda")}, options, say)


def table(results: dict[str, Result]) -> list[str]:
    """A row for each layer, a column for some numbers of tokens. "–": no kernel for any GPU was asked."""
    result = results["linears"]
    times: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for row in result["rows"]:
        if "microseconds" in row:
            by_tokens = times.setdefault((row["shape"], row["layer"]), {})
            by_tokens.setdefault(row["tokens"], {})[row["layout"]] = row["microseconds"]
    lines = tables.head("layer, by tokens", *map(str, SHOWN_TOKENS))
    for (shape, layer), by_tokens in times.items():
        cells = [cell(by_tokens[n]) if n in by_tokens else "–" for n in SHOWN_TOKENS]
        lines.append(tables.row(f"{shape}: `{layer}`", *cells))
    where = f"{result['machine']['device']}, {tables.versions(result, 'torch')}; commit {tables.commit(result)}"
    told = (
        "Microseconds: the library / ours for any GPU / the best of what was then chosen and of the kernel for Hopper"
    )
    return [*lines, "", f"{told}; sums of parts included. Measured on {where}."]


def cell(by_layout: dict[str, float]) -> str:
    of_any = by_layout.get("any GPU")
    best = min(time for layout, time in by_layout.items() if layout.startswith("early ") or layout == "chosen")
    shown = [by_layout["library"], None if of_any == by_layout["library"] else of_any, best]
    return " / ".join("–" if time is None else f"{time:.1f}" for time in shown)


if __name__ == "__main__":
    main()
