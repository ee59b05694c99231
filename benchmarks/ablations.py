"""What each part of the engine is worth: the headline workload with one thing at a time taken away.

    python -m benchmarks.ablations --out DIR [--only eager --only sync] [--repeats 2] [--flash-path PATH]

Every variant runs in a process of its own, and all in one run, so that they can be compared. The first is the engine as
it is. `--flash-path` is where flash-attn can be imported from, if it is not installed.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks import roofline, throughput
from benchmarks.engine_harness import Comparison, add_options, check_options, ours, run_process
from benchmarks.harness import Contender, Figure, Showcase, metric

BASE = "as it is"


@dataclass(frozen=True)
class Variant:
    """Options other than the defaults, and what to change in the code of a process before the engine is made."""

    options: dict[str, Any] = field(default_factory=dict)
    patch: Callable[[], None] | None = None


VARIANTS: dict[str, Variant] = {
    BASE: Variant(),
    "no CUDA graphs": Variant({"enforce_eager": True}),
    "no asynchronous scheduling": Variant({"async_scheduling": False}),
    "no chunked prefill": Variant({"enable_chunked_prefill": False}),
    "no prefix cache": Variant({"enable_prefix_caching": False}),
    "blocks of 16": Variant({"kvcache_block_size": 16}),
    "flash_attn": Variant({"attention_backend": "flash_attn"}),
}


def showcase(contenders: list[Contender], limit: dict[str, Any]) -> Showcase:
    return Showcase(
        name="ablations",
        title="One thing at a time taken away",
        workload=throughput.describe(limit),
        contenders=contenders,
        scenarios=[],
        figures=[
            Figure("throughput", "throughput", "tokens/s", "higher", metric("headline", "tokens_per_second")),
            Figure("share", "share of the limit", "%", "higher", throughput.share_of(limit["tokens_per_second"])),
        ],
        headline="throughput",
        shown=("throughput", "share"),
        contender=contenders[0].name,
        rival=contenders[-1].name,
        notes=[roofline.describe(limit)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablations", description=(__doc__ or "").split("\n")[0])
    add_options(parser, rounds=1)
    parser.add_argument("--repeats", type=int, default=2, help="times that a process runs the workload (default 2)")
    parser.add_argument("--only", action="append", choices=VARIANTS, help="this variant (and others so named) only")
    options = check_options(parser.parse_args())
    names = [name for name in VARIANTS if options.only is None or name in options.only]
    contenders = [ours(options, name, variant=name, **VARIANTS[name].options) for name in names]
    limit = roofline.in_a_process(options)
    arguments = {"repeats": options.repeats, "sizes": limit["workload"]}
    comparison = Comparison(showcase(contenders, limit), options, {"roofline": limit})
    comparison.run(lambda contender: run_process(contender, "benchmarks.throughput", arguments, options))
    sys.exit(1 if comparison.failures else 0)


if __name__ == "__main__":
    main()
