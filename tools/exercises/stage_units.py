"""A stage file taken apart into units: its docstring, its imports, each class's head, each function, each method.

A unit has a key, by which its counterpart in another stage is found wherever that stands: "make_batch",
"Scheduler.preempt". The engine of every stage has the key "engine", since only its name changes. What a stage takes
from earlier ones, by import or by inheritance, is followed to where it is written.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from stages.manifest import load_stage, load_stages
from tools.exercises.exercises import solution

DOCSTRING, IMPORTS, ENGINE = "docstring", "imports", "engine"
NOT_CODE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER)

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
        """The key of a method's class. Any other unit owns itself."""
        return self.key.split(".")[0]


@dataclass(frozen=True)
class StageFile:
    number: int
    path: str  # relative to the repository
    units: dict[str, Unit]  # by key, in the order of the file
    keys: dict[str, str]  # top-level names -> their keys, which differ only for the engine
    imported: dict[str, int]  # names imported from an earlier stage's file -> the number of that stage
    bases: dict[str, list[str]]  # key of a class -> names of its bases
    relies_on: dict[str, list[str]]  # other files of stages/ -> the names taken from them
    num_lines: int
    num_code_lines: int


@cache
def read_stage(number: int) -> StageFile:
    """The file of stage `number`. Raises ValueError if there is no such stage."""
    stage = load_stage(number)
    source = solution(stage)
    tree = ast.parse(source)
    by_module = {f"stages.{s.module_name}": s.number for s in load_stages()}
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
    units = {unit.key: unit for unit in split(number, source, tree, keys)}
    size = len(source.splitlines()), count_code_lines(source)
    return StageFile(number, f"stages/{stage.module_name}.py", units, keys, imported, bases, relies_on, *size)


def split(number: int, source: str, tree: ast.Module, keys: dict[str, str]) -> Iterator[Unit]:
    """The units of a file, which together are all of its lines."""
    lines = source.splitlines()
    first_import = next(node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
    starts: list[tuple[int, str, str, ast.AST]] = [
        (0, DOCSTRING, DOCSTRING, tree),
        (first_import.lineno - 1, IMPORTS, IMPORTS, first_import),
    ]
    for top in tree.body:
        if not isinstance(top, Definition):
            continue
        starts.append((first_line(top, lines), keys[top.name], top.name, top))
        for method in top.body if isinstance(top, ast.ClassDef) else []:
            if isinstance(method, Definition):
                names = f"{keys[top.name]}.{method.name}", f"{top.name}.{method.name}"
                starts.append((first_line(method, lines), *names, method))
    stops = [start for start, *_ in starts[1:]] + [len(lines)]
    for (start, key, label, node), stop in zip(starts, stops, strict=True):
        while not lines[stop - 1].strip():
            stop -= 1
        doc = ast.get_docstring(node) if isinstance(node, Definition | ast.Module) else None
        parts: list[ast.AST] = [] if key in (DOCSTRING, IMPORTS) else [node]
        if isinstance(node, ast.ClassDef):  # a method is a unit of its own, so the head has only fields and bases
            parts = [*node.bases, *(n for n in node.body if not isinstance(n, Definition))]
        mentioned = frozenset(n.id for part in parts for n in ast.walk(part) if isinstance(n, ast.Name))
        yield Unit(number, key, label, start + 1, tuple(lines[start:stop]), (doc or "").split("\n")[0], mentioned)


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
        if token.type in NOT_CODE:
            at_start = at_start or token.type == tokenize.NEWLINE
        elif not (at_start and token.type == tokenize.STRING):
            code.update(range(token.start[0], token.end[0] + 1))
            at_start = False
    return len(code)


def find(number: int, key: str) -> Unit | None:
    """The unit that stage `number` has under `key`: in its own file, or where the file imports or inherits it from."""
    file = read_stage(number)
    if key in file.units:
        return file.units[key]
    owner, dot, method = key.partition(".")
    if owner in file.imported:
        return find(file.imported[owner], key)
    return find_in_bases(file, owner, method) if dot else None


def find_in_bases(file: StageFile, owner: str, method: str) -> Unit | None:
    """The method that the class `owner` inherits, which stands in `file` or in the stage of the base class."""
    for base in file.bases.get(owner, []):
        home = read_stage(file.imported[base]) if base in file.imported else file
        if base in home.keys and (found := find(home.number, f"{home.keys[base]}.{method}")):
            return found
    return None


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
