"""Plausible mistakes, planted one at a time: `python -m tools.mutants 4` shows which test catches each of them.

A mutant is a stage file with one replacement, listed in tests/stages/mutants/stage_N.toml. It takes the place of the
learner's file (a package `exercises` in a temporary directory) and runs the same tests, up to the first failure. A
mutant that survives is a hole in the tests (DeMillo, Lipton & Sayward, "Hints on Test Data Selection", 1978).

All runs share this one process, because importing torch and transformers takes longer than most of them.
"""

import argparse
import contextlib
import importlib
import io
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stages.manifest import Stage, load_stage

ROOT = Path(__file__).resolve().parent.parent
CATALOGUE = ROOT / "tests" / "stages" / "mutants"
SECONDS_PER_TEST = 30  # some mistakes never end, and that is how they are caught


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


@dataclass
class Verdict:
    """pytest's plugin for one run: which test failed first, and what it said."""

    test: str | None = None
    message: str = ""
    passed: int = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        self.note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.note(report)

    def note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and self.test is None:
            self.test = report.nodeid.removeprefix("tests/stages/")
            crash = getattr(report.longrepr, "reprcrash", None)
            self.message = crash.message if crash else str(report.longrepr)


def load_mutants(stage: int) -> list[Mutant]:
    path = CATALOGUE / f"stage_{stage}.toml"
    if not path.is_file():
        return []
    return [Mutant(**m) for m in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]]


def read_solution(stage: Stage) -> str:
    return (ROOT / "stages" / f"{stage.module_name}.py").read_text(encoding="utf-8")


def run_tests(stage: Stage, source: str, arguments: SequenceOf[str] = ()) -> Verdict:
    """The stage's tests, up to the first failure, with `source` in the place of the learner's file.

    Raises RuntimeError with pytest's output if the run neither passed nor failed (say, no test was selected).
    """
    verdict, output = Verdict(), io.StringIO()
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory) / "exercises"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / f"{stage.module_name}.py").write_text(source, encoding="utf-8")
        for name in list(sys.modules):  # what an earlier run imported must not answer for this one
            if name.split(".")[0] == "exercises" or name.startswith("tests.stages"):
                del sys.modules[name]
        importlib.invalidate_caches()
        command = ["tests/stages", f"--stage={stage.number}", "--impl=exercises", "-x", "-q", "-p", "no:cacheprovider"]
        search_path = shlex.join([directory, str(ROOT)])  # before a real exercises/ of the learner
        command += ["-o", f"pythonpath={search_path}", f"--timeout={SECONDS_PER_TEST}", *arguments]
        with contextlib.chdir(ROOT), contextlib.redirect_stdout(output):
            code = pytest.main(command, plugins=[verdict])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED) or (
        code != pytest.ExitCode.OK and verdict.test is None
    ):
        raise RuntimeError(f"pytest {shlex.join(command)} ended with {code!r}:\n{output.getvalue()}")
    return verdict


def report(stage: Stage, chosen: SequenceOf[str], console: Console) -> int:
    """Run the mutants of a stage (all, or the chosen names), print the table, return the number of survivors.

    Raises RuntimeError if the tests fail on the unchanged stage, and ValueError for an unknown name.
    """
    mutants, source = load_mutants(stage.number), read_solution(stage)
    if unknown := set(chosen) - {m.name for m in mutants}:
        raise ValueError(f"stage {stage.number} has no mutant {', '.join(sorted(unknown))}")
    table = Table(title=f"Stage {stage.number}, {stage.title}: mistakes, and the tests that notice", show_lines=True)
    for column, ratio in (("mutant", 3), ("mistake", 5), ("caught by", 4), ("what it would look like", 6)):
        table.add_column(column, ratio=ratio, overflow="fold")
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
            caught_by = escape(verdict.test) if verdict.test else f"[bold red]survives {verdict.passed} tests"
            table.add_row(mutant.name, escape(mutant.mistake), caught_by, escape(mutant.lesson))
    console.print(table)
    return survivors


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__.splitlines()[0])
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
    sys.exit(main())
