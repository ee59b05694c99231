"""Exercises are cut from the solution: `python -m tools.exercises.exercises 4` writes
exercises/stage_4_prefix_caching.py.

A stage file marks its holes, which is all there is to maintain:

    # exercise 4.2: what to write
    #   more of the hint
    the solution
    # end exercise

`cut` replaces each solution by a NotImplementedError that carries the hint. Everything else stays, so the file imports
from earlier stages what the solution imports, and `make stage-4-test IMPL=exercises` runs the same tests against it.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from stages.manifest import Stage, load_stage

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 120

OPEN = re.compile(r"( *)# exercise (\d+\.\d+): (.+)")
MORE = re.compile(r" *#   (.+)")
CLOSE = re.compile(r" *# end exercise")


@dataclass(frozen=True)
class Hole:
    name: str  # "4.2"
    hint: str
    indent: int
    first: int  # index of the line with the marker
    code: int  # index of the solution's first line
    end: int  # index of the closing marker

    @property
    def num_code_lines(self) -> int:
        return self.end - self.code

    @property
    def num_lines(self) -> int:
        return self.end - self.first


def find_holes(source: str) -> list[Hole]:
    """The exercises of a stage file in order. Raises ValueError for a marker without its partner."""
    holes: list[Hole] = []
    lines = source.splitlines()
    i = 0
    while i < len(lines):
        opened = OPEN.fullmatch(lines[i])
        if not opened:
            if "# exercise" in lines[i] or CLOSE.fullmatch(lines[i]):
                raise ValueError(f"line {i + 1}: {lines[i].strip()!r} opens no exercise and closes none")
            i += 1
            continue
        first, hint = i, [opened[3]]
        i += 1
        while i < len(lines) and (more := MORE.fullmatch(lines[i])):
            hint.append(more[1])
            i += 1
        code = i
        while i < len(lines) and not CLOSE.fullmatch(lines[i]):
            if "# exercise" in lines[i]:
                break
            i += 1
        if i == len(lines) or not CLOSE.fullmatch(lines[i]):
            raise ValueError(f"line {first + 1}: exercise {opened[2]} has no '# end exercise'")
        holes.append(Hole(opened[2], " ".join(hint), len(opened[1]), first, code, i))
        i += 1
    return holes


def cut(source: str, holes: Set[str] | None = None) -> str:
    """`source` with the named holes open; None opens all, an empty set none. Raises ValueError for an unknown name."""
    found = find_holes(source)
    unknown = (holes or set()) - {hole.name for hole in found}
    if unknown:
        raise ValueError(f"no exercise {', '.join(sorted(unknown))}; there are {', '.join(h.name for h in found)}")
    lines = source.splitlines()
    for hole in reversed(found):
        if holes is None or hole.name in holes:
            lines[hole.code : hole.end] = raise_statement(hole)
    return "\n".join(lines) + "\n"


def raise_statement(hole: Hole) -> Iterator[str]:
    """`raise NotImplementedError("exercise 4.2: ...")`, laid out as ruff would."""
    margin = " " * hole.indent
    message = f"exercise {hole.name}: {hole.hint}"
    line = f"{margin}raise NotImplementedError({quoted(message)})"
    if len(line) <= WIDTH:
        yield line
        return
    yield f"{margin}raise NotImplementedError("
    pieces = textwrap.wrap(message, WIDTH - hole.indent - 8, break_long_words=False)
    for i, piece in enumerate(pieces):
        yield f"{margin}    {quoted(piece + (' ' if i < len(pieces) - 1 else ''))}"
    yield f"{margin})"


def quoted(text: str) -> str:
    """A string literal, double-quoted unless that would need escapes."""
    text = text.replace("\\", "\\\\")
    if '"' not in text:
        return f'"{text}"'
    return "'" + text.replace("'", "\\'") + "'"


def exercise_source(stage: Stage, holes: Set[str] | None = None) -> str:
    """The learner's file: the solution of `stage` with holes, under two lines that say what to do with it."""
    solution = ROOT / "stages" / f"{stage.module_name}.py"
    head = (
        "# Yours to finish: put your own code in the place of each NotImplementedError.\n"
        f"# Check it: make stage-{stage.number}-test IMPL=exercises     The solution: stages/{solution.name}\n"
    )
    return head + cut(solution.read_text(encoding="utf-8"), holes)


def holes_from(stage: Stage, checkpoint: int) -> set[str]:
    """The holes that are still open when one comes to number `checkpoint`; after the last one, none.

    Raises ValueError for a number that is no such place.
    """
    names = [
        hole.name for hole in find_holes((ROOT / "stages" / f"{stage.module_name}.py").read_text(encoding="utf-8"))
    ]
    if not 1 <= checkpoint <= len(names) + 1:
        raise ValueError(
            f"stage {stage.number} has checkpoints 1 to {len(names) + 1}, and {checkpoint} is none of them"
        )
    return {name for name in names if int(name.split(".")[1]) >= checkpoint}


def write_exercise(stage: Stage, directory: Path, *, holes: Set[str] | None = None, force: bool = False) -> Path:
    """Write the exercise file of `stage` into `directory` (made if absent) and return its path.

    `holes` as in `cut`. Raises FileExistsError where there is a file already, which may be somebody's work. With
    `force` that file is kept under a new name ending in .bak.
    """
    target = directory / f"{stage.module_name}.py"
    if target.exists():
        if not force:
            raise FileExistsError(
                f"{directory.name}/{target.name} is there already, and may hold your work, so it stays as it is. "
                f"To begin again: make stage-{stage.number}-exercise ARGS=--force "
                f"(the old file is kept as {free_name(target).name})"
            )
        target.rename(free_name(target))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "__init__.py").touch()
    target.write_text(exercise_source(stage, holes), encoding="utf-8")
    return target


def free_name(target: Path) -> Path:
    """target.bak, or target.2.bak and so on: no earlier work is ever overwritten."""
    candidate, n = target.with_name(f"{target.name}.bak"), 1
    while candidate.exists():
        n += 1
        candidate = target.with_name(f"{target.name}.{n}.bak")
    return candidate


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.exercises.exercises", description=__doc__.splitlines()[0])
    parser.add_argument("stage", type=int, help="number of the stage")
    parser.add_argument("--force", action="store_true", help="begin again; the old file is kept as .bak")
    parser.add_argument(
        "--checkpoint", type=int, metavar="K", help="as --force, with the exercises before number K filled in"
    )
    args = parser.parse_args(argv)
    try:
        stage = load_stage(args.stage)
        holes = None if args.checkpoint is None else holes_from(stage, args.checkpoint)
        written = write_exercise(stage, ROOT / "exercises", holes=holes, force=args.force or holes is not None)
    except (ValueError, FileExistsError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{written.relative_to(ROOT)}: {stage.title}")
    for hole in find_holes(written.read_text(encoding="utf-8")):
        if holes is not None and hole.name not in holes:
            continue
        print(textwrap.fill(f"  {hole.name}  {hole.hint}", WIDTH, subsequent_indent="       "))
    print(f"Fill the holes, then: make stage-{stage.number}-test IMPL=exercises")
    return 0


if __name__ == "__main__":
    sys.exit(main())
