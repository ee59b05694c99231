"""What each part of the engine is worth: the headline workload and small batches with one thing at a time taken away.

    python -m benchmarks.engine.ablations --out DIR [--only eager --only sync] [--repeats 2] [--flash-path PATH]

Every variant runs in a process of its own, and all in one run, so that they can be compared. The first is the engine as
it is. `--flash-path` is where flash-attn can be imported from, if it is not installed.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from benchmarks.engine import latency, throughput
from benchmarks.engine.engine_harness import Comparison, add_options, check_options, ours, run_process
from benchmarks.engine.engine_worker import Engine, Repetition
from benchmarks.lib import roofline
from benchmarks.lib.harness import Contender, Figure, Showcase, metric
from nanovllm.kernels import FusedKernels

BASE = "as it is"


@dataclass(frozen=True)
class Variant:
    """Options other than the defaults, and what to change in the code of a process before the engine is made."""

    options: dict[str, Any] = field(default_factory=dict)
    patch: Callable[[], None] | None = None


def without_kernels(*names: str) -> Callable[[], None]:
    """A patch that has the engine do in PyTorch, one operation after the other, what these fused kernels do."""

    def patch() -> None:
        from nanovllm import kernels

        assert "nanovllm.runner.model_runner" not in sys.modules, "it has a reference to the function by now"
        everything = kernels.fused_kernels
        kernels.fused_kernels = cache(lambda device: everything(device)._replace(**dict.fromkeys(names)))

    return patch


def compiled() -> None:
    """A patch that has torch.compile make the kernels between the matrix products: norms, rotation, the MLP's gate."""
    import torch
    import torch.nn.functional as F

    without_kernels("add_rms_norm", "norm_rope_write", "silu_and_mul", "few_tokens")()
    from nanovllm.layers import norm, rope
    from nanovllm.models import transformer

    def gate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    norm.rms_norm = torch.compile(norm.rms_norm, dynamic=True)
    norm.add_rms_norm = torch.compile(norm.add_rms_norm, dynamic=True)
    rope.apply_rope = torch.compile(rope.apply_rope, dynamic=True)
    transformer.silu_and_mul = torch.compile(gate, dynamic=True)


# What is done in PyTorch instead when a fused kernel is taken away
FUSED = {
    "sample_rows": "sampling not fused",
    "add_rms_norm": "add + RMSNorm not fused",
    "norm_rope_write": "norm + RoPE + KV write not fused",
    "silu_and_mul": "SiLU and multiply not fused",
    "few_tokens": "linear layers for few tokens not fused",
    "decode_inputs": "look-up of inputs not fused",
}

VARIANTS: dict[str, Variant] = {
    BASE: Variant(),
    "no CUDA graphs": Variant({"enforce_eager": True}),
    "no asynchronous scheduling": Variant({"async_scheduling": False}),
    **{FUSED.get(k, f"without {k}"): Variant(patch=without_kernels(k)) for k in FusedKernels._fields},
    "none of these kernels": Variant(patch=without_kernels(*FusedKernels._fields)),
    "torch.compile in their place": Variant(patch=compiled),
    "no chunked prefill": Variant({"enable_chunked_prefill": False}),
    "no prefix cache": Variant({"enable_prefix_caching": False}),
    "blocks of 16": Variant({"kvcache_block_size": 16}),
    "flash_attn": Variant({"attention_backend": "flash_attn"}),
}


def measure(engine: Engine, repeats: int, sizes: dict[str, int], small: dict[str, Any]) -> list[Repetition]:
    """In the process of one variant: the headline workload, and small batches, where other things count."""
    large = throughput.measure(engine, repeats, sizes)
    few = latency.measure(engine, repeats, **small)
    return [{**one, **other} for one, other in zip(large, few, strict=True)]


def showcase(contenders: list[Contender], limit: dict[str, Any], batches: list[int]) -> Showcase:
    figures = [
        Figure("throughput", "throughput", "tokens/s", "higher", metric("headline", "tokens_per_second")),
        *(
            Figure(f"ms_{b}", f"time a token, batch {b}", "ms", "lower", metric(f"batch {b}", "ms_per_token"))
            for b in batches
        ),
    ]
    return Showcase(
        name="ablations",
        title="One thing at a time taken away",
        workload=f"{throughput.describe(limit)}; and batches of {' and '.join(map(str, batches))}, greedy",
        contenders=contenders,
        scenarios=[],
        figures=figures,
        headline="throughput",
        shown=tuple(figure.key for figure in figures),
        contender=contenders[0].name,
        rival=contenders[-1].name,
        notes=[roofline.describe(limit)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.ablations", description=(__doc__ or "").split("\n")[0]
    )
    add_options(parser, rounds=1)
    parser.add_argument("--repeats", type=int, default=2, help="times that a process runs the workload (default 2)")
    parser.add_argument("--only", action="append", choices=VARIANTS, help="this variant (and others so named) only")
    options = check_options(parser.parse_args())
    names = [name for name in VARIANTS if options.only is None or name in options.only]
    contenders = [ours(options, name, variant=name, **VARIANTS[name].options) for name in names]
    limit = roofline.in_a_process(options)
    small: dict[str, Any] = {"batches": [1, 32], "prompt_len": 128, "num_tokens": 128, "highest_id": 10_000}
    if options.quick:
        small = {"batches": [1, 2], "prompt_len": 8, "num_tokens": 4, "highest_id": 500}
    arguments = {"repeats": options.repeats, "sizes": limit["workload"], "small": small}
    comparison = Comparison(showcase(contenders, limit, small["batches"]), options, {"roofline": limit})
    comparison.run(lambda contender: run_process(contender, "benchmarks.engine.ablations", arguments, options))
    sys.exit(1 if comparison.failures else 0)


if __name__ == "__main__":
    main()
