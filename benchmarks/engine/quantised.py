"""Weights in FP8 beside those in bf16: small batches, which read little besides weights, and the headline workload.

- "bf16": the model as it is.
- "FP8 by channel": the same, quantised while it is loaded, with a scale for each output channel.
- "FP8 in blocks": the layout of Qwen's own checkpoints in FP8, with a scale for each 128 x 128 weights.

vLLM is measured with the first and the last. The weights are random, which costs the same.
"""

from argparse import Namespace
from dataclasses import asdict
from typing import Any

from benchmarks.engine import ours, speed, vllm
from benchmarks.lib import workloads
from benchmarks.lib.harness import Contender, Measured, Showcase, by_batch, higher
from benchmarks.lib.process import Engine

BLOCKS = workloads.SHAPES / "Qwen3-8B-FP8"
CONTENDERS = "bf16", "FP8 by channel", "FP8 in blocks"


def measure(engine: Engine, repeats: int, sizes: dict[str, int], small: dict[str, Any]) -> list[Measured]:
    """In the process of one contender."""
    headlines, batches = speed.measure_headline(engine, repeats, sizes), speed.measure_small(engine, repeats, **small)
    return [headline | batch for headline, batch in zip(headlines, batches, strict=True)]


def in_blocks(contender: Contender) -> Contender:
    """With the shape of a checkpoint in blocks for its model."""
    return Contender(contender.name, {**contender.spec, "model": str(BLOCKS)})


def showcase(options: Namespace) -> Showcase:
    plain, channel, blocks = CONTENDERS
    contenders = [ours(options, plain), ours(options, channel, quantization="fp8")]
    if not options.quick:  # there is no small model in blocks
        contenders.append(in_blocks(ours(options, blocks)))
    contenders += vllm(options, f"vLLM, {plain}")
    if not options.quick:
        contenders += map(in_blocks, vllm(options, f"vLLM, {blocks}"))
    sizes = workloads.QUICK if options.quick else workloads.HEADLINE
    small = speed.QUICK_SMALL if options.quick else speed.SMALL
    return Showcase(
        name="quantised",
        title="Weights in FP8",
        workload="the headline workload, and small batches of 128 tokens in, 512 out",
        contenders=contenders,
        figures=[
            *by_batch("ms_per_token", "time per token", small["batches"]),
            higher("throughput", "throughput of the headline workload", "tokens/s", "headline", "tokens_per_second"),
        ],
        contender=channel,
        rival=plain,
        measure=measure,
        arguments={"sizes": asdict(sizes), "small": small},
        rounds=2,
        repeats=2,
    )
