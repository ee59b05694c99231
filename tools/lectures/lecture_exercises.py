"""The exercises of the lectures, two a stage beyond the holes: `python -m tools.lectures.lecture_exercises 4a`.

The first call copies the starting file into exercises/, where it is the learner's own; later calls check it, as often
as it takes. The text of an exercise is the docstring of its starting file. `--solution` checks ours instead.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from stages.manifest import load_stage
from tools.exercises.exercises import ROOT

LECTURES = ROOT / "lectures"
STARTS, SOLUTIONS, CHECKS = LECTURES / "exercises", LECTURES / "solutions", LECTURES / "checks"
FILE = re.compile(r"stage_(?P<name>(?P<stage>\d+)[a-z])_\w+")


@dataclass(frozen=True)
class Exercise:
    name: str  # "4a"
    stage: int
    stem: str  # of its three files
    text: str  # the docstring of the starting file

    @property
    def title(self) -> str:
        """What is asked for, in a line: the first of the text, without the name."""
        return self.text.splitlines()[0].split(": ", 1)[1]

    @property
    def check(self) -> Path:
        return CHECKS / f"check_{self.stem}.py"


def all_exercises() -> list[Exercise]:
    """In order. Raises ValueError for a starting file without a text that begins with its name."""
    found = []
    for path in sorted(STARTS.glob("stage_*.py")):
        match = FILE.fullmatch(path.stem)
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if not match or not text.startswith(f"Exercise {match['name']}: "):
            raise ValueError(f"{path.name} is no exercise: its docstring begins with 'Exercise 4a: ', as its name says")
        found.append(Exercise(match["name"], int(match["stage"]), path.stem, text))
    return found


def exercises_of(stage: int) -> list[Exercise]:
    found = [exercise for exercise in all_exercises() if exercise.stage == load_stage(stage).number]
    if not found:
        raise ValueError(f"there are no exercises beyond the holes for stage {stage}")
    return found


def run_check(exercise: Exercise, directory: Path) -> int:
    """pytest on the exercise's check, with the file that lies in `directory`; pytest's exit code."""
    import pytest  # here, so that slides can be built without it

    command = [str(exercise.check), f"--answers={directory}", "-q", "-p", "no:cacheprovider", f"--rootdir={LECTURES}"]
    return int(pytest.main([*command, "-c", os.devnull, "--import-mode=importlib", "--tb=short"]))


def main(arguments: list[str] | None = None, directory: Path = ROOT / "exercises") -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.lectures.lecture_exercises", description=__doc__.splitlines()[0]
    )
    parser.add_argument("name", help="4a, for example")
    parser.add_argument("--solution", action="store_true", help="check the project's solution")
    options = parser.parse_args(arguments)
    exercises = {exercise.name: exercise for exercise in all_exercises()}
    if options.name not in exercises:
        print(f"there is no exercise {options.name!r}; there are {', '.join(exercises)}", file=sys.stderr)
        return 1
    exercise = exercises[options.name]
    mine = directory / f"{exercise.stem}.py"
    if options.solution:
        return run_check(exercise, SOLUTIONS)
    if not mine.exists():
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(STARTS / mine.name, mine)
        print(f"{exercise.text}\n\nYour file: {directory.name}/{mine.name}. The same command checks it from now on.")
        return 0
    return run_check(exercise, directory)


if __name__ == "__main__":
    sys.exit(main())
