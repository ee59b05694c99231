"""The reading path of docs/afternoon.md is short and has no hole, and docs/architecture.md names every folder."""

import re
from pathlib import Path

from tests.imports import Sources

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "afternoon.md").read_text(encoding="utf-8")
MOST_FILES, MOST_LINES = 15, 2_600


def table(heading: str) -> dict[str, list[str]]:
    """The rows of the table under a heading, by the file or folder that the row links to."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "](../" in line]
    return {re.search(r"\]\(\.\./([\w/.]+)\)", " ".join(row))[1]: row for row in rows}  # type: ignore[index]


PATH = table("The path")
GRANTED = table("What you may take for granted")


def module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_the_path_fits_into_an_afternoon() -> None:
    lines = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in PATH}
    assert 10 <= len(PATH) <= MOST_FILES
    assert sum(lines.values()) <= MOST_LINES, lines


def test_each_file_of_the_path_has_a_question_and_minutes() -> None:
    for path, (*_, question, minutes) in PATH.items():
        assert question.endswith("?") and int(minutes) > 0, path
    hours = sum(int(row[-1]) for row in PATH.values()) / 60
    assert 2 <= hours <= 5


def test_the_rest_can_be_skipped_without_a_hole() -> None:
    """Whatever a file of the path imports from the package is on the path, too, or is explained in a line."""
    sources = Sources.read(ROOT, "nanovllm")
    known = {module(path) for path in (*PATH, *GRANTED)}
    used: dict[str, list[str]] = {}
    for path in PATH:
        for statement in sources.imports[module(path)]:
            if statement.of("nanovllm"):
                used.setdefault(statement.target, []).append(str(statement))
    assert {target: where for target, where in used.items() if target not in known} == {}
    not_needed = {path for path in GRANTED if module(path) not in used}
    assert not_needed == set(), "explained, but no file of the path imports it"
    assert not set(PATH) & set(GRANTED)


def test_every_folder_with_code_is_in_the_tree_of_the_architecture() -> None:
    tree = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("```text\n")[2].partition("```")[0]
    named, above = set(), [""]
    for line in tree.splitlines():
        if found := re.match(r"( *)(\w+)/ +\S", line):
            above = [*above[: len(found[1]) // 4 + 1], f"{found[2]}/"]
            named.add("".join(above))
    tops = [ROOT / name.rstrip("/") for name in named if name.count("/") == 1]
    folders = {f"{path.parent.relative_to(ROOT).as_posix()}/" for top in tops for path in top.rglob("*.py")}
    shown = {folder for folder in folders if not folder.startswith(("tests/", "lectures/")) or folder.count("/") == 1}
    assert shown - named == set()
    assert {folder for folder in named if not (ROOT / folder).is_dir()} == set()
