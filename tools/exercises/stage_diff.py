"""What a stage changes against the one before it: `python -m tools.exercises.stage_diff 4`, in the terminal and as
HTML."""

import argparse
import sys
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.containers import Lines
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from tools.exercises.diff_html import write_html
from tools.exercises.stage_compare import Pair, StageDiff, compare, facts, title
from tools.exercises.stage_units import ROOT, Unit

SIDE_BY_SIDE = 120  # columns of a terminal that has room for two versions beside each other
OLD, NEW = "on #4a1f24", "on #163d24"


def summary(diff: StageDiff) -> Table:
    """What is new, changed, gone and kept, in a table of two columns."""
    table = Table(show_header=False, box=None, padding=(0, 2, 1, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in facts(diff):
        table.add_row(name, escape(text))
    return table


def render(pair: Pair) -> RenderableType:
    """One pair for the terminal: side by side, or over the whole width where there is only one side."""
    heading = Text(f"\n{title(pair)}", style="bold")
    sides = [(unit, style) for unit, style in ((pair.old, OLD), (pair.new, NEW)) if unit]
    code = [coloured(unit) for unit, _ in sides]
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0), expand=True)
    for _ in sides:
        table.add_column(width=4, justify="right", style="dim", no_wrap=True)
        table.add_column(ratio=1, overflow="fold")
    for block in pair.blocks():
        if block.skipped:
            gap = Text(f"⋯ {block.skipped} lines the same", style="dim")
            table.add_row(*[Text(), gap] * len(sides))
        chosen = [block.old, block.new] if len(sides) == 2 else [block.old if pair.old else block.new]
        for i in range(max(len(lines) for lines in chosen)):
            cells: list[Text] = []
            for (unit, style), text, lines in zip(sides, code, chosen, strict=True):
                there = i < len(lines)
                line = text[lines[i]].copy() if there else Text()
                if there and not block.equal and len(sides) == 2:
                    line.stylize(style)
                cells += [Text(str(unit.first_line + lines[i]) if there else ""), line]
            table.add_row(*cells)
    return Group(heading, table)


def render_narrow(pair: Pair) -> RenderableType:
    """The same where there is no room for two columns: what is gone, then what came in its place."""
    assert pair.old is not None and pair.new is not None
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0), expand=True)
    table.add_column(width=4, justify="right", style="dim", no_wrap=True)
    table.add_column(width=1, no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    old, new = coloured(pair.old), coloured(pair.new)
    for block in pair.blocks():
        if block.skipped:
            table.add_row("", "", Text(f"⋯ {block.skipped} lines the same", style="dim"))
        for i in block.old if not block.equal else ():
            table.add_row(str(pair.old.first_line + i), "-", old[i], style=OLD)
        for i in block.new:
            sign, style = ("", None) if block.equal else ("+", NEW)
            table.add_row(str(pair.new.first_line + i), sign, new[i], style=style)
    return Group(Text(f"\n{title(pair)}", style="bold"), table)


def coloured(unit: Unit) -> Lines:
    return Syntax("", "python", theme="ansi_dark").highlight("\n".join(unit.lines)).split("\n")


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
    against = f"against stage {diff.before.number}" if diff.before else "against nothing"
    console.print(Text(f"Stage {args.stage}: {diff.stage.title}, {against}", style="bold"))
    console.print(summary(diff))
    for pair in diff.pairs:
        narrow = console.width < SIDE_BY_SIDE and pair.old and pair.new
        console.print(render_narrow(pair) if narrow else render(pair))
    target = args.html or ROOT / "build" / "diff" / f"stage_{args.stage}.html"
    write_html(diff, target)
    console.print(f"\nThe same in a browser: {target}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
