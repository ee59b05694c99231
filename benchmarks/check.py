"""Does a fresh measurement still bear out the recorded one? `make bench-check`.

    python -m benchmarks.check [STAGE ...] [--rounds 1] [--tolerance 0.3]

Measures each stage's showcase once more and compares its gain over the stage before with the recorded gain. Gains are
compared and not times, because they hardly depend on the machine. A gain may fall by the tolerance, but never to 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.report import load
from benchmarks.showcases import NEED_A_GPU, SHOWCASES
from benchmarks.stage_bench import add_options, measure, vocab_size
from benchmarks.wording import number


def holds(fresh: float, recorded: float, tolerance: float) -> bool:
    return fresh > 1 and fresh >= recorded * (1 - tolerance)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare fresh measurements with the recorded ones.")
    parser.add_argument("stage", type=int, nargs="*", metavar="STAGE", help="stages to check (default: all on a CPU)")
    parser.add_argument("--tolerance", type=float, default=0.3, help="share by which a gain may fall (default 0.3)")
    add_options(parser)
    parser.set_defaults(rounds=1)
    options = parser.parse_args()
    checked = sorted(SHOWCASES.keys() - NEED_A_GPU.keys())
    if unknown := set(options.stage) - set(checked):
        sys.exit(f"there is no showcase of stage {min(unknown)} on a CPU; there are {', '.join(map(str, checked))}")
    console = Console()
    table = Table(title=f"Gain over the stage before: recorded and now (tolerance {options.tolerance:.0%})")
    for heading in ("stage", "recorded", "now", ""):
        table.add_column(heading, justify="right")
    failed = []
    recorded_in, size = options.results or harness.RESULTS, vocab_size(options.model)
    with tempfile.TemporaryDirectory() as scratch:
        options.results = Path(scratch)  # what is recorded stays as it is
        for stage in options.stage or checked:
            recorded = harness.headline_gain(load(f"stage_{stage}", recorded_in))
            fresh = harness.headline_gain(measure(SHOWCASES[stage](size, options.quick), options, console))
            good = holds(fresh, recorded, options.tolerance)
            if not good:
                failed.append(str(stage))
            table.add_row(str(stage), number(recorded, "times"), number(fresh, "times"), "holds" if good else "FAILS")
    console.print(table)
    if failed:
        sys.exit(f"stage {', '.join(failed)}: the recorded gain is not borne out")


if __name__ == "__main__":
    main()
