"""What each part of the engine is worth: one part is switched off at a time, and the engine is measured without it.

Every variant runs in a fresh process; the first is the engine as it is. `--only` measures some of them, and
`--flash-path` is where flash-attn can be imported from, if it is not installed.
"""

import sys
from argparse import Namespace
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.engine import ours, speed
from benchmarks.lib import roofline, tables
from benchmarks.lib.harness import Figure, Measured, Showcase, by_batch, lower, metric
from benchmarks.lib.process import Engine, random_prompts
from benchmarks.lib.tables import Result
from nanovllm.kernels import FusedKernels

BASE = "as it is"
Patch = Callable[[], None]  # changes the code of a process, before there is an engine


@dataclass(frozen=True)
class Variant:
    """Options other than the defaults, and patches."""

    options: dict[str, Any] = field(default_factory=dict)
    patches: tuple[Patch, ...] = ()


def replaced(module: str, name: str, change: Callable[[Any], Any]) -> Patch:
    """A patch that puts `change(value)` in the place of the value that `nanovllm.MODULE` calls `name`."""

    def patch() -> None:
        for user in ("nanovllm.runner.batch", "nanovllm.sampling.sampler"):
            assert user not in sys.modules, f"{user} has a reference to the function by now"
        found = import_module(f"nanovllm.{module}")
        setattr(found, name, change(getattr(found, name)))

    return patch


def leaving_out(*names: str) -> Callable[[Any], Any]:
    """Changes a function that gives a device's kernels as a named tuple: the kernels `names` are None everywhere."""

    def change(choose: Any) -> Any:
        def others(device: torch.device) -> Any:
            return choose(device)._replace(**dict.fromkeys(names))

        others(torch.device("cpu"))  # raises ValueError if there is no such kernel any more
        return cache(others)

    return change


def without_kernels(*names: str) -> Patch:
    """A patch that has the engine do in PyTorch, one operation after the other, what these fused kernels do."""
    return replaced("kernels", "fused_kernels", leaving_out(*names))


def without_attention_of_hopper(name: str) -> Patch:
    """A patch: the kernel for any GPU computes what this kernel in `kernels/hopper/` is chosen for."""
    return replaced("attention.triton_backend", "hopper_kernels", leaving_out(name))


def without_skinny(rows_of: Any) -> Any:
    """Changes the table of cards: `tiled_linear` computes what `skinny_linear` is chosen for."""

    def others(device: torch.device) -> Any:
        rows = rows_of(device)
        return rows | {"linear": [row for row in rows["linear"] if row.gives["kernel"] != "skinny"]}

    return cache(others)


def compiled() -> None:
    """A patch that has torch.compile make the kernels between the matrix products: norms, rotation, the MLP's gate."""
    from nanovllm.layers import linear, norm, rope

    def gate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    norm.rms_norm = torch.compile(norm.rms_norm, dynamic=True)
    norm.add_rms_norm = torch.compile(norm.add_rms_norm, dynamic=True)
    rope.apply_rope = torch.compile(rope.apply_rope, dynamic=True)
    linear.silu_and_mul = torch.compile(gate, dynamic=True)


# Hopper's kernels, each replaced by what other GPUs take
NO_RING = without_attention_of_hopper("ring_decode")
NO_WARP = without_attention_of_hopper("warp_specialized_prefill")
NO_PREFETCH = replaced("kernels.linear.choice", "hopper_linear", lambda _: lambda device: None)
NO_SKINNY = replaced("kernels.cards", "rows_of", without_skinny)
NO_PROMPTS = replaced("graphs.sizes", "prompt_sizes", lambda _: lambda *_: [])
LINEAR = "choose_linear", "choose_norm_linear"
BETWEEN_PRODUCTS = without_kernels("add_rms_norm", "norm_rope_write", "silu_and_mul", *LINEAR)

# What is done in PyTorch instead when fused kernels are taken away
FUSED = {
    "sampling not fused": ("sample_rows", "edit_logits", "restore_logits", "top_logprobs"),
    "add + RMSNorm not fused": ("add_rms_norm", "choose_norm_linear"),
    "norm + RoPE + KV write not fused": ("norm_rope_write",),
    "SiLU and multiply not fused": ("silu_and_mul",),
    "linear layers for few tokens not fused": LINEAR,
    "look-up of inputs not fused": ("decode_inputs",),
}

VARIANTS: dict[str, Variant] = {
    BASE: Variant(),
    "no CUDA graphs": Variant({"enforce_eager": True}),
    "no asynchronous scheduling": Variant({"async_scheduling": False}),
    **{label: Variant(patches=(without_kernels(*names),)) for label, names in FUSED.items()},
    "none of these kernels": Variant(patches=(without_kernels(*FusedKernels._fields),)),
    "torch.compile in their place": Variant(patches=(BETWEEN_PRODUCTS, compiled)),
    "paged_decode in place of ring_decode": Variant(patches=(NO_RING,)),
    "paged_prefill in place of warp_specialized_prefill": Variant(patches=(NO_WARP,)),
    "no weight_prefetch_linear": Variant(patches=(NO_PREFETCH,)),
    "no kernels of Hopper's own": Variant(patches=(NO_RING, NO_WARP, NO_PREFETCH)),
    "tiled_linear in place of skinny_linear": Variant(patches=(NO_SKINNY,)),
    "steps with prompts not recorded": Variant(patches=(NO_PROMPTS,)),
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
    found = [speed.measure_headline(engine, repeats, sizes), speed.measure_small(engine, **small)]
    found.append(first_token(engine, **prompts))
    return [dict(ChainMap(*parts)) for parts in zip_longest(*found, fillvalue={})]


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
    for patch in VARIANTS[variant].patches:
        patch()


def showcase(options: Namespace) -> Showcase:
    small: dict[str, Any] = {"repeats": 5, "batches": [1, 8, 32, 256], "prompt_len": 128, "num_tokens": 128}
    prompts: dict[str, Any] = {"repeats": 10, "batches": [1, 16], "prompt_len": 1024}
    if options.quick:
        small |= {"repeats": 2, "batches": [1, 2], "prompt_len": 8, "num_tokens": 4}
        prompts |= {"repeats": 2, "batches": [1, 2], "prompt_len": 32}
    for sizes in (small, prompts):
        sizes["highest_id"] = 500 if options.quick else 10_000
    limit, tokens_per_second = roofline.roofline(options), metric("headline", "tokens_per_second")
    figures = [Figure("throughput", "throughput", "tokens/s", "higher", tokens_per_second)]
    figures += by_batch("ms_per_token", "time per token", small["batches"])
    for n in prompts["batches"]:
        label = f"time to first token, {n} prompt{'s' * (n > 1)} of {prompts['prompt_len']}"
        figures.append(lower(f"first_{n}", label, "ms", f"{n} prompts", "first_token_ms"))
    return Showcase(
        name="ablations",
        title="What each part is worth",
        workload=f"{speed.describe_headline(limit)}; and batches of {', '.join(map(str, small['batches']))}, greedy",
        contenders=[ours(options, name, variant=name, **v.options) for name, v in VARIANTS.items()],
        figures=figures,
        notes=[roofline.describe(limit)],
        measure=measure,
        repeats=2,
        arguments={"sizes": limit["workload"], "small": small, "prompts": prompts},
        extra={"roofline": limit},
    )


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
