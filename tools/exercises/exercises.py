"""Exercises are cut from their solutions: `python -m tools.exercises.exercises 4` writes the one of stage 4.

    4     a stage with holes: exercises/stage_4_prefix_caching.py. The stage's own tests check it.
    moe   an elective with holes, in exercises/electives.
    4a    an exercise of the lecture on stage 4, beyond the holes. The same command checks it from the second call on.
          The text is in lectures/exercises.md, our solution in lectures/solutions, the check in tests/lectures/checks.

A solution marks its holes, which is all there is to maintain:

    # exercise 4.2: what to write
    #   more of the hint
    # instead: return 0, 0
    the solution
    # end exercise

`cut` replaces each solution by what stands after `# instead:` (a line for each line of code), and where nothing stands
there, by a NotImplementedError that names the exercise; the hint stands above it. Everything else stays, so the
learner's file imports what the solution imports. How long a hole takes, and how hard it is, stands in stages.toml.
"""

import argparse
import ast
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from stages.manifest import Chapter, load_chapter, load_electives, load_stages
from tools import ROOT

SOLUTIONS = ROOT / "lectures" / "solutions"
CHECKS = ROOT / "tests" / "lectures" / "checks"
WIDEST = 120  # characters of a line, however wide the terminal is
PACKAGE = '''"""What you have written. Tests end loops that never end, in the processes of stage 7's ranks as well."""

import os

if "NANOVLLM_WATCH_LOOPS" in os.environ:
    from tests.stages.endless import watch

    watch()
'''  # the text of exercises/__init__.py

HOLE = re.compile(
    r"^(?P<indent> *)# exercise (?P<name>\d+[a-z]|\w+\.\d+): (?P<hint>.+\n(?: *#   .+\n)*)"
    r"(?P<instead>(?: *# instead:.*\n)*)"
    r"(?P<code>(?:(?! *# end exercise|.*# exercise).*\n)*) *# end exercise$",
    re.MULTILINE,
)
MARKER = re.compile(r" *(?:.*# exercise.*|# end exercise.*)")

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Hole:
    """An exercise in a source file. Lines are counted from 0."""

    name: str  # "4.2", or "4a"
    hint: str
    indent: int
    instead: tuple[str, ...]  # code that the learner begins with; () is a NotImplementedError
    first: int  # line of the marker that opens the hole
    begin: int  # first line after the hint, where the learner's code stands
    code: int  # first line of the solution
    end: int  # line of the marker that closes the hole

    @property
    def num_code_lines(self) -> int:
        return self.end - self.code


def solution(stage: Chapter) -> str:
    """The source of the file of a stage or an elective."""
    return (ROOT / "stages" / stage.file).read_text(encoding="utf-8")


def find_holes(source: str) -> list[Hole]:
    """The exercises of a source file in order. Raises ValueError for a marker without its partner."""
    holes: list[Hole] = []
    for match in HOLE.finditer(source):
        first, begin, code = (source.count("\n", 0, match.start(part)) for part in ("name", "instead", "code"))
        hint = " ".join(line.strip().removeprefix("#").strip() for line in match["hint"].splitlines())
        instead = tuple(line.partition("# instead:")[2].removeprefix(" ") for line in match["instead"].splitlines())
        end = code + match["code"].count("\n")
        holes.append(Hole(match["name"], hint, len(match["indent"]), instead, first, begin, code, end))
    paired = {line for hole in holes for line in (hole.first, hole.end)}
    for number, line in enumerate(source.splitlines()):
        if MARKER.fullmatch(line) and number not in paired:
            raise ValueError(
                f"line {number + 1}: {line.strip()!r} has no partner ('# exercise 4.2: ...', '# end exercise')"
            )
    return holes


def line_width() -> int:
    """How long a printed line may be: as long as the terminal is wide, or 80 where there is none."""
    return min(WIDEST, shutil.get_terminal_size().columns)


def definitions(tree: ast.AST, prefix: str = "") -> dict[str, Definition]:
    """The functions, classes and methods of a file by their names: "allocate", "BlockPool.allocate"."""
    found: dict[str, Definition] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            found[prefix + node.name] = node
            found |= definitions(node, f"{prefix}{node.name}.")
    return found


def docstrings(tree: ast.AST) -> Iterator[range]:
    """The lines of every docstring in it, counted from 1."""
    for node in ast.walk(tree):
        if isinstance(node, Definition | ast.Module) and ast.get_docstring(node):
            yield range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def cut(source: str, holes: Set[str] | None = None) -> str:
    """`source` with the named holes open, or all for None. Raises ValueError for an unknown name."""
    found = find_holes(source)
    unknown = (holes or set()) - {hole.name for hole in found}
    if unknown:
        raise ValueError(f"no exercise {', '.join(sorted(unknown))}; there are {', '.join(h.name for h in found)}")
    lines = source.splitlines()
    for hole in reversed(found):
        if holes is None or hole.name in holes:
            code = hole.instead or [f'raise NotImplementedError("exercise {hole.name}")']
            lines[hole.begin : hole.end] = [" " * hole.indent + line for line in code if line]
    return "\n".join(lines) + "\n"


# --- the stages' ------------------------------------------------------------------------------------------------------


def exercise_source(stage: Chapter, holes: Set[str] | None = None) -> str:
    """The learner's file: the solution of `stage` with holes, under two lines that say what to do with it."""
    head = (
        "# Yours to finish: put your own code in the place of each NotImplementedError.\n"
        f"# Check it: make {stage.kind}-{stage.name}-test IMPL=exercises     "
        f"The solution: stages/{stage.file}\n"
    )
    return head + cut(solution(stage), holes)


def holes_from(stage: Chapter, checkpoint: int) -> set[str]:
    """The holes from number `checkpoint` on. One more than the number of holes is the finished file, without holes.

    Raises ValueError for any other number.
    """
    names = [hole.name for hole in find_holes(solution(stage))]
    if not 1 <= checkpoint <= len(names) + 1:
        raise ValueError(
            f"{stage.kind} {stage.name} has checkpoints 1 to {len(names) + 1}, and {checkpoint} is none of them"
        )
    return {name for name in names if int(name.split(".")[1]) >= checkpoint}


def listing(stage: Chapter, holes: Set[str] | None = None, *, width: int) -> str:
    """The named exercises of a stage (None: all), with minutes, difficulty and hint."""
    lines = []
    for hole, (minutes, difficulty) in zip(find_holes(solution(stage)), stage.exercises, strict=True):
        if holes is None or hole.name in holes:
            lines.append(f"  {hole.name}  about {minutes} minutes, difficulty {difficulty} of 3")
            lines.append(textwrap.fill(hole.hint, width, initial_indent=" " * 7, subsequent_indent=" " * 7))
    return "\n".join(lines)


def write_stage(stage: Chapter, directory: Path, *, checkpoint: int | None = None, force: bool = False) -> Path:
    """Write the learner's file of a stage, and print its open holes with their hints. Returns the file's path.

    With `checkpoint`, the holes before that number are filled in. Raises FileExistsError where there is a file already,
    which may be somebody's work, unless `force` or `checkpoint` asks for a new one.
    """
    target, make = directory / stage.file, f"make {stage.kind}-{stage.name}"
    if target.exists() and not force and checkpoint is None:
        raise FileExistsError(
            f"{directory.name}/{stage.file} is there already, and may hold your work, so it stays as it is. "
            f"To begin again: {make}-exercise ARGS=--force (the old file is kept as {free_name(target).name})"
        )
    holes = None if checkpoint is None else holes_from(stage, checkpoint)
    write(target, exercise_source(stage, holes))
    print(f"{directory.name}/{stage.file}: {stage.title}")
    if holes is None or holes:
        print(listing(stage, holes, width=line_width()))
    print(f"{'No hole is left' if holes == set() else 'Fill the holes, then'}: {make}-test IMPL=exercises")
    return target


def write(target: Path, text: str) -> None:
    """Write a learner's file, and make its directory if needed. An older file is kept as .bak."""
    if target.exists():
        target.rename(free_name(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    (target.parent / "__init__.py").write_text(PACKAGE, encoding="utf-8")
    target.write_text(text, encoding="utf-8")


def free_name(target: Path) -> Path:
    """target.bak, or target.2.bak and so on: no earlier work is ever overwritten."""
    endings = itertools.chain([".bak"], (f".{n}.bak" for n in itertools.count(2)))
    return next(path for ending in endings if not (path := target.with_name(target.name + ending)).exists())


# --- the lectures' ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LectureExercise:
    name: str  # "4a"
    title: str  # what is asked for, in a line
    text: str
    solution: Path

    @property
    def stage(self) -> int:
        return int(self.name[:-1])

    @property
    def check(self) -> Path:
        return CHECKS / f"check_{self.solution.name}"

    def source(self) -> str:
        """The learner's file: the solution with its holes open, and the text in the place of its docstring."""
        text = self.solution.read_text(encoding="utf-8")
        docstring = ast.parse(text).body[0]
        code = "".join(text.splitlines(keepends=True)[docstring.end_lineno :])
        return f'"""Exercise {self.name}: {self.title}\n\n{self.text}\n"""\n{cut(code)}'


def lecture_exercises() -> dict[str, LectureExercise]:
    """The exercises of lectures/exercises.md by name, in order. Raises ValueError unless each has one solution."""
    page = (ROOT / "lectures" / "exercises.md").read_text(encoding="utf-8")
    found = {}
    for name, title, text in re.findall(r"^## (\w+): (.+)\n((?:(?!## ).*\n)*)", page, re.MULTILINE):
        solutions = list(SOLUTIONS.glob(f"stage_{name}_*.py"))
        if len(solutions) != 1:
            raise ValueError(f"exercise {name} has {len(solutions)} solutions in lectures/solutions, not one")
        found[name] = LectureExercise(name, title, text.strip(), solutions[0])
    return found


def run_check(exercise: LectureExercise, directory: Path) -> int:
    """Run pytest on the exercise's check, with the learner's file in `directory`. Returns pytest's exit code."""
    import pytest  # here, so that slides can be built without it

    alone = ["-c", os.devnull, f"--rootdir={CHECKS}", f"--confcutdir={CHECKS}", "-p", "no:cacheprovider"]
    alone += ["--disable-plugin-autoload"]  # they take seconds to start
    shown = ["-q", "--tb=short", "--import-mode=importlib"]
    return int(pytest.main([str(exercise.check), f"--answers={directory}", *alone, *shown]))


def begin_or_check(exercise: LectureExercise, directory: Path, *, force: bool) -> int:
    """Write the learner's file and print the text, or check the file that is there. Returns an exit code."""
    mine = directory / exercise.solution.name
    if mine.exists() and not force:
        return run_check(exercise, directory)
    write(mine, exercise.source())
    print(f"Exercise {exercise.name}: {exercise.title}\n\n{exercise.text}\n")
    print(f"Your file: {directory.name}/{mine.name}. The same command checks it from now on.")
    return 0


def main(argv: list[str] | None = None, directory: Path = ROOT / "exercises") -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.exercises.exercises", description=__doc__.splitlines()[0])
    parser.add_argument("name", help="4 is stage 4 with its holes, moe an elective; 4a an exercise of lecture 4")
    parser.add_argument("--force", action="store_true", help="begin again; the old file is kept as .bak")
    parser.add_argument(
        "--checkpoint", type=int, metavar="K", help="as --force, with the holes of the stage before number K filled in"
    )
    parser.add_argument("--solution", action="store_true", help="check our solution of a lecture's exercise")
    args = parser.parse_args(argv)
    try:
        if args.name.isdecimal() or args.name in {elective.name for elective in load_electives()}:
            write_stage(load_chapter(args.name), directory, checkpoint=args.checkpoint, force=args.force)
            return 0
        exercises = lecture_exercises()
        if args.name not in exercises:
            names = *(str(s.number) for s in load_stages()), *(e.name for e in load_electives()), *exercises
            raise ValueError(f"there is no exercise {args.name!r}; there are {', '.join(names)}")
        if args.solution:
            return run_check(exercises[args.name], SOLUTIONS)
        return begin_or_check(exercises[args.name], directory, force=args.force)
    except (ValueError, FileExistsError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
