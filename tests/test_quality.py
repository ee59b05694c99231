"""What every file is held to: ruff, mypy, a largest number of lines, and no path of somebody's machine."""

import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FILE = 400  # lines, docstrings and all
LONGEST_STAGE = 300  # what a reader can hold in mind
MOST_FILES = 20  # Python files of a folder, tests excepted
CODE = ("stages", "nanovllm", "tools", "training", "benchmarks", "tests", "examples", "lectures", "example.py")

# Home and scratch directories on Linux, macOS and Windows, in a form that does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.~*-])/(?:work|root|tmp|home/[a-z]\w*|Users/[A-Za-z]\w*)/|\b[A-Z]:\\Users\\")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)


def present(*names: str) -> list[str]:
    return [name for name in names if (ROOT / name).exists()]


def repository_files() -> list[Path]:
    """Files that are in git or about to be; in an archive without git, all those outside hidden directories."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode == 0:
        paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        paths = [path for path in ROOT.rglob("*") if not any(part[0] == "." for part in path.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file()]


def too_long(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        if path.suffix != ".py":
            continue
        lines = path.read_text().splitlines()
        if path.parent.name == "notebooks" and path.parent.parent == ROOT:
            lines = [line for line in lines if not line.startswith("#")]  # without its prose
        chapter = path.parent in (ROOT / "stages", ROOT / "stages" / "electives")
        longest = LONGEST_STAGE if chapter else LONGEST_FILE
        if len(lines) > longest:
            yield f"{path}: {len(lines)} lines"


def machine_paths(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        content = path.read_bytes()
        if b"\0" in content:
            continue  # binary
        for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
            if found := MACHINE_PATH.search(line):
                yield f"{path}:{number}: {found[0]}"


@pytest.mark.skipif(find_spec("ruff") is None, reason="ruff is not installed: make setup")
def test_ruff_finds_nothing() -> None:
    done = run("ruff", "check", "--no-cache", "--output-format", "concise", *present(*CODE, "notebooks"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(find_spec("ruff") is None, reason="ruff is not installed: make setup")
def test_ruff_passes_over_what_learners_write_and_over_nothing_of_ours(tmp_path: Path) -> None:
    for folder in ("exercises", "lectures/exercises", "tests"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "code.py").touch()
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--show-files"]
    shown = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    seen = [Path(line).relative_to(tmp_path.resolve()).as_posix() for line in shown.splitlines()]
    assert sorted(seen) == ["lectures/exercises/code.py", "pyproject.toml", "tests/code.py"]


@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed: make setup")
def test_mypy_finds_nothing() -> None:
    done = run("mypy", *present(*CODE))
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_python_file_is_too_long() -> None:
    assert list(too_long(repository_files())) == []


def test_every_folder_of_a_package_is_installed_with_it() -> None:
    """Without `__init__.py` a folder works in a clone, and is missing from a wheel (see pyproject.toml)."""
    folders = {path.parent for path in repository_files() if path.suffix == ".py"}
    packages = ("stages", "nanovllm", "tools", "training", "benchmarks")
    ours = [folder for folder in folders if folder != ROOT and folder.relative_to(ROOT).parts[0] in packages]
    assert len(ours) > 20
    assert [str(folder) for folder in ours if not (folder / "__init__.py").is_file()] == []


def test_what_modules_read_beside_themselves_is_in_the_wheel() -> None:
    """Pages and tables: without a line in pyproject.toml they work in a clone, and are missing from a wheel."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    declared = settings["package-data"]
    packed = {path for package, globs in declared.items() for glob in globs for path in (ROOT / package).glob(glob)}
    packages = present("stages", "nanovllm", "tools", "training")
    found = {path for name in packages for kind in ("html", "toml") for path in (ROOT / name).rglob(f"*.{kind}")}
    assert found - packed == set()


def test_no_folder_is_crowded() -> None:
    files = Counter(path.parent for path in repository_files() if path.suffix == ".py")
    crowded = {str(folder): n for folder, n in files.items() if n > MOST_FILES and "tests" not in folder.parts}
    assert crowded == {}


def test_no_path_of_one_machine() -> None:
    assert list(machine_paths(repository_files())) == []


def test_the_length_check_bites(tmp_path: Path) -> None:
    (tmp_path / "fits.py").write_text("x = 1\n" * LONGEST_FILE)
    (tmp_path / "long.py").write_text("x = 1\n" * (LONGEST_FILE + 1))
    (tmp_path / "long.md").write_text("text\n" * 1000)
    assert list(too_long(sorted(tmp_path.iterdir()))) == [f"{tmp_path / 'long.py'}: {LONGEST_FILE + 1} lines"]


@pytest.mark.parametrize("parts", [("work", "main"), ("home", "ann", "x"), ("root", ".cache"), ("Users", "Ann", "x")])
def test_the_path_check_bites(tmp_path: Path, parts: tuple[str, ...]) -> None:
    (tmp_path / "notes.md").write_text("fine: https://example.org/home/, ~/.cache/x, a/tmp/b\nsee /" + "/".join(parts))
    (tmp_path / "weights.bin").write_bytes(b"\0/" + "/".join(parts).encode())
    (found,) = machine_paths(sorted(tmp_path.iterdir()))
    assert found.startswith(f"{tmp_path / 'notes.md'}:2: ")
