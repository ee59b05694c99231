"""Does a fresh measurement still bear out the recorded one? `make bench-check`.

    python -m benchmarks.engine.check [STAGE ... | engine] [--rounds 1] [--tolerance 0.3]

Measures each stage's showcase once more and compares its gain over the stage before with the recorded gain; likewise
the engine's over Hugging Face on a CPU. Gains are compared and not times, because they hardly depend on the machine. A
gain may fall by the tolerance, but never to 1. On a card with a recorded headline throughput, that one's share of what
the card could do is compared as well; it may fall by a tenth.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine import cpu, throughput
from benchmarks.lib import harness
from benchmarks.lib.tables import load, number
from benchmarks.stages.showcases import NEED_A_GPU, SHOWCASES
from benchmarks.stages.stage_bench import add_options, measure, vocab_size

ENGINE = "engine"
SHARE_TOLERANCE = 0.1


def holds(fresh: float, recorded: float, tolerance: float) -> bool:
    return fresh > 1 and fresh >= recorded * (1 - tolerance)


def share(result: dict[str, Any]) -> float:
    """Headline throughput in percent of the card's limit."""
    figure = next(f for f in result["figures"] if f["key"] == "share")
    median: float = figure["values"][result["contender"]]["median"]
    return median


def check_throughput(recorded_in: Path, scratch: Path, table: Table) -> bool:
    """Measure the headline once more, if this card's is recorded. Whether it holds."""
    if not torch.cuda.is_available():
        return True
    path = harness.result_path("throughput", torch.cuda.get_device_name(), recorded_in)
    if not path.is_file():
        return True
    options = throughput.parse_options(["--out", str(scratch), "--rounds", "1"])
    recorded, fresh = share(load(path.stem, recorded_in)), share(throughput.compare(options).result())
    good = fresh >= recorded * (1 - SHARE_TOLERANCE)
    table.add_row("throughput", f"{recorded:.0f}%", f"{fresh:.0f}%", "holds" if good else "FAILS")
    return good


def build(what: str, vocab_size: int, quick: bool) -> harness.Showcase:
    if what == ENGINE:
        return cpu.embedded(vocab_size, quick)
    return SHOWCASES[int(what)](vocab_size, quick)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare fresh measurements with the recorded ones.")
    checked = [*map(str, sorted(SHOWCASES.keys() - NEED_A_GPU.keys())), ENGINE]
    parser.add_argument("what", nargs="*", metavar="STAGE", help="stages to check, or 'engine' (default: all on a CPU)")
    parser.add_argument("--tolerance", type=float, default=0.3, help="share by which a gain may fall (default 0.3)")
    add_options(parser)
    parser.set_defaults(rounds=1)
    options = parser.parse_args()
    if unknown := set(options.what) - set(checked):
        sys.exit(f"there is no showcase of stage {min(unknown)} on a CPU; there are {', '.join(checked)}")
    table = Table(
        title=f"Gain over the stage before, or Hugging Face: recorded and now (tolerance {options.tolerance:.0%})"
    )
    for heading in ("", "recorded", "now", ""):
        table.add_column(heading, justify="right")
    failed = []
    recorded_in, size = options.out or harness.RESULTS, vocab_size(options.model)
    with tempfile.TemporaryDirectory() as scratch:
        options.out = Path(scratch)  # what is recorded stays as it is
        for what in options.what or checked:
            name = "engine_cpu" if what == ENGINE else f"stage_{what}"
            recorded = harness.headline_gain(load(name, recorded_in))
            fresh = harness.headline_gain(measure(build(what, size, options.quick), options))
            good = holds(fresh, recorded, options.tolerance)
            if not good:
                failed.append(what if what == ENGINE else f"stage {what}")
            table.add_row(what, number(recorded, "times"), number(fresh, "times"), "holds" if good else "FAILS")
        if not check_throughput(recorded_in, Path(scratch), table):
            failed.append("throughput")
    Console().print(table)
    if failed:
        sys.exit(f"{', '.join(failed)}: the recorded gain is not borne out")


if __name__ == "__main__":
    main()
