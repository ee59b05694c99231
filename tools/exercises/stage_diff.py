"""What a stage changes against the one it builds on: `python -m tools.exercises.stage_diff 4`.

Units of the two stages (`stage_units`) are paired by their keys and compared line by line. What a stage takes unchanged
from earlier ones is not in its file, and not in the diff.
"""

import argparse
import difflib
import html
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from string import Template

from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers import PythonLexer  # type: ignore[import-untyped]
from rich.console import Console, Group, RenderableType
from rich.containers import Lines
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from stages.manifest import Stage, load_stage
from tools import ROOT
from tools.exercises.stage_units import DOCSTRING, IMPORTS, StageFile, Unit, find, find_in_bases, reach, read_stage

CONTEXT = 3  # unchanged lines shown around a change
SIDE_BY_SIDE = 120  # columns of a terminal that has room for two versions beside each other
OLD, NEW = "on #4a1f24", "on #163d24"


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
        if self.old is None or self.new is None:
            old, new = (len(unit.lines) if unit else 0 for unit in (self.old, self.new))
            yield Block(False, range(old), range(new))
            return
        end = 0
        for group in difflib.SequenceMatcher(None, self.old.lines, self.new.lines, False).get_grouped_opcodes(CONTEXT):
            for tag, i, i_stop, j, j_stop in group:
                yield Block(tag == "equal", range(i, i_stop), range(j, j_stop), max(0, j - end))
                end = j_stop
        if left_out := len(self.new.lines) - end:
            yield Block(True, range(0), range(0), left_out)

    @property
    def title(self) -> str:
        if self.new is None or self.old is None:
            unit, what = (self.new, "new") if self.new else (self.old, "gone")
            return f"{unit.label if unit else ''} ({what})"
        renamed = "" if self.old.label == self.new.label else f": {self.old.label}"
        return f"{self.new.label} (changed since stage {self.old.stage}{renamed})"


@dataclass(frozen=True)
class StageDiff:
    stage: Stage
    file: StageFile
    before: StageFile | None
    pairs: list[Pair]  # everything new or changed, in the order of the file
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
    keys = {unit.key for unit in units}
    return [unit for unit in units if "." not in unit.key or unit.owner not in keys]


def compare(number: int) -> StageDiff:
    """Stage `number` against the one it builds on; stage 1 against nothing. Raises ValueError where there is none."""
    stage, file = load_stage(number), read_stage(number)
    if number == 1:
        return StageDiff(stage, file, None, [Pair(None, unit) for unit in file.units.values()], [], {})
    base = int(stage.needs[0].removeprefix("stage "))  # the one before; but stage 7 builds on stage 5
    pairs = [Pair(counterpart(file, unit, base), unit) for unit in file.units.values()]
    now, replaced = reach(number), {(pair.old.stage, pair.old.key) for pair in pairs if pair.old}
    before = [unit for where, unit in sorted(reach(base).items()) if where not in now and where not in replaced]
    gone = {unit.key: unit for unit in before if unit.key not in file.units}
    used = [unit for unit in now.values() if unit.stage < number and "." not in unit.key]
    kept = {unit.label: unit.stage for unit in in_order(used)}
    differing = [pair for pair in pairs if pair.new and (pair.old is None or pair.old.lines != pair.new.lines)]
    return StageDiff(stage, file, read_stage(base), differing, in_order(gone.values()), kept)


def in_order(units: Iterable[Unit]) -> list[Unit]:
    return sorted(units, key=lambda unit: (unit.stage, unit.first_line))


def counterpart(file: StageFile, unit: Unit, base: int) -> Unit | None:
    """The unit of stage `base` that `unit` replaces: the one with that key, or for a method the one it overrides."""
    owner, _, method = unit.key.partition(".")
    if found := find(base, unit.key) or (method and find_in_bases(file, owner, method)):
        return found
    return next((u for u in reach(base).values() if u.key == unit.key), None)


# --- in the terminal --------------------------------------------------------------------------------------------------


def show(diff: StageDiff, console: Console) -> None:
    console.print(Text(diff.title, style="bold"))
    table = Table(show_header=False, box=None, padding=(0, 2, 1, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in diff.facts():
        table.add_row(name, escape(text))
    console.print(table)
    for pair in diff.pairs:
        narrow = console.width < SIDE_BY_SIDE and pair.old and pair.new
        console.print(Group(Text(f"\n{pair.title}", style="bold"), (one_column if narrow else columns)(pair)))


def code_table(*, sides: int = 1, signs: bool = False) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0), expand=True)
    for _ in range(sides):
        table.add_column(width=4, justify="right", style="dim", no_wrap=True)
        if signs:
            table.add_column(width=1, no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
    return table


def columns(pair: Pair) -> RenderableType:
    """The two sides of a pair beside each other, or the only one that there is over the whole width."""
    sides = [(unit, coloured(unit), style) for unit, style in ((pair.old, OLD), (pair.new, NEW)) if unit]
    table = code_table(sides=len(sides))
    for block in pair.blocks():
        if block.skipped:
            gap = Text(f"⋯ {block.skipped} lines the same", style="dim")
            table.add_row(*[Text(), gap] * len(sides))
        lines = [block.old, block.new] if len(sides) == 2 else [block.old or block.new]
        for numbers in zip_longest(*lines):
            cells: list[RenderableType] = []
            for i, (unit, code, style) in zip(numbers, sides, strict=True):
                line = Text() if i is None else code[i].copy()
                if i is not None and not block.equal and len(sides) == 2:
                    line.stylize(style)
                cells += ["" if i is None else str(unit.first_line + i), line]
            table.add_row(*cells)
    return table


def one_column(pair: Pair) -> RenderableType:
    """The pair for a narrow terminal: old lines, then the new lines in their place."""
    assert pair.old is not None and pair.new is not None
    table = code_table(signs=True)
    old, new = coloured(pair.old), coloured(pair.new)
    for block in pair.blocks():
        if block.skipped:
            table.add_row("", "", Text(f"⋯ {block.skipped} lines the same", style="dim"))
        for i in block.old if not block.equal else ():
            table.add_row(str(pair.old.first_line + i), "-", old[i], style=OLD)
        for i in block.new:
            sign, style = ("", None) if block.equal else ("+", NEW)
            table.add_row(str(pair.new.first_line + i), sign, new[i], style=style)
    return table


def coloured(unit: Unit) -> Lines:
    return Syntax("", "python", theme="ansi_dark").highlight("\n".join(unit.lines)).split("\n")


# --- as a page --------------------------------------------------------------------------------------------------------


def page(diff: StageDiff) -> str:
    """One HTML file, which loads nothing, follows light and dark, and fits a phone."""
    facts = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in diff.facts())
    gone = "".join(section(Pair(unit, None)) for unit in diff.removed)
    return Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8")).substitute(
        title=html.escape(diff.title),
        facts=facts,
        units="\n".join(section(pair) for pair in diff.pairs),
        gone=f"\n<details><summary>What is gone</summary>{gone}</details>" if gone else "",
    )


def section(pair: Pair) -> str:
    blocks = []
    for block in pair.blocks():
        old, new = side("old", pair.old, block.old), side("new", pair.new, block.new)
        if block.skipped:
            blocks.append(f'<div class="gap">⋯ {block.skipped} lines the same</div>')
        if pair.old is None or pair.new is None:  # not coloured, since all lines are new or all are gone
            only = side("", pair.new, block.new) if pair.new else side("", pair.old, block.old)
            blocks.append(f'<div class="block single">{only}</div>')
        elif block.old or block.new:
            blocks.append(f'<div class="block {"equal" if block.equal else "changed"}">{old}{new}</div>')
    return f"<section><h2>{html.escape(pair.title)}</h2>{''.join(blocks)}</section>"


def side(name: str, unit: Unit | None, lines: Iterable[int]) -> str:
    if unit is None:
        return ""
    numbered = ((unit.first_line + i, highlighted(unit)[i]) for i in lines)
    rows = "".join(f'<div class="row"><span>{number}</span><code>{code}</code></div>' for number, code in numbered)
    return f'<div class="side {name}">{rows}</div>'


@cache
def highlighted(unit: Unit) -> list[str]:
    """The lines of a unit as HTML; spans do not reach across lines."""
    shown: str = highlight("\n".join(unit.lines), PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    return shown.removesuffix("\n").split("\n")


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
    console = Console(highlight=False)
    show(diff, console)
    target = args.html or ROOT / "build" / "diff" / f"stage_{args.stage}.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(diff), encoding="utf-8")
    console.print(f"\nThe same in a browser: {target}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
