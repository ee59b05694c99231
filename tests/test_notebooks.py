"""The notebooks as they are shipped: they agree with their sources, they run, and print what is stored in them."""

import ast
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("jupytext", "nbval", "ipykernel", "nbformat")):
    pytest.skip("the notebooks' tools are not installed: make setup", allow_module_level=True)

import nbformat

from stages.manifest import Chapter, load_electives, load_stages
from tools.docs.notebooks import NOTEBOOKS, ROOT, as_text, from_source, sources

PATHS = sources()
CELL_TIMEOUT = 60  # seconds
LARGEST = 400_000  # bytes
COMPARED = "# NBVAL_CHECK_OUTPUT"
LEAST_COMPARED = 0.4  # of the code cells of a notebook
LONGEST_FUNCTION = 2  # statements: enough for a plot, too few for an engine

UNWANTED = {
    "a path of one machine": re.compile(r"(?<![\w.])(?:/(?:work|root|tmp|home|Users|usr|opt)/|[A-Z]:\\)"),
    "a date or a time of day": re.compile(r"\b20\d\d-[01]\d-[0-3]\d\b|\b[0-2]\d:[0-5]\d:[0-5]\d\b"),
    "a progress bar": re.compile(r"[█▏▎▍▌▋▊▉]|\r|\dit/s|\d%\|"),
    "an address in memory": re.compile(r"\bat 0x[0-9a-f]{6,}"),
}


def named(paths: list[Path]) -> list[Any]:
    return [pytest.param(path, id=path.stem) for path in paths]


def load(path: Path) -> Any:
    return nbformat.read(path.with_suffix(".ipynb"), as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("stage", [*load_stages(), *load_electives()], ids=lambda stage: stage.slug)
def test_a_chapter_says_how_long_it_takes_and_what_it_needs(stage: Chapter) -> None:
    """The minutes of its exercises are those of the manifest. And all say alike where the solutions stand."""
    [path] = [path for path in PATHS if path.stem.partition("_")[2] == stage.slug]
    minutes = sum(minutes for minutes, _ in stage.exercises)
    beginning = path.read_text(encoding="utf-8").split("# %%")[1]
    assert re.search(
        rf"\*\*About \d+ minutes, and {minutes} minutes for the exercises\.\*\* You need notebooks? \d", beginning
    )
    warning = (
        f"Beside this notebook open `stages/{stage.file}`; it holds the solutions of the exercises, "
        "so close it while you write your own."
    )
    assert warning in " ".join(beginning.replace("\n# ", " ").split())


def run_nbval(notebook: Path, junit: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--disable-plugin-autoload", "-p", "nbval.plugin"]
    command += ["--nbval-lax", "--nbval-current-env"]
    command += [f"--nbval-cell-timeout={CELL_TIMEOUT}", "-p", "no:cacheprovider", f"--junit-xml={junit}", str(notebook)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("path", named(PATHS))
def test_source_and_notebook_agree(path: Path) -> None:
    text, notebook = path.read_text(encoding="utf-8"), load(path)
    number = path.stem.partition("_")[0]
    assert as_text(notebook) == text, f"run `python -m tools.docs.notebooks {number}`, and commit both files"
    assert [cell.id for cell in notebook.cells] == [cell.id for cell in from_source(path).cells]


@pytest.mark.slow
@pytest.mark.parametrize("path", named(PATHS))
def test_it_runs_and_prints_what_is_stored(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_nbval(path.with_suffix(".ipynb"), tmp_path / "report.xml")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    suite = ElementTree.parse(tmp_path / "report.xml").getroot().find("testsuite")
    assert suite is not None
    cells = code_cells(load(path))
    executed = int(suite.attrib["tests"]) - int(suite.attrib["skipped"])
    compared = sum(COMPARED in cell.source for cell in cells)
    with capsys.disabled():
        share = compared / len(cells)
        print(f"\n{path.stem}: {executed} of {len(cells)} code cells executed, {compared} compared ({share:.0%})")
    assert executed == len(cells)


@pytest.mark.parametrize("path", named(PATHS))
def test_enough_of_it_is_compared(path: Path) -> None:
    cells = code_cells(load(path))
    compared = [cell for cell in cells if COMPARED in cell.source]
    assert len(compared) >= LEAST_COMPARED * len(cells), f"{len(compared)} of {len(cells)} code cells"
    silent = [cell.source for cell in compared if not cell.outputs]
    assert silent == [], "a compared cell without output compares nothing"


@pytest.mark.slow
def test_a_wrong_stored_output_is_noticed(tmp_path: Path) -> None:
    """A compared cell, and again with its output changed, and with none."""
    cells = []
    for text in "42\n", "43\n", "":
        outputs = [nbformat.v4.new_output("stream", text=text)] if text else []
        cells.append(nbformat.v4.new_code_cell(f"{COMPARED}\nprint(6 * 7)", outputs=outputs, execution_count=1))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "damaged.ipynb")
    done = run_nbval(tmp_path / "damaged.ipynb", tmp_path / "report.xml")
    assert done.returncode == 1, done.stdout[-4000:]
    cases = ElementTree.parse(tmp_path / "report.xml").getroot().iter("testcase")
    assert [case.find("failure") is not None for case in cases] == [False, True, True]


def stored_texts(notebook: Any) -> Iterator[str]:
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "stream":
                yield output.text
            for kind, data in output.get("data", {}).items():
                if not kind.startswith("image/"):
                    yield data if isinstance(data, str) else json.dumps(data)


def unwanted_in(notebook: Any) -> Iterator[str]:
    for text in stored_texts(notebook):
        for what, pattern in UNWANTED.items():
            if found := pattern.search(text):
                yield f"{what}: {found[0]!r} in {text[max(0, found.start() - 60) : found.end() + 60]!r}"
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                yield f"an error or a warning: {output.get('text', output.get('evalue'))!r}"


@pytest.mark.parametrize("path", named(PATHS))
def test_stored_outputs_are_clean(path: Path) -> None:
    notebook = load(path)
    assert list(unwanted_in(notebook)) == []
    assert path.with_suffix(".ipynb").stat().st_size < LARGEST
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "not the result of one run from top to bottom"


@pytest.mark.parametrize(
    "text",
    ["/" + "home/ann/x.py:3", "took until 2025-01-31", "at 12:03:59", " 40%|████", "3.2it/s", "<f at 0x7f3a12bc>"],
)
def test_the_check_of_outputs_bites(text: str) -> None:
    stream = nbformat.v4.new_output("stream", name="stdout", text=text)
    warning = nbformat.v4.new_output("stream", name="stderr", text="fine, but a warning")
    assert len(list(unwanted_in(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[stream])])))) == 1
    assert len(list(unwanted_in(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[warning])])))) == 1


def engine_logic(source: str) -> list[str]:
    """Classes, and functions of more than a few statements: what belongs into a stage or into tools/."""
    return [
        f"line {node.lineno}: {node.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > LONGEST_FUNCTION)
    ]


@pytest.mark.parametrize("path", named(PATHS))
def test_it_defines_no_engine(path: Path) -> None:
    assert engine_logic(path.read_text(encoding="utf-8")) == []


def test_the_check_for_engines_bites() -> None:
    assert engine_logic("class Cache: pass") == ["line 1: Cache"]
    assert engine_logic("def plot(x):\n    lines(x)") == []
    assert engine_logic("def step(x):\n    a = x\n    b = a\n    return b") == ["line 1: step"]


@pytest.mark.parametrize("path", named(PATHS))
def test_it_is_built_like_the_others(path: Path) -> None:
    """The same picture first, a prediction before its measurement, the judge, and the way to the exercise."""
    text, number = path.read_text(encoding="utf-8"), path.stem.split("_")[0]
    code = [cell.source for cell in code_cells(from_source(path))]
    pictures = [cell for cell in code if "swimlane(" in cell]
    guesses = [i for i, cell in enumerate(code) if cell.startswith("my_guess = None")]
    assert "names=NAMES" in pictures[0]
    assert guesses and all("my_guess" in code[i + 1] for i in guesses)
    assert "hugging_face_greedy(" in text
    assert "Further reading" in text
    assert re.search(rf"make (stage-{number}|elective-\w+)-exercise", text) or number == "0"


def test_there_is_a_notebook_for_every_stage() -> None:
    assert [int(path.stem.split("_")[0]) for path in PATHS[:6]] == [0, 1, 2, 3, 4, 5]
    assert all(path.with_suffix(".ipynb").is_file() for path in NOTEBOOKS.glob("*.py"))
