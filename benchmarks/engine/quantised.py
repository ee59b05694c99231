"""FP8 beside bf16: small batches, which read little besides weights, and the headline workload.

`quantised`: weights in FP8. `experts`: the same for a mixture of experts.

- "bf16": the model as it is.
- "FP8 by channel": the same, quantised while it is loaded, with a scale for each output channel.
- "FP8 in blocks": the layout of Qwen's own checkpoints in FP8, with a scale for each 128 x 128 weights.

vLLM is measured with "bf16" and "FP8 in blocks". In `experts` all tokens are drawn: sequences that go on with the same
token would go through the same experts, and read fewer weights than others.

`kv_cache`: keys and values in FP8, and weights in bf16. vLLM is measured with both dtypes of the KV cache.

The weights are random. Steps take as long as with real ones.
"""

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engine import ours, speed, vllm
from benchmarks.lib import workloads
from benchmarks.lib.harness import Contender, Measured, Showcase, by_batch, higher
from benchmarks.lib.process import SAMPLED, Engine

CONTENDERS = "bf16", "FP8 by channel", "FP8 in blocks"
KINDS = {"bf16": "auto", "KV cache in FP8": "fp8"}


def measure(engine: Engine, repeats: int, sizes: dict[str, int], small: dict[str, Any]) -> list[Measured]:
    """In the process of one contender."""
    headlines, batches = speed.measure_headline(engine, repeats, sizes), speed.measure_small(engine, repeats, **small)
    return [headline | batch for headline, batch in zip(headlines, batches, strict=True)]


def in_blocks(contender: Contender, model: Path) -> Contender:
    """The contender with the shape of the checkpoint in blocks: its directory has the name of `model` and "-FP8"."""
    return Contender(contender.name, {**contender.spec, "model": f"{model}-FP8"})


def of_weights(options: Namespace, name: str, title: str, **more: Any) -> Showcase:
    plain, channel, blocks = CONTENDERS
    contenders = [ours(options, plain), ours(options, channel, quantization="fp8")]
    if not options.quick:  # there is no small model in blocks
        contenders.append(in_blocks(ours(options, blocks), options.model))
    contenders += vllm(options, f"vLLM, {plain}")
    if not options.quick:
        contenders += (in_blocks(contender, options.model) for contender in vllm(options, f"vLLM, {blocks}"))
    return compared(options, name, title, contenders, channel, plain, **more)


def showcase(options: Namespace) -> Showcase:
    return of_weights(options, "quantised", "Weights in FP8")


def experts(options: Namespace) -> Showcase:
    return of_weights(options, "experts", "A mixture of experts", kinds=SAMPLED)


def kv_cache(options: Namespace) -> Showcase:
    contenders = [ours(options, name, kv_cache_dtype=kind) for name, kind in KINDS.items()]
    for name, kind in KINDS.items():
        contenders += vllm(options, f"vLLM, {name}", kv_cache_dtype=kind)
    plain, rounded = KINDS
    return compared(options, "kv_cache", "A KV cache in FP8", contenders, rounded, plain)


def compared(
    options: Namespace, name: str, title: str, contenders: list[Contender], contender: str, rival: str, **more: Any
) -> Showcase:
    """more: of small batches, for `speed.measure_small`."""
    sizes = workloads.QUICK if options.quick else workloads.HEADLINE
    small = (speed.QUICK_SMALL if options.quick else speed.SMALL) | more
    return Showcase(
        name=name,
        title=title,
        workload="the headline workload, and small batches of 128 tokens in, 512 out",
        contenders=contenders,
        figures=[
            *by_batch("ms_per_token", "time per token", small["batches"]),
            higher("throughput", "throughput of the headline workload", "tokens/s", "headline", "tokens_per_second"),
        ],
        contender=contender,
        rival=rival,
        measure=measure,
        arguments={"sizes": asdict(sizes), "small": small},
        rounds=2,
        repeats=2,
    )
