"""The diff of a stage as one HTML file: it loads nothing, follows light and dark, and fits a phone."""

from collections.abc import Iterable
from html import escape
from pathlib import Path

from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers import PythonLexer  # type: ignore[import-untyped]

from tools.exercises.stage_compare import Block, Pair, StageDiff, facts, title
from tools.exercises.stage_units import Unit

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1f2328; --dim: #656d76; --line: #d1d9e0; --head: #f6f8fa;
  --old: #ffebe9; --new: #dafbe1; --keyword: #8250df; --string: #0a5c9e; --comment: #57606a; --name: #0550ae; }
@media (prefers-color-scheme: dark) { :root { --bg: #0d1117; --fg: #e6edf3; --dim: #9198a1; --line: #3d444d;
  --head: #151b23; --old: #4a1f24; --new: #163d24; --keyword: #d2a8ff; --string: #a5d6ff; --comment: #9da7b3;
  --name: #79c0ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 110rem; padding: 1rem; background: var(--bg); color: var(--fg);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1rem; margin: 0; padding: .5rem .75rem; background: var(--head); }
h2, .facts dd, summary { overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: .4rem 1rem; max-width: 70rem; }
.facts dt { font-weight: 600; } .facts dd { margin: 0; white-space: pre-line; }
section { border: 1px solid var(--line); border-radius: 6px; margin: 1rem 0; overflow: hidden; }
.block { display: grid; grid-template-columns: 1fr 1fr; } .block.single { grid-template-columns: 1fr; }
.side { min-width: 0; padding: 0 .5rem; font: .8rem/1.45 ui-monospace, SFMono-Regular, Consolas, monospace; }
.side + .side { border-left: 1px solid var(--line); }
.changed .old:not(:empty) { background: var(--old); } .changed .new:not(:empty) { background: var(--new); }
.row { display: grid; grid-template-columns: 2.6em 1fr; }
.row > span { color: var(--dim); user-select: none; text-align: right; padding-right: .8em; }
.row > code { font: inherit; white-space: pre-wrap; overflow-wrap: anywhere; min-width: 0; }
.gap { color: var(--dim); background: var(--head); padding: 0 .75rem; font-size: .8rem; }
summary { cursor: pointer; font-weight: 600; }
.k, .kn, .kc, .ow { color: var(--keyword); } .s1, .s2, .sd, .sa, .si { color: var(--string); }
.c1 { color: var(--comment); font-style: italic; } .nc, .nf, .fm { color: var(--name); font-weight: 600; }
@media (max-width: 50rem) { body { padding: .6rem; } .block { grid-template-columns: 1fr; } .side { padding: 0 .25rem; }
  .equal .old { display: none; } .side + .side { border-left: 0; } .facts { grid-template-columns: 1fr; gap: 0; }
  .facts dd { margin-bottom: .6rem; } .row { grid-template-columns: 2.2em 1fr; }
  .changed .old:not(:empty)::before { content: "before"; } .changed .new:not(:empty)::before { content: "after"; }
  .changed .side::before { color: var(--dim); font-family: system-ui, sans-serif; } }
"""


def write_html(diff: StageDiff, target: Path) -> None:
    """Write the page of `diff` to `target`, with the directories that it needs."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(diff), encoding="utf-8")


def page(diff: StageDiff) -> str:
    against = f"against stage {diff.before.number}" if diff.before else "against nothing"
    heading = escape(f"Stage {diff.stage.number}: {diff.stage.title}, {against}")
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts(diff))
    gone = "".join(section(Pair(unit, None)) for unit in diff.removed)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{heading}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{heading}</h1>\n"
        f'<dl class="facts">{listed}</dl>\n'
        + "\n".join(section(pair) for pair in diff.pairs)
        + (f"\n<details><summary>What is gone</summary>{gone}</details>" if gone else "")
        + "\n</body>\n</html>\n"
    )


def section(pair: Pair) -> str:
    old, new = (highlighted(unit) if unit else [] for unit in (pair.old, pair.new))
    body = "".join(block(pair, b, old, new) for b in pair.blocks())
    return f"<section><h2>{escape(title(pair))}</h2>{body}</section>"


def block(pair: Pair, b: Block, old: list[str], new: list[str]) -> str:
    gap = f'<div class="gap">⋯ {b.skipped} lines the same</div>' if b.skipped else ""
    if not b.old and not b.new:
        return gap
    if pair.old is None or pair.new is None:  # not coloured: all of it is new, or all of it is gone
        unit, code, lines = (pair.new, new, b.new) if pair.new else (pair.old, old, b.old)
        return f'{gap}<div class="block single">{side("", unit, code, lines)}</div>'
    sides = side("old", pair.old, old, b.old) + side("new", pair.new, new, b.new)
    return f'{gap}<div class="block {"equal" if b.equal else "changed"}">{sides}</div>'


def side(name: str, unit: Unit | None, code: list[str], lines: Iterable[int]) -> str:
    first = unit.first_line if unit else 0
    rows = "".join(f'<div class="row"><span>{first + i}</span><code>{code[i]}</code></div>' for i in lines)
    return f'<div class="side {name}">{rows}</div>'


def highlighted(unit: Unit) -> list[str]:
    """The lines of a unit as HTML; spans do not reach across lines."""
    lexer, formatter = PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)
    html: str = highlight("\n".join(unit.lines), lexer, formatter)
    return html.removesuffix("\n").split("\n")
