"""A stage file taken apart into units: its docstring, its imports, each class's head, each function, each method.

A unit has a key, by which it is recognised in another stage whatever has been moved: "make_batch", "Scheduler.preempt".
The engine of every stage has the key "engine", since only its name changes. What a stage takes from earlier ones, by
import or by inheritance, is followed to where it is written.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stages.manifest import Stage, load_stages

ROOT = Path(__file__).resolve().parents[2]
DOCSTRING, IMPORTS, ENGINE = "docstring", "imports", "engine"
_NOT_CODE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER)

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Unit:
    stage: int
    key: str
    label: str  # the name as the file has it
    first_line: int
    lines: tuple[str, ...]
    summary: str  # first line of its docstring, if it has one
    names: frozenset[str]  # what it mentions

    @property
    def owner(self) -> str:
        """Key of the class of a method; of anything else, its own."""
        return self.key.split(".")[0]


@dataclass(frozen=True)
class StageFile:
    number: int
    path: str  # relative to the repository
    units: dict[str, Unit]  # by key, in the order of the file
    keys: dict[str, str]  # what the file's top-level names have as keys: all the same but for the engine
    imported: dict[str, int]  # names that come from an earlier stage's file, and which
    bases: dict[str, list[str]]  # key of a class -> names of its bases
    relies_on: dict[str, list[str]]  # other files of stages/ -> the names taken from them
    num_lines: int
    num_code_lines: int


@cache
def read_stage(number: int) -> StageFile:
    """The file of stage `number`. Raises ValueError if there is no such stage."""
    stages = {stage.number: stage for stage in load_stages()}
    if number not in stages:
        raise ValueError(f"there is no stage {number}; there are {', '.join(map(str, stages))}")
    stage = stages[number]
    path = f"stages/{stage.module_name}.py"
    source = (ROOT / path).read_text(encoding="utf-8")
    tree = ast.parse(source)
    by_module = {f"stages.{s.module_name}": s.number for s in stages.values()}
    imported: dict[str, int] = {}
    relies_on: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stages."):
            module, names = str(node.module), [alias.name for alias in node.names]
            relies_on.setdefault(module.replace(".", "/") + ".py", []).extend(names)
            if module in by_module:
                imported |= dict.fromkeys(names, by_module[module])
    top = [node for node in tree.body if isinstance(node, Definition)]
    keys = {node.name: ENGINE if node.name == stage.class_name else node.name for node in top}
    classes = [node for node in top if isinstance(node, ast.ClassDef)]
    bases = {keys[c.name]: [b.id for b in c.bases if isinstance(b, ast.Name)] for c in classes}
    units = {unit.key: unit for unit in split(stage, source, tree)}
    lines = source.splitlines()
    return StageFile(number, path, units, keys, imported, bases, relies_on, len(lines), count_code_lines(source))


def split(stage: Stage, source: str, tree: ast.Module) -> Iterator[Unit]:
    """The units of a file, which together are all of its lines."""
    lines = source.splitlines()
    starts: list[tuple[int, str, str, ast.AST]] = [(0, DOCSTRING, DOCSTRING, tree)]
    first_import = next(node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
    starts.append((first_import.lineno - 1, IMPORTS, IMPORTS, first_import))
    for top in tree.body:
        if not isinstance(top, Definition):
            continue
        key = ENGINE if top.name == stage.class_name else top.name
        starts.append((first_line(top, lines), key, top.name, top))
        for method in top.body if isinstance(top, ast.ClassDef) else []:
            if isinstance(method, Definition):
                label = f"{top.name}.{method.name}"
                starts.append((first_line(method, lines), f"{key}.{method.name}", label, method))
    for i, (start, key, label, node) in enumerate(starts):
        stop = starts[i + 1][0] if i + 1 < len(starts) else len(lines)
        while not lines[stop - 1].strip():
            stop -= 1
        doc = ast.get_docstring(node) if isinstance(node, Definition | ast.Module) else None
        # A method is a unit of its own, so the head of a class mentions only what its fields and bases do
        parts: list[ast.AST] = [node]
        if isinstance(node, ast.ClassDef):
            parts = [*node.bases, *(n for n in node.body if not isinstance(n, Definition))]
        named = [] if key in (DOCSTRING, IMPORTS) else [n for part in parts for n in ast.walk(part)]
        names = frozenset(n.id for n in named if isinstance(n, ast.Name))
        summary = (doc or "").split("\n")[0]
        yield Unit(stage.number, key, label, start + 1, tuple(lines[start:stop]), summary, names)


def first_line(node: Definition, lines: list[str]) -> int:
    """Index of the first line of a definition, with its decorators and the comment above it."""
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    while lines[start - 1].lstrip().startswith("#"):
        start -= 1
    return start


def count_code_lines(source: str) -> int:
    """Lines that are neither blank nor only comment nor part of a docstring."""
    code: set[int] = set()
    at_start = True  # of a statement: a string there is a docstring
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _NOT_CODE:
            at_start = at_start or token.type == tokenize.NEWLINE
        elif not (at_start and token.type == tokenize.STRING):
            code.update(range(token.start[0], token.end[0] + 1))
            at_start = False
    return len(code)


def find(number: int, key: str) -> Unit | None:
    """What a reader of stage `number` finds under `key`: in its file, or where that imports or inherits it from."""
    file = read_stage(number)
    if key in file.units:
        return file.units[key]
    owner, dot, method = key.partition(".")
    if owner in file.imported:
        return find(file.imported[owner], key)
    for base in file.bases.get(owner, []) if dot else []:
        if found := find_in_base(file, base, method):
            return found
    return None


def find_in_base(file: StageFile, base: str, method: str) -> Unit | None:
    """The method of a base class, which stands in `file` or in the stage that it is imported from."""
    home = read_stage(file.imported[base]) if base in file.imported else file
    return find(home.number, f"{home.keys[base]}.{method}") if base in home.keys else None


def reach(number: int) -> dict[tuple[int, str], Unit]:
    """Every unit that stage `number` consists of: those of its file and all that they use of earlier stages."""
    found: dict[tuple[int, str], Unit] = {}
    todo = [unit for unit in read_stage(number).units.values() if unit.key not in (DOCSTRING, IMPORTS)]
    while todo:
        unit = todo.pop()
        if (unit.stage, unit.key) in found:
            continue
        found[unit.stage, unit.key] = unit
        file = read_stage(unit.stage)
        for name in unit.names:
            home = read_stage(file.imported[name]) if name in file.imported else file
            if name in home.keys:
                todo += [u for u in home.units.values() if u.owner == home.keys[name]]
    return found
