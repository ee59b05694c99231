"""Show which exercises are filled in, which of them pass, and what to do next: `make progress`.

    make progress                     reads exercises/ and what earlier runs have recorded: at once
    make progress ARGS=--run          also runs the tests of every stage that has changed since, which takes a while

Electives count like stages. What `make stage-N-test IMPL=exercises` or `make elective-N-test IMPL=exercises` finds is
kept in exercises/progress.json together with a digest of the file (tests/stages/conftest.py and
tests/electives/conftest.py do that). A result whose digest is not that of the file is ignored.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stages.manifest import Chapter, load_electives, load_stages
from tools import ROOT, until_ctrl_c
from tools.exercises.exercises import find_holes, solution

EXERCISES = ROOT / "exercises"


@dataclass(frozen=True)
class Result:
    """What the tests found in one version of a learner's file."""

    digest: str
    failed: str | None  # the first test that failed
    passed: int
    wrong: list[str] = field(default_factory=list)  # exercises that are filled in, and fail their own tests


@dataclass(frozen=True)
class Progress:
    stage: Chapter
    open_holes: list[str]  # names of the exercises that are still to be filled in
    holes: int
    written: bool  # whether the learner's file is there
    result: Result | None  # None: never run, or the file has changed since

    @property
    def wrong(self) -> list[str]:
        """Exercises that are filled in, and not well."""
        return self.result.wrong if self.result else []

    @property
    def done(self) -> bool:
        return self.written and not self.open_holes and self.result is not None and self.result.failed is None

    @property
    def next_step(self) -> str:
        make = f"make {self.stage.kind}-{self.stage.name}"
        if not self.written:
            return f"read {notebook(self.stage)}, then {make}-exercise"
        if todo := sorted(self.open_holes + self.wrong):
            verb = "fill in" if todo[0] in self.open_holes else "mend"
            return f"{verb} exercise {todo[0]} in exercises/{self.stage.file}"
        if self.result is None:
            return f"{make}-test IMPL=exercises (or make progress ARGS=--run)"
        if self.result.failed:
            return f"mend {self.result.failed.split('::')[-1]}: {make}-test IMPL=exercises"
        return "done"

    @property
    def drawn(self) -> str:
        """A square for each exercise: right, not tested yet, wrong or open."""
        squares = []
        for name in (hole.name for hole in find_holes(solution(self.stage))):
            if name in self.open_holes:
                squares.append("[dim]□[/]")
            elif name in self.wrong:
                squares.append("[red]▣[/]")
            else:
                squares.append("[green]■[/]" if self.done else "■")
        return " ".join(squares)


def notebook(stage: Chapter) -> str:
    """Where a stage or an elective is explained. A stage's notebook has a target that opens it."""
    if stage.kind == "stage":
        return f"make stage-{stage.name}-notebook"
    [path] = (ROOT / "notebooks").glob(f"*_{stage.slug}.py")
    return f"notebooks/{path.stem}.ipynb"


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_results(directory: Path) -> dict[str, Result]:
    """The recorded results by the name of the stage's module. A damaged record counts as none."""
    try:
        raw = json.loads((directory / "progress.json").read_text(encoding="utf-8"))
        return {name: Result(**result) for name, result in raw.items()}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return {}


def save_result(directory: Path, stage: Chapter, result: Result) -> None:
    results = load_results(directory) | {stage.module_name: result}
    text = json.dumps({name: asdict(r) for name, r in results.items()}, indent=2)
    (directory / "progress.json").write_text(text + "\n", encoding="utf-8")


def read_progress(stage: Chapter, directory: Path) -> Progress:
    names = [hole.name for hole in find_holes(solution(stage))]
    path = directory / stage.file
    if not path.is_file():
        return Progress(stage, names, len(names), False, None)
    text = path.read_text(encoding="utf-8")
    unfinished = [
        name for name in names if re.search(rf"NotImplementedError\([\"']exercise {re.escape(name)}[\"']", text)
    ]
    result = load_results(directory).get(stage.module_name)
    known = result if result and result.digest == digest_of(text) else None
    return Progress(stage, unfinished, len(names), True, known)


def run_tests(stage: Chapter, *options: str) -> int:
    """Run pytest on the learner's file of a stage, with a dot for each test. Returns pytest's exit code."""
    tests = f"tests/{stage.kind}s"
    command = [sys.executable, "-m", "pytest", tests, f"--{stage.kind}={stage.name}", "--impl=exercises"]
    quick_start = ["-pno:nbval", "-pno:schemathesis"]
    return subprocess.run([*command, "-q", *quick_start, *options], cwd=ROOT).returncode


def show(all_progress: list[Progress], console: Console) -> None:
    table = Table()
    for heading in ("chapter", "exercises", "tests"):
        table.add_column(heading, overflow="fold")
    for p in all_progress:
        tests = "–"
        if p.result is not None:
            tests = f"[green]{p.result.passed} pass[/]"
            if p.result.failed:
                tests = (
                    f"[red]{p.result.passed} pass, then one fails[/]" if p.result.passed else "[red]the first fails[/]"
                )
        name = f"{'[green]✓[/] ' if p.done else ''}{p.stage.name} {p.stage.title}"
        table.add_row(name, p.drawn if p.written else "not begun", tests)
    console.print(table)
    holes = sum(p.holes for p in all_progress)
    right = sum(p.holes for p in all_progress if p.done)
    console.print(f"{'█' * right}{'░' * (holes - right)} {right} of {holes} exercises in chapters that pass")
    console.print("■ filled in   [red]▣[/] wrong   [dim]□[/] open")
    todo = [p for p in all_progress if not p.done]
    # What is begun comes first, and an elective comes only when it is begun
    following = next((p for p in todo if p.written), next((p for p in todo if p.stage.kind == "stage"), None))
    if following is not None:
        console.print(f"Next: {following.stage.kind} {following.stage.name}: {escape(following.next_step)}")
        return
    console.print("All stages are done. On to the engine: notebook 8, and nanovllm/.")
    for p in todo:
        console.print(f"Or elective {p.stage.name}: {escape(p.next_step)}")


def main(argv: list[str] | None = None, directory: Path = EXERCISES) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.exercises.progress", description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="store_true", help="run the tests of what is filled in and has changed")
    args = parser.parse_args(argv)
    stages: list[Chapter] = [*load_stages(), *load_electives()]
    console = Console(highlight=False)
    for stage in stages if args.run else []:
        p = read_progress(stage, directory)
        if p.written and p.result is None:
            console.print(f"{stage.kind} {stage.name}: running its tests")
            run_tests(stage, "--tb=no")  # which records what it finds
    show([read_progress(stage, directory) for stage in stages], console)
    return 0


if __name__ == "__main__":
    sys.exit(until_ctrl_c(main))
