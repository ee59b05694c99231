"""Who imports whom and which class extends which, read from the source: what `test_architecture.py` judges."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """One import statement in `module` of `target`, the most precise module name that the statement tells.

    `on_load` is true where importing `module` executes it: outside functions and `if TYPE_CHECKING`. A condition
    or a `try` around it makes it no less eager.
    """

    module: str
    target: str
    line: int
    on_load: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"

    def of(self, *names: str) -> bool:
        """Whether the target is one of these modules or lies inside one of these packages."""
        return inside(self.target, *names)


def inside(module: str, *names: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


class Sources:
    """Parsed modules by dotted name, their imports and their classes."""

    def __init__(self, texts: Mapping[str, str], packages: frozenset[str] = frozenset()) -> None:
        self.trees = {name: ast.parse(text) for name, text in texts.items()}
        self.packages = packages
        self.imports = {name: list(self._imports(name)) for name in self.trees}

    @classmethod
    def read(cls, root: Path, *packages: str) -> "Sources":
        texts, inits = {}, set()
        for package in packages:
            for path in sorted((root / package).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                texts[name] = path.read_text()
                if parts[-1] == "__init__":
                    inits.add(name)
        return cls(texts, frozenset(inits))

    def all_imports(self, *inside_of: str) -> Iterator[Import]:
        """The imports of every module, or of those inside the named packages."""
        for name, imports in self.imports.items():
            if not inside_of or inside(name, *inside_of):
                yield from imports

    def loads(self, module: str, lazily_too: bool = False) -> dict[str, Import | None]:
        """All that importing `module` imports, directly or not, each with the statement that first reached it; with
        `lazily_too` also what functions import when they are called.

        The parent packages that Python loads on the way are left out: what `nanovllm/__init__.py` offers to users
        says nothing about the module that lies in it.
        """
        reached: dict[str, Import | None] = {module: None}
        waiting = [module]
        while waiting:
            for statement in self.imports.get(waiting.pop(), []):
                if (statement.on_load or lazily_too) and statement.target not in reached:
                    reached[statement.target] = statement
                    waiting.append(statement.target)
        return reached

    def circles(self) -> list[list[str]]:
        """One circle of imports for each module that lies on one and has not been named, as the modules along it."""
        found: list[list[str]] = []
        named: set[str] = set()
        for start in self.trees:
            if start in named:
                continue
            came_from, waiting = {start: start}, [start]  # a breadth-first walk finds the shortest way back
            while waiting:
                module = waiting.pop(0)
                targets = {i.target for i in self.imports[module] if i.target in self.trees}
                if start in targets:
                    circle = [module]
                    while circle[-1] != start:
                        circle.append(came_from[circle[-1]])
                    found.append([*reversed(circle), start])
                    named.update(circle)
                    break
                for target in targets - came_from.keys():
                    came_from[target] = module
                    waiting.append(target)
        return found

    def _imports(self, module: str) -> Iterator[Import]:
        def visit(node: ast.AST, on_load: bool) -> Iterator[Import]:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                on_load = False
            if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                for statement in node.body:
                    yield from visit(statement, False)
                for statement in node.orelse:
                    yield from visit(statement, on_load)
                return
            for target in self._targets(module, node):
                yield Import(module, target, getattr(node, "lineno", 0), on_load)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, on_load)

        yield from visit(self.trees[module], True)

    def _targets(self, module: str, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = self._absolute(module, node)
            for alias in node.names:
                yield f"{source}.{alias.name}" if f"{source}.{alias.name}" in self.trees else source
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
            yield from (str(name.value) for name in node.args[:1] if isinstance(name, ast.Constant))

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        above = node.level - (1 if module in self.packages else 0)  # one dot in a package's __init__ is the package
        parts = parts[: len(parts) - above]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def classes(self) -> dict[str, list[str]]:
        """Every class, as `module.Name`, with its bases: `module.Name` where these sources define them."""
        return {
            f"{module}.{node.name}": [self._resolve(module, base) for base in node.bases]
            for module, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }

    def _resolve(self, module: str, base: ast.expr) -> str:
        if isinstance(base, ast.Subscript):  # Generic[T], Protocol[T]
            base = base.value
        head, _, rest = ast.unparse(base).partition(".")
        tree = self.trees[module]
        names = {node.name: f"{module}.{node.name}" for node in tree.body if isinstance(node, ast.ClassDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                source = self._absolute(module, node)
                names |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        head = names.get(head, head)
        return f"{head}.{rest}" if rest else head
