"""What a stage changes against the one it builds on: `python -m tools.exercises.stage_diff 4`.

A stage's file is taken apart into units: its docstring, its imports, each class's head, each function, each method. The
units of two stages are paired by their keys and compared line by line. What a stage takes unchanged from earlier ones
is not in its file, and not in the diff.
"""

import argparse
import ast
import difflib
import io
import os
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Column, Table
from rich.terminal_theme import MONOKAI
from rich.text import Text

from stages.manifest import Stage, load_stage
from tools import ROOT, until_ctrl_c
from tools.exercises.exercises import Definition, definitions, docstrings, solution

CONTEXT = 3  # unchanged lines shown around a change
SIDE_BY_SIDE = 120  # columns of a terminal that has room for two versions beside each other
STYLES = {"-": "on #4a1f24", "+": "on #163d24", " ": ""}
PYTHON = Syntax("", "python", theme="ansi_dark")
PAGE_WIDTH = 180  # columns
# What rich fills in to make a page. The colours are those of a dark terminal. A light colour scheme inverts them.
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<style>
{stylesheet}
html {{ color: {foreground}; background: {background}; }}
@media (prefers-color-scheme: light) {{ html {{ filter: invert(1) hue-rotate(180deg); }} }}
</style>
<pre><code>{code}</code></pre></html>
"""
DOCSTRING, IMPORTS, ENGINE = "docstring", "imports", "engine"
NOT_CODE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER)


# --- a stage's file ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """A part of a stage's file.

    The key finds its counterpart in another stage: "make_batch", "Scheduler.preempt". The engine of every stage has the
    key "engine", since only its name changes.
    """

    stage: int
    key: str
    label: str  # the name as the file has it
    first_line: int
    lines: tuple[str, ...]
    summary: str  # first line of its docstring, if it has one
    names: frozenset[str]  # what it mentions

    @property
    def owner(self) -> str:
        """The name of a method's class. Any other unit owns itself."""
        return self.label.split(".")[0]


@dataclass(frozen=True)
class StageFile:
    number: int
    path: str  # relative to the repository
    units: dict[str, Unit]  # by key, in the order of the file
    bases: dict[str, list[str]]  # name of a class -> names of its bases
    relies_on: dict[str, list[str]]  # other files of stages/ -> the names taken from them
    num_lines: int
    num_code_lines: int

    def home(self, name: str) -> "StageFile":
        """The file of the stage that this one imports `name` from, or this file."""
        for path, names in self.relies_on.items():
            if name in names and (stage := re.match(r"stages/stage_(\d+)_", path)):
                return read_stage(int(stage[1]))
        return self


@cache
def read_stage(number: int) -> StageFile:
    """The file of stage `number`. Raises ValueError if there is no such stage."""
    stage = load_stage(number)
    source = solution(stage)
    tree = ast.parse(source)
    relies_on: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stages."):
            path = str(node.module).replace(".", "/") + ".py"
            relies_on.setdefault(path, []).extend(alias.name for alias in node.names)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    bases = {c.name: [b.id for b in c.bases if isinstance(b, ast.Name)] for c in classes}
    units = {unit.key: unit for unit in split(stage, source, tree)}
    size = len(source.splitlines()), count_code_lines(source)
    return StageFile(number, f"stages/{stage.module_name}.py", units, bases, relies_on, *size)


def split(stage: Stage, source: str, tree: ast.Module) -> Iterator[Unit]:
    """The units of a file, which together are all of its lines."""
    lines, named = source.splitlines(), definitions(tree)
    imports = next(node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
    starts: list[tuple[int, str, ast.AST]] = [(0, DOCSTRING, tree), (imports.lineno - 1, IMPORTS, imports)]
    for label, definition in named.items():
        around = named.get(label.rpartition(".")[0])
        if not isinstance(around, ast.FunctionDef):
            starts.append((first_line(definition, lines), label, definition))
    stops = [start for start, *_ in starts[1:]] + [len(lines)]
    for (start, label, node), stop in zip(starts, stops, strict=True):
        while not lines[stop - 1].strip():
            stop -= 1
        doc = ast.get_docstring(node) if isinstance(node, Definition | ast.Module) else None
        parts: list[ast.AST] = [node]
        if isinstance(node, ast.ClassDef):  # a method is a unit of its own, so the head has only fields and bases
            parts = [*node.bases, *(n for n in node.body if not isinstance(n, Definition))]
        mentioned = frozenset(n.id for part in parts for n in ast.walk(part) if isinstance(n, ast.Name))
        key = re.sub(rf"^{stage.class_name}\b", ENGINE, label)
        yield Unit(stage.number, key, label, start + 1, tuple(lines[start:stop]), (doc or "").split("\n")[0], mentioned)


def first_line(node: Definition, lines: list[str]) -> int:
    """Index of the first line of a definition, with its decorators and the comment above it."""
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    while lines[start - 1].lstrip().startswith("#"):
        start -= 1
    return start


def count_code_lines(source: str) -> int:
    """Lines that are neither blank nor only comment nor part of a docstring."""
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in NOT_CODE]
    code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(code - {line for doc in docstrings(ast.parse(source)) for line in doc})


def reach(number: int) -> set[Unit]:
    """Every unit that stage `number` consists of: those of its file and all that they use of earlier stages."""
    found: set[Unit] = set()
    todo = [unit for unit in read_stage(number).units.values() if unit.key not in (DOCSTRING, IMPORTS)]
    while todo:
        unit = todo.pop()
        if unit not in found:
            found.add(unit)
            for name in unit.names:
                todo += [u for u in read_stage(unit.stage).home(name).units.values() if u.owner == name]
    return found


def find(number: int, key: str) -> Unit | None:
    """The unit that stage `number` has under `key`: in its own file, or the latest one that it uses."""
    used = (unit for unit in reach(number) if unit.key == key)
    return read_stage(number).units.get(key) or max(used, key=lambda unit: unit.stage, default=None)


# --- two stages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Lines `old` became lines `new`. They are equal or changed. `skipped` equal lines before them are left out."""

    equal: bool
    old: range  # indices into the unit's lines
    new: range
    skipped: int = 0


@dataclass(frozen=True)
class Pair:
    """A unit of the stage and its counterpart before. `old` is None for a new unit, `new` for one that is gone."""

    old: Unit | None
    new: Unit | None

    def blocks(self) -> Iterator[Block]:
        old, new = (unit.lines if unit else () for unit in (self.old, self.new))
        end = 0
        for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(CONTEXT):
            for tag, i, i_stop, j, j_stop in group:
                yield Block(tag == "equal", range(i, i_stop), range(j, j_stop), max(0, j - end))
                end = j_stop
        if left_out := len(new) - end:
            yield Block(True, range(0), range(0), left_out)

    def sides(self, block: Block) -> list[tuple[str, Unit, range]]:
        """Each version with its lines to show, under "-" and "+", or under " " where nothing differs."""
        sides = [("-", self.old, block.old), ("+", self.new, block.new)]
        compared = self.old and self.new and not block.equal
        return [(sign if compared else " ", unit, lines) for sign, unit, lines in sides if unit]

    @property
    def title(self) -> str:
        if not self.old:
            return f"{self.new.label if self.new else ''} (new)"
        if not self.new:
            return f"{self.old.label} (gone)"
        renamed = "" if self.old.label == self.new.label else f": {self.old.label}"
        return f"{self.new.label} (changed since stage {self.old.stage}{renamed})"


@dataclass(frozen=True)
class StageDiff:
    stage: Stage
    file: StageFile
    before: StageFile | None
    pairs: list[Pair]  # everything new or changed, in the order of the file, docstring and imports last
    removed: list[Unit]  # units of the stage before that this stage no longer uses
    kept: dict[str, int]  # names that this stage uses from earlier stages -> the stage that defines them

    @property
    def title(self) -> str:
        against = f"stage {self.before.number}" if self.before else "nothing"
        return f"Stage {self.stage.number}: {self.stage.title}, against {against}"

    @property
    def added(self) -> list[Unit]:
        return [pair.new for pair in self.pairs if pair.new and not pair.old]

    @property
    def changed(self) -> list[Unit]:
        return [pair.new for pair in self.pairs if pair.new and pair.old and pair.new.key not in (DOCSTRING, IMPORTS)]

    def facts(self) -> Iterator[tuple[str, str]]:
        """The summary, as headings and texts with one item per line."""
        file, before = self.file, self.before
        yield "the idea", self.stage.idea
        yield "removes", self.stage.removes
        yield "costs", self.stage.costs
        was = f" (stage {before.number}: {before.num_lines}, {before.num_code_lines})" if before else ""
        yield "lines", f"{file.num_lines} lines, {file.num_code_lines} of them code{was}"
        uses = [f"uses {path}: {', '.join(names)}" for path, names in file.relies_on.items()]
        yield "files", "\n".join([file.path, *uses])
        if before:
            new = [f"{u.label}: {u.summary}" if u.summary else u.label for u in without_methods(self.added)]
            yield "new", "\n".join(new) or "nothing"
            yield "changed", ", ".join(u.label for u in self.changed) or "nothing"
            yield "gone", ", ".join(u.label for u in without_methods(self.removed)) or "nothing"
            kept = [f"{name} (stage {k})" for name, k in self.kept.items()]
            yield "kept", ", ".join(kept) or "nothing of earlier stages"


def without_methods(units: list[Unit]) -> list[Unit]:
    """Leave out the methods of classes that are listed themselves."""
    labels = {unit.label for unit in units}
    return [unit for unit in units if unit.label == unit.owner or unit.owner not in labels]


def compare(number: int) -> StageDiff:
    """Stage `number` against the one it builds on; stage 1 against nothing. Raises ValueError where there is none."""
    stage, file = load_stage(number), read_stage(number)
    if number == 1:
        return StageDiff(stage, file, None, code_first([Pair(None, unit) for unit in file.units.values()]), [], {})
    base = int(stage.needs[0].removeprefix("stage "))  # the one before; but stage 7 builds on stage 5
    pairs = [Pair(counterpart(file, unit, base), unit) for unit in file.units.values()]
    now, replaced = reach(number), {pair.old for pair in pairs}
    gone = {u.key: u for u in in_order(reach(base) - now - replaced) if u.key not in file.units}
    kept = {u.label: u.stage for u in in_order(now) if u.stage < number and "." not in u.key}
    differing = [pair for pair in pairs if pair.new and (pair.old is None or pair.old.lines != pair.new.lines)]
    return StageDiff(stage, file, read_stage(base), code_first(differing), in_order(gone.values()), kept)


def code_first(pairs: list[Pair]) -> list[Pair]:
    """In the order of the file, with docstring and imports at the end."""
    return sorted(pairs, key=lambda pair: pair.new is not None and pair.new.key in (DOCSTRING, IMPORTS))


def in_order(units: Iterable[Unit]) -> list[Unit]:
    return sorted(units, key=lambda unit: (unit.stage, unit.first_line))


def counterpart(file: StageFile, unit: Unit, base: int) -> Unit | None:
    """The unit of stage `base` that `unit` replaces: the one with that key, or for a method the one it overrides."""
    method = unit.label.removeprefix(unit.owner)
    overridden = [f"{name}{method}" for name in file.bases.get(unit.owner, ()) if method]
    return next(filter(None, (find(base, key) for key in (unit.key, *overridden))), None)


@cache
def coloured(unit: Unit) -> list[Text]:
    """The lines of a unit in colours."""
    return [*PYTHON.highlight("\n".join(unit.lines)).split("\n", allow_blank=True)]


# --- what is shown ----------------------------------------------------------------------------------------------------


def show(diff: StageDiff, pairs: list[Pair], console: Console) -> None:
    console.print(Text(diff.title, style="bold"))
    table = Table(show_header=False, box=None, padding=(0, 2, 1, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in diff.facts():
        table.add_row(name, escape(text))
    console.print(table)
    for pair in pairs:
        console.print(Text(f"\n{pair.title}", style="bold"))
        for block in pair.blocks():
            if block.skipped:
                console.print(Text(f"     ⋯ {block.skipped} lines the same", style="dim"))
            sides = [numbered(*side) for side in pair.sides(block)]
            if console.width >= SIDE_BY_SIDE:
                row = Table.grid(*(Column(ratio=1) for _ in sides), expand=True)
                row.add_row(*sides)
                console.print(row)
            else:  # old lines, then the new lines in their place
                console.print(*(sides[-1:] if block.equal else sides))


def numbered(sign: str, unit: Unit, lines: range) -> Table:
    """These lines of a unit behind their numbers in the file and the sign."""
    table = Table.grid(padding=(0, 1, 0, 0), expand=True)
    table.add_column(width=4, justify="right", style="dim", no_wrap=True)
    table.add_column(width=1, no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for i in lines:
        table.add_row(str(unit.first_line + i), sign, coloured(unit)[i], style=STYLES[sign])
    return table


def page(diff: StageDiff) -> str:
    """What a wide terminal shows, as an HTML file that loads nothing; and below it the code that is gone."""
    console = Console(highlight=False, width=PAGE_WIDTH, record=True, file=io.StringIO())
    show(diff, diff.pairs + [Pair(unit, None) for unit in diff.removed], console)
    return console.export_html(theme=MONOKAI, code_format=PAGE)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.exercises.stage_diff", description=__doc__.splitlines()[0])
    parser.add_argument("stage", type=int, help="number of the stage")
    parser.add_argument("--html", type=Path, metavar="FILE", help="where to write the HTML (build/diff/stage_N.html)")
    args = parser.parse_args(argv)
    try:
        diff = compare(args.stage)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    console = Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)
    target = args.html or ROOT / "build" / "diff" / f"stage_{args.stage}.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(diff), encoding="utf-8")
    show(diff, diff.pairs, console)
    console.print(f"\nThe same in a browser: {target}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(until_ctrl_c(main))
