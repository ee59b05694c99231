"""Does a fresh measurement still bear out the recorded one? `make bench-check`.

    python -m benchmarks.engine.check [STAGE ... | engine] [--rounds 1] [--tolerance 0.3]

Measures each stage's showcase once more and compares its gain over the stage before with the recorded gain; likewise
the engine's over Hugging Face on a CPU. Gains are compared and not times, because they hardly depend on the machine. A
gain may fall by the tolerance, but never to 1.
"""

import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.engine import cpu
from benchmarks.lib import harness, tables
from benchmarks.stages.showcases import NEED_A_GPU, SHOWCASES
from benchmarks.stages.stage_bench import add_options, measure, vocab_size

ENGINE = "engine"


def holds(fresh: float, recorded: float, tolerance: float) -> bool:
    return fresh > 1 and fresh >= recorded * (1 - tolerance)


def main() -> None:
    parser = harness.make_parser("engine.check", __doc__)
    checked = [*map(str, sorted(SHOWCASES.keys() - NEED_A_GPU.keys())), ENGINE]
    parser.add_argument("what", nargs="*", metavar="STAGE", help="stages to check, or 'engine' (default: all on a CPU)")
    parser.add_argument("--tolerance", type=float, default=0.3, help="share by which a gain may fall (default 0.3)")
    add_options(parser)
    parser.set_defaults(rounds=1)
    options = parser.parse_args()
    if unknown := set(options.what) - set(checked):
        sys.exit(f"there is no showcase of stage {min(unknown)} on a CPU; there are {', '.join(checked)}")
    title = f"Gain over the stage before, or Hugging Face (tolerance {options.tolerance:.0%})"
    lines, failed = tables.head(title, "recorded", "now", ""), []

    recorded_in, size = options.out or harness.RESULTS, vocab_size(options.model)
    with tempfile.TemporaryDirectory() as scratch:
        options.out = Path(scratch)  # what is recorded stays as it is
        for what in options.what or checked:
            name, build = ("engine_cpu", cpu.showcase) if what == ENGINE else (f"stage_{what}", SHOWCASES[int(what)])
            recorded = harness.headline_gain(tables.load(name, recorded_in))
            fresh = harness.headline_gain(measure(build(size, options.quick), options))
            label, good = what if what == ENGINE else f"stage {what}", holds(fresh, recorded, options.tolerance)
            gains = (tables.with_unit(gain, "times") for gain in (recorded, fresh))
            lines.append(tables.row(label, *gains, "holds" if good else "FAILS"))
            failed.extend([] if good else [label])
    Console().print(Markdown("\n".join(lines)))
    if failed:
        sys.exit(f"{', '.join(failed)}: the recorded gain is not borne out")


if __name__ == "__main__":
    main()
