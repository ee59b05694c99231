"""Measure which kernels and layouts are fastest on this GPU, and write them down for the engine.

    make tune                                                     all of it, to where the engine looks for it
    python -m benchmarks.kernels.tune --only experts --out DIR    a section of the table of cards, into DIR

Each row of the table is a contest: candidates are timed at a few points, in a CUDA graph as the engine runs them.
"""

import json
import tomllib
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.contest import Contest, Outcome, Timer, compile_all, measure
from benchmarks.kernels.trials import CONTESTS
from benchmarks.lib import harness
from benchmarks.lib.process import facts
from nanovllm.kernels import why_no_kernels

BORDERS = ("tokens", "kib", "per_expert")  # conditions along which rows that give the same become one

Rows = list[dict[str, Any]]


def tune(contests: Iterable[Contest], timer: Timer) -> list[Outcome]:
    """Every contest is said when it is over; one in which nothing can run is left to the table."""
    outcomes = []
    for contest in contests:
        try:
            outcomes.append(measure(contest, timer))
            print(outcomes[-1], flush=True)
        except RuntimeError as error:
            print(error, flush=True)
    return outcomes


def rows_of(outcomes: Iterable[Outcome]) -> Rows:
    """As few rows as say the same."""
    rows: Rows = [{**outcome.contest.when, **dict(outcome.chosen)} for outcome in outcomes]
    for name in BORDERS:
        merged: Rows = []
        for row in sorted(rows, key=lambda row: row.get(name, [0, 0])):
            for last in merged:
                same = {**row, name: None} == {**last, name: None}
                if name in row and same and row[name][0] - last[name][1] in (0, 1):
                    last[name] = [last[name][0], row[name][1]]
                    break
            else:
                merged.append(dict(row))
        rows = merged
    return rows


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {as_toml(of)}" for name, of in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return "inf" if value == inf else json.dumps(value)


def write(sections: dict[str, Rows], path: Path, heading: str) -> None:
    lists = [
        f"{name} = [\n" + "".join(f"  {as_toml(row)},\n" for row in rows) + "]\n" for name, rows in sections.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {heading}\n" + "".join(lists), encoding="utf-8")


def summary(section: str, outcomes: Sequence[Outcome]) -> str:
    other = [outcome.cost_of_table for outcome in outcomes if outcome.chosen != outcome.contest.now]
    costs = [cost for cost in other if cost is not None]
    mean = f"; there what the table gives takes {sum(costs) / len(costs):.2f} times as long" if costs else ""
    return f"{section}: {len(other)} of {len(outcomes)} choices are not the table's{mean}"


def main() -> None:
    parser = harness.make_parser("kernels.tune", __doc__)
    parser.add_argument("--only", nargs="+", choices=CONTESTS, default=list(CONTESTS), help="sections of the table")
    parser.add_argument("--out", type=Path, help="another directory than the one where the engine looks for the file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and this machine has none")
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := why_no_kernels(device):
        parser.error(f"there is nothing to tune: {reason}")
    from benchmarks.kernels.ceilings import graph_microseconds
    from nanovllm.kernels.cards import read_rows, user_file

    path = user_file(torch.cuda.get_device_capability(device))
    path = options.out / path.name if options.out else path
    kept: dict[str, Rows] = {}
    if len(options.only) < len(CONTESTS) and read_rows(path):
        kept = tomllib.loads(path.read_text("utf-8"))
    about = facts("cuda")
    heading = "By `make tune` on {device}, torch {torch}, triton {triton}; docs/cards.md says more.".format(**about)
    said = []
    with torch.inference_mode():
        for section in options.only:
            contests = CONTESTS[section](device)
            compile_all(contests)
            outcomes = tune(contests, lambda call, calls: graph_microseconds(call, calls, rounds=5))
            said.append(summary(section, outcomes))
            kept[section] = rows_of(outcomes)
            write(kept, path, heading)
            del contests, outcomes  # and the tensors they hold
    print("\n".join([*said, f"written to {path}"]))


if __name__ == "__main__":
    main()
