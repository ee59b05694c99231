"""Plausible mistakes, planted one at a time: `python -m tools.exercises.mutants 4` shows which test catches each of
them.

A mutant is a stage file with one replacement, listed in tests/stages/mutants/stage_N.toml. It runs through the tests of
its stage up to the first failure. One that survives is a hole in the tests (DeMillo, Lipton & Sayward, "Hints on Test
Data Selection", 1978).
"""

import argparse
import sys
import tomllib
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stages.manifest import Stage, load_stage
from tools.ctrl_c import until_ctrl_c
from tools.exercises.stage_runs import ROOT, run_tests, solution

SIDE_BY_SIDE = 120  # columns of a terminal in which names of tests are not cut up by a table
CATALOGUE = ROOT / "tests" / "stages" / "mutants"


@dataclass(frozen=True)
class Mutant:
    name: str
    mistake: str  # what somebody might have written, in a sentence
    old: str  # occurs exactly once in the stage file
    new: str
    lesson: str  # what it would look like to a user

    def apply(self, source: str) -> str:
        """The stage file with the mistake in it. Raises ValueError unless `old` occurs exactly once."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"mutant {self.name}: its old text occurs {count} times in the stage file, not once")
        return source.replace(self.old, self.new)


def load_mutants(stage: int) -> list[Mutant]:
    """The catalogue of a stage. Raises ValueError if it has none."""
    path = CATALOGUE / f"stage_{stage}.toml"
    if not path.is_file():
        raise ValueError(f"stage {stage} has no catalogue of mutants ({path.relative_to(ROOT)})")
    return [Mutant(**m) for m in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]]


Row = tuple[str, str, str, str]  # of the table: mutant, mistake, who caught it, what it would look like; with markup


def short(test: str) -> str:
    """test_file.py::TestClass::test_name[stage4-x] -> the name in bold and the file under it."""
    name = test.partition("[")[0].split("::")[-1]
    return f"[bold]{escape(name)}[/]\n[dim]{escape(test.split('::')[0])}[/]"


def side_by_side(title: str, rows: SequenceOf[Row]) -> Table:
    table = Table(title=title, show_lines=True)
    for column, ratio in (("mutant", 3), ("mistake", 5), ("caught by", 4), ("what it would look like", 6)):
        table.add_column(column, ratio=ratio, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def one_below_another(title: str, rows: SequenceOf[Row]) -> Table:
    """The same for a narrow terminal."""
    table = Table(title=title, show_header=False, box=None, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for row in rows:
        for name, text in zip(("mutant", "mistake", "caught", "effect"), row, strict=True):
            table.add_row(name, f"[bold]{text}[/]" if name == "mutant" else text)
        table.add_row("", "")
    return table


def report(stage: Stage, chosen: SequenceOf[str], console: Console) -> int:
    """Run the mutants of a stage (all, or the chosen names), print the table, return the number of survivors.

    Raises RuntimeError if the tests fail on the unchanged stage, and ValueError for an unknown name.
    """
    mutants, source = load_mutants(stage.number), solution(stage)
    if unknown := set(chosen) - {m.name for m in mutants}:
        raise ValueError(f"stage {stage.number} has no mutant {', '.join(sorted(unknown))}")
    rows: list[Row] = []
    survivors = 0
    with console.status("the tests, on the unchanged stage") as status:
        verdict = run_tests(stage, source)
        if verdict.test:
            raise RuntimeError(f"without any mutant {verdict.test} fails already: {verdict.message}")
        for mutant in mutants:
            if chosen and mutant.name not in chosen:
                continue
            status.update(mutant.name)
            verdict = run_tests(stage, mutant.apply(source))
            survivors += verdict.test is None
            caught_by = short(verdict.test) if verdict.test else f"[bold red]survives {verdict.passed} tests"
            rows.append((mutant.name, escape(mutant.mistake), caught_by, escape(mutant.lesson)))
    title = f"Stage {stage.number}, {stage.title}: mistakes, and the tests that notice"
    console.print((side_by_side if console.width >= SIDE_BY_SIDE else one_below_another)(title, rows))
    return survivors


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.exercises.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("stage", type=int, help="number of the stage")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these mutants alone")
    args = parser.parse_args(argv)
    console = Console()
    try:
        survivors = report(load_stage(args.stage), args.only, console)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    console.print(f"{survivors} of them survived" if survivors else "Every one of them was caught.")
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(until_ctrl_c(main))
