"""How much there is to read: lines of code, without blank lines, comments and docstrings."""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nanovllm"
LIMIT = 3_000

# Not counted against the limit: what is built around the engine that issues, follows and completes a request on one
# device, each of it to be read by itself; and what only makes a GPU fast and has its plain PyTorch twin among the rest.
PARTS = {
    "serving": ("server/", "async_llm.py", "stream.py"),
    "several ranks": ("distributed/", "models/sharding.py", "workers/parallel_executor.py"),
    "speculation": ("engine/guesses.py", "runner/draft.py", "sampling/acceptance.py"),
    "trace view": ("trace_view/",),
    "GPU only": (
        "kernels/",
        "attention/triton_backend.py",
        "attention/flash_attn.py",
        "graphs/",
    ),
}

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(source: str) -> int:
    """Physical lines that hold a piece of a statement which is no docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        documentable = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documentable) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def part_of(name: str) -> str:
    return next((part for part, prefixes in PARTS.items() if name.startswith(prefixes)), "counted")


def test_the_package_can_be_read_in_an_afternoon(capsys: pytest.CaptureFixture[str]) -> None:
    parts: Counter[str] = Counter()
    files = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    for name, path in files.items():
        parts[part_of(name)] += lines_of_code(path.read_text(encoding="utf-8"))
    with capsys.disabled():
        print(f"\nlines of code in nanovllm: {dict(parts)}, limit for those counted: {LIMIT}")
    assert parts["counted"] <= LIMIT


def test_what_counts_as_a_line_of_code() -> None:
    source = '''"""A module's docstring,
over two lines."""

# a comment
import os  # one

TEXT = """two,
three"""  # strings that are no docstrings count


class A:  # four
    """A docstring."""

    def f(self) -> None:  # five
        """Another."""

    def g(
        self,  # a bracket over three lines: six, seven, eight
    ) -> list[str]:
        "a docstring in other quotes"
        return [  # nine
            # only a comment
            os.name,  # ten

        ]  # eleven
'''
    assert lines_of_code(source) == 11
