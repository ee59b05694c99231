"""The linear layers of a decode step: microseconds of our kernels and of the library's, for few tokens.

    python -m benchmarks.kernels.linears --out DIR

bf16. Every call gets other weights, as layers do, so that none come from a cache. The calls follow each other in a CUDA
graph: what a kernel hides behind the one before it is hidden here, too. The library's product has the gate behind it;
the layers whose result may come in parts (o and down) have the norm behind them that sums these.

"chosen" is what the engine takes (`nanovllm/kernels/cards.toml`, whose borders come from here), "any GPU"
what it takes where `weight_prefetch_linear` does not run. Commit a1442d1 has a sweep over all layouts of all kernels,
and commit 8b981e4 one over those of `weight_prefetch_linear` that are plausible.
"""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import record
from benchmarks.lib import tables
from benchmarks.lib.process import facts
from benchmarks.lib.tables import Result

# hidden, q heads, KV heads, intermediate, of a rank; head_dim is 128
SHAPES = {
    "0.6B": (1024, 16, 8, 3072),
    "8B": (4096, 32, 8, 12288),
    "8B on 2 ranks": (4096, 16, 4, 6144),
    "8B on 4 ranks": (4096, 8, 2, 3072),
}
TOKENS = (1, 8, 16, 32, 48, 64, 96, 128, 192, 256)
SHOWN_TOKENS = (1, 16, 32, 64, 128, 256)  # in the table
RECORD = "linears"
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
    from nanovllm.kernels.linear.choice import choose_linear, choose_on_any_gpu

    yield "library", library(how)
    if (chosen := choose_linear(num_tokens, weight, **how)) is not None:
        yield "chosen", chosen
    if (before := choose_on_any_gpu(num_tokens, weight, **how)) is not None:
        yield "any GPU", before


def library(how: dict[str, Any]) -> Run:
    """The library's product, with the gate behind it if there is one."""
    from nanovllm.kernels.fused.silu_and_mul import silu_and_mul

    return (lambda x, w: silu_and_mul(F.linear(x, w))) if how.get("gated") else F.linear


def with_norm(run: Run, x: Tensor, outputs: int) -> Run:
    """Followed by the norm that sums the parts of the result, if it comes in parts."""
    from nanovllm.kernels.fused.add_rms_norm import add_rms_norm

    residual, weight = x.new_zeros(x.shape[0], outputs), x.new_ones(outputs)
    return lambda x, w: add_rms_norm(run(x, w), residual, weight, 1e-6)[0]


def rows() -> Iterator[dict[str, Any]]:
    from benchmarks.kernels.ceilings import graph_microseconds

    for shape, numbers in SHAPES.items():
        for name, inputs, outputs, how in layers_of(*numbers):
            count = max(2, int(AT_LEAST / (2 * inputs * outputs)))
            weights = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda") / 32 for _ in range(count)]
            for n in TOKENS:
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
    # Earlier records have layouts of the kernel for Hopper that were not chosen: "early ...". None: the library's was.
    ours = (time for layout, time in by_layout.items() if layout.startswith("early ") or layout == "chosen")
    best = min(ours, default=None)
    shown = [by_layout["library"], None if of_any == by_layout["library"] else of_any, best]
    return " / ".join("–" if time is None else f"{time:.1f}" for time in shown)


if __name__ == "__main__":
    record("linears", __doc__, RECORD, lambda: ({"machine": facts("cuda")}, rows()), say)
