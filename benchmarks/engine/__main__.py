"""The engine's benchmarks, beside vLLM where it can be imported.

    python -m benchmarks.engine NAME [NAME ...] --out DIR [--vllm-path PATH] [--rounds N] [--only CONTENDER]

Every contender runs in fresh processes, which take turns. After each the result is written. With --only, what the file
in --out has of other contenders stays in it, if it is of the same commit, card and workload: so they can be measured in
several runs.
"""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.engine import (
    EXPERTS_SHAPE,
    LARGE_SHAPE,
    SHAPE,
    ablations,
    arrivals,
    quantised,
    speculation,
    speed,
    step_costs,
    steps,
    structured,
    uses,
)
from benchmarks.engine import tensor_parallel as ranks
from benchmarks.lib.harness import EMBEDDED_MODEL, Comparison, make_parser

SHOWCASES = {
    "throughput": speed.throughput,
    "sampling": speed.sampling,
    "structured": structured.showcase,
    "latency": speed.latency,
    "startup": speed.startup,
    "prefix": arrivals.prefix,
    "mixed": arrivals.mixed,
    "idle": steps.idle,
    "phases": steps.phases,
    "quantised": quantised.showcase,
    "kv_cache": quantised.kv_cache,
    "experts": quantised.experts,
    "uses": uses.showcase,
    "shape": uses.shape,
    "ablations": ablations.showcase,
    "tensor_parallel": ranks.showcase,
}
# Benchmarks that compare no contenders, and so start no processes for them. These run on a CPU, too
OTHERS = {"speculation": speculation.run, "step_costs": step_costs.run}
SHAPES = dict.fromkeys(("tensor_parallel", "quantised", "speculation"), LARGE_SHAPE) | {"experts": EXPERTS_SHAPE}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options with their defaults. Exits with one line if they make no sense."""
    parser = make_parser("engine", __doc__)
    names = [*SHOWCASES, *OTHERS]
    parser.add_argument("names", nargs="+", choices=names, metavar="NAME", help=f"which: {', '.join(names)}")
    parser.add_argument("--out", type=Path, required=True, help="directory for the JSON")
    parser.add_argument("--rounds", type=int, help="processes of every contender (default: this benchmark's)")
    parser.add_argument("--repeats", type=int, help="measurements in a process (default: this benchmark's)")
    parser.add_argument("--only", action="append", metavar="CONTENDER", help="this one (and others so named) only")
    parser.add_argument("--model", type=Path, help="directory with a config.json (default: this benchmark's shape)")
    parser.add_argument("--device", help="default: cuda if there is a GPU, else cpu")
    parser.add_argument("--ranks", type=int, default=2, choices=ranks.ALL_RANKS, help="the most (default %(default)s)")
    parser.add_argument("--vllm-path", metavar="PATH", help="where vLLM can be imported from: its PYTHONPATH")
    parser.add_argument("--flash-path", metavar="PATH", help="the same for flash-attn, for nanovllm's processes")
    parser.add_argument("--quick", action="store_true", help="the embedded model and a tiny workload: for tests")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cpu" and not options.quick and not {*options.names} <= OTHERS.keys():
        sys.exit("this measures a GPU, and there is none here; --quick tries it out on a CPU")
    for name in ("rounds", "repeats"):
        if getattr(options, name) not in (None, *range(1, 1000)):
            sys.exit(f"--{name} {getattr(options, name)}: it must be at least 1")
    return options


def run(name: str, options: argparse.Namespace) -> bool:
    """Measure one benchmark, and say whether nothing is missing."""
    small = options.quick or options.device == "cpu"
    model = options.model or (EMBEDDED_MODEL if small else SHAPES.get(name, SHAPE))
    chosen = argparse.Namespace(**vars(options) | {"model": model.resolve()})
    try:
        if name in OTHERS:
            return OTHERS[name](chosen)
        comparison = Comparison(SHOWCASES[name](chosen), chosen)
        comparison.run(options.only)
        return not comparison.failures
    except (RuntimeError, SystemExit) as error:  # nothing could be measured
        print(f"{name}: {error}", flush=True)
        return False


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if missing := [name for name in options.names if not run(name, options)]:
        sys.exit(f"not complete: {', '.join(missing)}")


if __name__ == "__main__":
    main()
