"""Fetch what slides show from where it is: code of the stages, outputs of the notebooks, measured figures.

Everything is fetched by its name when the slides are built, so a slide never shows an old version. A name that does not
exist raises ValueError. The caller turns that into an error with file and line.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import runpy
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.lib import tables
from benchmarks.lib.harness import RESULTS
from stages.manifest import load_stage
from tools import ROOT
from tools.exercises.exercises import Hole, definitions, docstrings, find_holes

EXPERIMENTS = ROOT / "lectures" / "experiments"  # each program is beside what it printed: NAME.py and NAME.txt
HINT_WIDTH = 100  # characters of a line of a hint, where a slide shows the hint instead of the solution


@dataclass(frozen=True)
class Code:
    label: str  # file and name, for the line above the code
    lines: tuple[str, ...]
    marked: frozenset[int] = frozenset()  # indices of the lines to highlight


def read(path: str) -> str:
    file = ROOT / path
    if not file.is_file():
        raise ValueError(f"there is no file {path}")
    return file.read_text(encoding="utf-8")


def pull_code(path: str, name: str, *options: str, opened: bool = False) -> Code:
    """The definition of that name. An exercise's number ("4.2") gives the definition around it, its lines marked.

    Docstrings and the exercises' markers are left out. Options: "from", TEXT and "to", TEXT, which stand in the first
    and the last line to be shown. opened=True shows the hint in place of the exercise's solution.
    """
    text = read(path)
    lines, holes, named = text.splitlines(), find_holes(text), definitions(ast.parse(text))
    hole = next((hole for hole in holes if hole.name == name), None)
    if hole is None and re.fullmatch(r"\d+\.\d+", name):
        raise ValueError(f"{path} has no exercise {name}; it has {', '.join(h.name for h in holes) or 'none'}")
    if hole:  # the innermost definition around it
        around = {n: node for n, node in named.items() if node.lineno <= hole.first < (node.end_lineno or 0)}
        name = max(around, key=lambda n: around[n].lineno)
    elif name not in named:
        raise ValueError(f"nothing is called {name}")
    node = named[name]
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    skipped = {i for h in holes for i in (*range(h.first, h.code), h.end)}
    for doc in docstrings(node):  # and the blank line after it
        skipped |= {line - 1 for line in doc} | ({doc.stop - 1} if lines[doc.stop - 1 : doc.stop] == [""] else set())
    shown: list[tuple[str, bool]] = []
    for i in range(first, node.end_lineno or 0):
        inside = hole is not None and hole.code <= i < hole.end
        if hole is not None and opened and inside:
            shown += [(line, True) for line in open_hole(hole)] if i == hole.code else []
        elif i not in skipped:
            shown.append((lines[i], inside))
    shown = cut_out(shown, options)
    texts = textwrap.dedent("\n".join(line for line, _ in shown)).splitlines()
    marked = frozenset(i for i, (_, inside) in enumerate(shown) if inside)
    return Code(f"{Path(path).name} · {name}", tuple(texts), marked)


def open_hole(hole: Hole) -> list[str]:
    margin = " " * hole.indent
    hint = textwrap.wrap(f"{hole.name}: {hole.hint}", HINT_WIDTH - hole.indent - 2)
    return [*(f"{margin}# {line}" for line in hint), f"{margin}..."]


def cut_out(shown: list[tuple[str, bool]], options: Sequence[str]) -> list[tuple[str, bool]]:
    given = dict(zip(options[::2], options[1::2], strict=False))
    if len(options) % 2 or not given.keys() <= {"from", "to"}:
        raise ValueError(f"{' '.join(options)!r} is neither 'from TEXT' nor 'to TEXT' nor both")
    start = position(shown, given["from"], 0) if "from" in given else 0
    stop = position(shown, given["to"], start) + 1 if "to" in given else len(shown)
    return shown[start:stop]


def position(shown: list[tuple[str, bool]], text: str, start: int) -> int:
    for i, (line, _) in enumerate(shown[start:], start=start):
        if text in line:
            return i
    raise ValueError(f"no line with {text!r} there")


@cache
def cells(path: str) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(read(path))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def find_cell(path: str, text: str) -> dict[str, Any]:
    """The one code cell of a notebook that contains `text`."""
    found = [cell for cell in cells(path) if text in "".join(cell["source"])]
    if len(found) != 1:
        raise ValueError(f"{len(found)} cells of {path} contain {text!r}; name one")
    return found[0]


def pull_png(path: str, text: str) -> str:
    """The picture that a cell drew, as base64."""
    data = [output["data"] for output in find_cell(path, text)["outputs"] if "data" in output]
    pictures: list[str] = ["".join(d["image/png"]) for d in data if "image/png" in d]
    if not pictures:
        raise ValueError(f"the cell of {path} with {text!r} has no picture")
    return pictures[-1].replace("\n", "")


def pull_output(path: str, text: str, pattern: str = "") -> str:
    """What a cell printed, without the line of the reader's guess. With a pattern: only the lines that match it."""
    printed = "".join("".join(o["text"]) for o in find_cell(path, text)["outputs"] if o["output_type"] == "stream")
    lines = [line for line in printed.rstrip().splitlines() if not line.startswith("your guess:")]
    return matching(lines, pattern, f"the cell of {path} with {text!r}")


def experiments() -> list[Path]:
    """Small programs whose output lectures show. They print nothing that depends on the machine, such as times."""
    return sorted(EXPERIMENTS.glob("*.py"))


def printed_by(path: Path) -> str:
    """What an experiment prints, run as a script within this process."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def pull_printed(name: str, pattern: str = "") -> str:
    """What a program in lectures/experiments printed. With a pattern: only the lines that match it."""
    path = EXPERIMENTS / f"{name}.txt"
    if not path.is_file():
        raise ValueError(f"there is no lectures/experiments/{name}.txt; run make slides ARGS=--experiments")
    return matching(path.read_text(encoding="utf-8").splitlines(), pattern, f"the experiment {name}")


def matching(lines: list[str], pattern: str, who: str) -> str:
    lines = [line for line in lines if re.search(pattern, line)]
    if not "".join(lines).strip():
        raise ValueError(f"{who} printed nothing" + (f" like {pattern!r}" if pattern else ""))
    return "\n".join(lines).strip("\n")


@cache
def result(name: str) -> tables.Result:
    return tables.load(name, RESULTS)


def figure(name: str, key: str) -> dict[str, Any]:
    figures: dict[str, dict[str, Any]] = {f["key"]: f for f in result(name)["figures"]}
    if key not in figures:
        raise ValueError(f"{name} has no figure {key!r}; it has {', '.join(figures)}")
    return figures[key]


def pull_value(name: str, key: str, contender: str) -> str:
    """A measured figure with its unit: "166 ms"."""
    found = figure(name, key)
    if contender not in found["values"]:
        raise ValueError(f"{name} has no {contender!r}; it has {', '.join(found['values'])}")
    return tables.with_unit(found["values"][contender]["median"], found["unit"])


def pull_gain(name: str, key: str) -> str:
    """How many times better the stage is than its rival: "5.14×", or "0.71×" where the stage is worse."""
    return tables.ratio(figure(name, key), result(name)["contender"], result(name)["rival"])


def pull_table(name: str, *keys: str) -> str:
    """A table in Markdown: one row per figure, one column per contender of any of these figures."""
    figures = [figure(name, key) for key in keys]
    names = list(dict.fromkeys(who for f in figures for who in f["values"]))
    rows = tables.head("", *names, "gain")
    for f in figures:
        values = [pull_value(name, f["key"], who) if who in f["values"] else "–" for who in names]
        rows.append(tables.row(f["label"], *values, pull_gain(name, f["key"])))
    return "\n".join(rows)


def pull_source(name: str) -> str:
    """Where and when a result was measured."""
    found = result(name)
    return f"{found['workload']}. Measured on {tables.machine(found)}."


def pull_found(path: str, text: str, pattern: str) -> str:
    """What the pattern's first group matches in what a cell printed (the whole match, if the pattern has no group)."""
    found = re.search(pattern, pull_output(path, text))
    if not found:
        raise ValueError(f"what the cell with {text!r} printed has nothing like {pattern!r}")
    return found[found.re.groups and 1]


def pull_model(key: str) -> str:
    """A whole number from the configuration of the embedded model: "4,096" for "vocab_size"."""
    value = json.loads(read("assets/story_model/config.json")).get(key)
    if not isinstance(value, int):
        raise ValueError(f"the embedded model's config.json has no whole number {key!r}")
    return f"{value:,}"


def pull_inline(words: Sequence[str]) -> str:
    """What stands between {{ and }}: `value stage_4 turns "stage 3"`, `gain stage_4 turns`, `stage 4 idea`, `found`
    with NOTEBOOK CELL PATTERN, or `model vocab_size`."""
    match list(words):
        case ["value", name, key, contender]:
            return pull_value(name, key, contender)
        case ["gain", name, key]:
            return pull_gain(name, key)
        case ["found", path, text, pattern]:
            return pull_found(path, text, pattern)
        case ["model", key]:
            return pull_model(key)
        case ["stage", number, ("title" | "idea" | "removes" | "costs" | "showcase") as what]:
            return str(getattr(load_stage(int(number)), what))
    raise ValueError(f"{' '.join(words)!r} is none of value, gain, found, model and stage with what belongs to them")
