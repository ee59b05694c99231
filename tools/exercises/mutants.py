"""Plant plausible mistakes, one at a time, and show which test catches each: `python -m tools.exercises.mutants 4`.

A mutant is a stage file with one replacement, listed in tests/stages/mutants/stage_N.toml, or an elective's, listed in
tests/electives/mutants. The tests of the stage run
on the mutant up to the first failure. A mutant that survives is a hole in the tests (DeMillo, Lipton & Sayward, "Hints
on Test Data Selection", 1978).

`run_tests` runs the tests of a stage on any text of its file: a learner's, a text with a hole, a mutant. The text takes
the place of the learner's file, as a package `exercises` in a temporary directory. All runs share the calling process,
because importing torch and transformers takes longer than most of them.
"""

import argparse
import contextlib
import difflib
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
from rich.syntax import Syntax
from rich.table import Table

from stages.manifest import Chapter, load_chapter
from tools import ROOT, until_ctrl_c
from tools.exercises.exercises import PACKAGE, solution

SECONDS_PER_TEST = 120  # some mistakes never end, and that is how they are caught
TESTS = {"stage": "tests/stages", "elective": "tests/electives"}


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


def load_mutants(stage: Chapter) -> list[Mutant]:
    """The catalogue of a stage or elective. Raises ValueError if it has none."""
    path = ROOT / TESTS[stage.kind] / "mutants" / f"{stage.kind}_{stage.name}.toml"
    if not path.is_file():
        raise ValueError(f"{stage.kind} {stage.name} has no catalogue of mutants ({path.relative_to(ROOT)})")
    return [Mutant(**m) for m in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]]


@dataclass(eq=False)  # pytest keeps its plugins in sets
class Verdict:
    """pytest's plugin for one run: which test failed first, and what it said."""

    test: str | None = None
    message: str = ""
    passed: int = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        if report.failed and self.test is None:
            self.test = report.nodeid.removeprefix("tests/stages/").removeprefix("tests/electives/")
            crash = getattr(report.longrepr, "reprcrash", None)
            self.message = crash.message if crash else str(report.longrepr)


def run_tests(stage: Chapter, source: str, target: str | None = None) -> Verdict:
    """The tests of `stage` (those in `target`), up to the first failure, with `source` for its file.

    Raises RuntimeError with pytest's output if no test failed and yet the run did not pass: a test file that cannot be
    imported, or no test to run.
    """
    verdict, output = Verdict(), io.StringIO()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "exercises" / stage.file
        file.parent.mkdir(parents=True)
        (Path(directory) / "exercises" / "__init__.py").write_text(PACKAGE, encoding="utf-8")
        file.write_text(source, encoding="utf-8")
        for name in list(sys.modules):  # what an earlier run imported must not answer for this one
            if name.split(".")[0] == "exercises" or name.startswith(("tests.stages", "tests.electives")):
                del sys.modules[name]
        importlib.invalidate_caches()
        search_path = shlex.join([directory, str(ROOT)])  # before a real exercises/ of the learner
        command = [target or TESTS[stage.kind], f"--{stage.kind}={stage.name}", "--impl=exercises", "-x", "-q"]
        # Not needed, and slow: to look for plugins takes longer than many a run, and the last collects all garbage of
        # this process several times
        command += ["--disable-plugin-autoload", "-ppytest_timeout", "-pno:cacheprovider", "-pno:unraisableexception"]
        command += ["-o", f"pythonpath={search_path}", f"--timeout={SECONDS_PER_TEST}"]
        with contextlib.chdir(ROOT), contextlib.redirect_stdout(output):
            code = pytest.main(command, plugins=[verdict])
    if verdict.test is None and code != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest {shlex.join(command)} ended with {code!r}:\n{output.getvalue()}")
    return verdict


def caught_by(verdict: Verdict) -> str:
    """test_file.py::TestClass::test_name[stage4-x] -> the name in bold, and the file."""
    if verdict.test is None:
        return f"[bold red]survives {verdict.passed} tests"
    file, *_, name = verdict.test.partition("[")[0].split("::")
    return f"[bold]{escape(name)}[/] [dim]{escape(file)}[/]"


def changes(source: str, mutated: str) -> Syntax:
    """The lines in which the two differ, as a diff in colours."""
    diff = list(difflib.unified_diff(source.splitlines(), mutated.splitlines(), n=0, lineterm=""))[2:]
    return Syntax("\n".join(diff), "diff", theme="monokai", background_color="default", word_wrap=True)


def report(stage: Chapter, chosen: SequenceOf[str], console: Console) -> int:
    """Run the mutants of a stage (all, or the chosen names), show each at once, return the number of survivors.

    Raises RuntimeError if the tests fail on the unchanged stage, and ValueError for an unknown name.
    """
    mutants, source = load_mutants(stage), solution(stage)
    if unknown := set(chosen) - {m.name for m in mutants}:
        raise ValueError(f"{stage.kind} {stage.name} has no mutant {', '.join(sorted(unknown))}")
    mutants = [m for m in mutants if not chosen or m.name in chosen]
    console.print(
        f"{stage.kind.capitalize()} {stage.name}, {stage.title}: mistakes, and the tests that notice\n", style="italic"
    )
    survivors = 0
    with console.status("the tests, on the unchanged stage") as status:
        verdict = run_tests(stage, source)
        if verdict.test:
            raise RuntimeError(f"without any mutant {verdict.test} fails already: {verdict.message}")
        for number, mutant in enumerate(mutants, start=1):
            status.update(f"{number} of {len(mutants)}: {mutant.name}")
            mutated = mutant.apply(source)
            verdict = run_tests(stage, mutated)
            survivors += verdict.test is None
            table = Table(show_header=False, box=None, pad_edge=False)
            table.add_column()
            table.add_column(overflow="fold")
            table.add_row("mutant", f"[bold]{mutant.name}[/]")
            table.add_row("mistake", escape(mutant.mistake))
            table.add_row("change", changes(source, mutated))
            table.add_row("caught by", caught_by(verdict))
            table.add_row("effect", f"{escape(mutant.lesson)}\n")
            console.print(table)
    return survivors


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.exercises.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("stage", help="number of the stage, or name of the elective")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these mutants alone")
    args = parser.parse_args(argv)
    console = Console()
    try:
        survivors = report(load_chapter(args.stage), args.only, console)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    console.print(f"{survivors} of them survived" if survivors else "Every one of them was caught.")
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(until_ctrl_c(main))
