"""Measure which kernels and layouts are fastest on this card, and write them down for the engine.

    make tune                                                        all of it, for this card
    python -m benchmarks.kernels.tune --only experts --out DIR       a part, into DIR

Each row of the table is a contest: candidates are timed at a few points, in a CUDA graph as the engine runs them, and
the one with the least mean slowdown wins, over the best time of each point. What the engine takes now keeps its place
unless the winner is faster by more than `MARGIN`, since a border that noise has drawn helps nobody.
"""

from pathlib import Path

import torch

from benchmarks.kernels.contest import compile_all, measure, say
from benchmarks.kernels.trials import CONTESTS
from benchmarks.lib import harness


def main() -> None:
    parser = harness.make_parser("kernels.tune", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the record")
    parser.add_argument("--only", nargs="+", choices=["experts"], default=["experts"], help="sections of the table")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and this machine has none")
    from benchmarks.kernels.ceilings import graph_microseconds

    rows = []
    path = harness.result_path("tuning", torch.cuda.get_device_name(), options.out)
    with torch.inference_mode():
        for section in options.only:
            contests = CONTESTS[section](torch.device("cuda", torch.cuda.current_device()))
            compile_all(contests)
            for contest in contests:
                outcome = measure(contest, lambda call, calls: graph_microseconds(call, calls, rounds=5))
                print(say(outcome), flush=True)
                every = [{**dict(choice), "microseconds": times} for choice, times in outcome.times.items()]
                points = [point.name for point in contest.points]
                rows.append({"section": section, "when": contest.when, "points": points, "candidates": every})
                harness.write_json({"commit": harness.commit(), "rows": rows}, path)


if __name__ == "__main__":
    main()
