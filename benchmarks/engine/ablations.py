"""What each part of the engine is worth: one part is switched off at a time, and the engine is measured without it.

    python -m benchmarks.engine.ablations --out DIR [--only NAME --only ...] [--repeats 2] [--flash-path PATH]

Every variant runs in a fresh process; the first is the engine as it is. After every process the result is written. If
the file in --out has other variants of the same commit, card and workload, they stay in it: so the variants can be
measured in several runs. `--flash-path` is where flash-attn can be imported from, if it is not installed.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import zip_longest
from typing import Any

from benchmarks.engine import check_options, latency, make_parser, ours, throughput
from benchmarks.lib import harness, roofline, tables
from benchmarks.lib.harness import Contender, Figure, Measured, Showcase, by_batch, lower, metric
from benchmarks.lib.process import Engine, random_prompts
from benchmarks.lib.tables import Result
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

        for module in ("nanovllm.runner.batch", "nanovllm.sampling.sampler"):
            assert module not in sys.modules, f"{module} has a reference to the function by now"
        everything = kernels.fused_kernels
        kernels.fused_kernels = cache(lambda device: everything(device)._replace(**dict.fromkeys(names)))

    return patch


def compiled() -> None:
    """A patch that has torch.compile make the kernels between the matrix products: norms, rotation, the MLP's gate."""
    import torch
    import torch.nn.functional as F

    without_kernels("add_rms_norm", "norm_rope_write", "silu_and_mul", "choose_linear")()
    from nanovllm.layers import linear, norm, rope

    def gate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    norm.rms_norm = torch.compile(norm.rms_norm, dynamic=True)
    norm.add_rms_norm = torch.compile(norm.add_rms_norm, dynamic=True)
    rope.apply_rope = torch.compile(rope.apply_rope, dynamic=True)
    linear.silu_and_mul = torch.compile(gate, dynamic=True)


def replaced(module: str, name: str, value: Any) -> Callable[[], None]:
    """A patch that puts `value` in the place of what `module` calls `name`."""

    def patch() -> None:
        found = import_module(f"nanovllm.{module}")
        assert hasattr(found, name), f"nanovllm.{module} has no {name} any more"
        setattr(found, name, value)

    return patch


def without_attention_of_hopper(*names: str) -> Callable[[], None]:
    """A patch: the kernels for any GPU compute what these kernels in `kernels/hopper/` are chosen for."""

    def patch() -> None:
        backend: Any = import_module("nanovllm.attention.triton_backend")
        assert set(names) <= set(backend.HopperKernels._fields)
        everything = backend.hopper_kernels
        backend.hopper_kernels = cache(lambda device: everything(device)._replace(**dict.fromkeys(names)))

    return patch


def tiled_for_skinny() -> None:
    """A patch: `tiled_linear` computes what `skinny_linear` is chosen for."""
    choice: Any = import_module("nanovllm.kernels.linear.choice")
    assert hasattr(choice, "skinny_linear")
    for rows in choice.ON_ANY_GPU.values():
        rows[:] = [row for row in rows if row.kernel is not choice.skinny_linear]


def both(*patches: Callable[[], None]) -> Callable[[], None]:
    def patch() -> None:
        for each in patches:
            each()

    return patch


# Hopper's kernels, each replaced by what other GPUs take
NO_RING = without_attention_of_hopper("ring_decode")
NO_WARP = without_attention_of_hopper("warp_specialized_prefill")
NO_EARLY = replaced("kernels.linear.choice", "hopper_linear", lambda device: None)
NO_CHUNKS = replaced("graphs.sizes", "prompt_sizes", lambda *_: [])

# What is done in PyTorch instead when a fused kernel is taken away
FUSED = {
    "sample_rows": "sampling not fused",
    "add_rms_norm": "add + RMSNorm not fused",
    "norm_rope_write": "norm + RoPE + KV write not fused",
    "silu_and_mul": "SiLU and multiply not fused",
    "choose_linear": "linear layers for few tokens not fused",
    "decode_inputs": "look-up of inputs not fused",
}

VARIANTS: dict[str, Variant] = {
    BASE: Variant(),
    "no CUDA graphs": Variant({"enforce_eager": True}),
    "no asynchronous scheduling": Variant({"async_scheduling": False}),
    **{FUSED.get(k, f"without {k}"): Variant(patch=without_kernels(k)) for k in FusedKernels._fields},
    "none of these kernels": Variant(patch=without_kernels(*FusedKernels._fields)),
    "torch.compile in their place": Variant(patch=compiled),
    "paged_decode in place of ring_decode": Variant(patch=NO_RING),
    "paged_prefill in place of warp_prefill": Variant(patch=NO_WARP),
    "no early_linear": Variant(patch=NO_EARLY),
    "no kernels of Hopper's own": Variant(patch=both(NO_RING, NO_WARP, NO_EARLY)),
    "tiled_linear in place of skinny_linear": Variant(patch=tiled_for_skinny),
    "steps with prompts not recorded": Variant(patch=NO_CHUNKS),
    "no chunked prefill": Variant({"enable_chunked_prefill": False}),
    "no prefix cache": Variant({"enable_prefix_caching": False}),
    "blocks of 16": Variant({"kvcache_block_size": 16}),
    "flash_attn": Variant({"attention_backend": "flash_attn"}),
}


def measure(
    engine: Engine, repeats: int, sizes: dict[str, int], small: dict[str, Any], prompts: dict[str, Any]
) -> list[Measured]:
    """In the process of one variant: the headline workload, small batches and prompts, where other parts count.

    The last two take so little time that they are repeated more often.
    """
    found = (
        throughput.measure(engine, repeats, sizes),
        latency.measure(engine, **small),
        first_token(engine, **prompts),
    )
    repetitions: list[Measured] = []
    for parts in zip_longest(*found):
        repetitions.append({name: figures for part in parts if part for name, figures in part.items()})
    return repetitions


def first_token(engine: Engine, repeats: int, batches: list[int], prompt_len: int, highest_id: int) -> list[Measured]:
    """Time to the first token of so many prompts at once."""
    repetitions: list[Measured] = [{} for _ in range(repeats)]
    for batch in batches:
        for repeat in range(-2, repeats):  # the first two are for warming up
            prompts = random_prompts([prompt_len] * batch, 20_000 * batch + repeat, highest_id)
            ms = 1e3 * engine.timed(prompts, [1] * batch)
            if repeat >= 0:
                repetitions[repeat][f"{batch} prompts"] = {"first_token_ms": ms}
    return repetitions


def prepare(variant: str) -> None:
    """In the process of one variant, before there is an engine."""
    patch = VARIANTS[variant].patch
    if patch is not None:
        patch()


def showcase(
    contenders: list[Contender], limit: dict[str, Any], batches: list[int], prompts: dict[str, Any]
) -> Showcase:
    tokens_per_second = metric("headline", "tokens_per_second")
    figures = [Figure("throughput", "throughput", "tokens/s", "higher", tokens_per_second)]
    figures += by_batch("ms_per_token", "time per token", batches)
    for n in prompts["batches"]:
        label = f"time to first token, {n} prompt{'s' * (n > 1)} of {prompts['prompt_len']}"
        figures.append(lower(f"first_{n}", label, "ms", f"{n} prompts", "first_token_ms"))
    return Showcase(
        name="ablations",
        title="What each part is worth",
        workload=f"{throughput.describe(limit)}; and batches of {', '.join(map(str, batches))}, greedy",
        contenders=contenders,
        figures=figures,
        notes=[roofline.describe(limit)],
    )


def main() -> None:
    parser = make_parser("ablations", __doc__, repeats=2)
    parser.add_argument("--only", action="append", choices=VARIANTS, help="this variant (and others so named) only")
    options = check_options(parser.parse_args())
    limit = roofline.roofline(options)
    small: dict[str, Any] = {"repeats": 5, "batches": [1, 8, 32, 256], "prompt_len": 128, "num_tokens": 128}
    prompts: dict[str, Any] = {"repeats": 10, "batches": [1, 16], "prompt_len": 1024}
    if options.quick:
        small |= {"repeats": 2, "batches": [1, 2], "prompt_len": 8, "num_tokens": 4}
        prompts |= {"repeats": 2, "batches": [1, 2], "prompt_len": 32}
    for sizes in (small, prompts):
        sizes["highest_id"] = 500 if options.quick else 10_000
    contenders = [ours(options, name, variant=name, **v.options) for name, v in VARIANTS.items()]
    shown = showcase(contenders, limit, small["batches"], prompts)
    arguments = {"repeats": options.repeats, "sizes": limit["workload"], "small": small, "prompts": prompts}
    only = options.only or list(VARIANTS)
    extra = {"roofline": limit}
    comparison = harness.compare(shown, "benchmarks.engine.ablations", arguments, options, extra, only)
    sys.exit(bool(comparison.failures))


def table(results: dict[str, Result]) -> list[str]:
    """The engine as it is, and below it every variant, each with the change that it makes."""
    result = results["ablations"]
    figures, usual = result["figures"], result["contender"]
    lines = tables.head("", *map(tables.label, figures))

    def cell(figure: dict[str, Any], variant: str) -> str:
        text = tables.cell(figure, variant, "{}")
        base, value = (figure["values"].get(name, {}).get("median") for name in (usual, variant))
        return text if None in (base, value) or variant == usual else f"{text} ({100 * (value / base - 1):+.1f}%)"

    for variant in figures[0]["values"]:
        lines.append(tables.row(variant, *(cell(figure, variant) for figure in figures)))
    lines += [tables.row(variant, *["failed"] * len(figures)) for variant in result["failures"]]
    return [*lines, "", f"Workload: {result['workload']}.", "", tables.origin(results)]


if __name__ == "__main__":
    main()
