"""Which electives are tested: all, or those of `--elective NAME`, by the names of their test files.

What the tests find in a learner's file is kept for `make progress`.
"""

import importlib.util
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from stages.manifest import Elective, load_elective, load_electives
from tools.exercises.exercises import find_holes, solution
from tools.exercises.progress import EXERCISES, Result, digest_of, save_result


def pytest_configure(config: pytest.Config) -> None:
    known = [elective.name for elective in load_electives()]
    for name in config.getoption("elective") or ():
        if name not in known:
            raise pytest.UsageError(f"--elective {name}: there are only the electives {', '.join(known)}")
    wanted: list[str] = config.getoption("elective") or []
    if len(wanted) == 1 and config.getoption("impl") == "exercises" and runs_all(config) and is_the_learner_s():
        config.pluginmanager.register(Record(load_elective(wanted[0])), "record")


def runs_all(config: pytest.Config) -> bool:
    """Whether all tests of an elective run, the slow ones or not, so that what they find is worth a record."""
    chosen = config.option.keyword or config.option.markexpr not in ("not gpu", "not slow and not gpu")
    return not chosen and config.args == ["tests/electives"]


def is_the_learner_s() -> bool:
    """Whether `exercises` is the learner's own folder, not a copy that somebody tests with a mistake planted."""
    try:
        package = importlib.util.find_spec("exercises.electives")
    except ModuleNotFoundError:
        return False
    return package is not None and package.origin == str(EXERCISES / "electives" / "__init__.py")


class Record:
    """Keeps what a run has found in the learner's file of an elective."""

    def __init__(self, elective: Elective) -> None:
        self.elective = elective
        self.failed: str | None = None
        self.passed = 0
        path = EXERCISES / elective.file
        self.digest = digest_of(path.read_text(encoding="utf-8")) if path.is_file() else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        called_off = exitstatus == pytest.ExitCode.INTERRUPTED and self.failed is None
        if self.digest is not None and (self.passed or self.failed) and not called_off:
            save_result(EXERCISES, self.elective, Result(self.digest, self.failed, self.passed))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of other electives are not even read."""
    wanted = config.getoption("elective")
    others = {f"test_{e.slug}.py" for e in load_electives() if wanted and e.name not in wanted}
    return True if collection_path.name in others else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Of an open exercise its hint, not a traceback."""
    report: Any = yield
    if call.excinfo is not None and call.excinfo.errisinstance(NotImplementedError):
        name = str(call.excinfo.value)
        holes = {f"exercise {h.name}": h.hint for e in load_electives() for h in find_holes(solution(e))}
        if name in holes:
            report.longrepr = f"still open: {name}: {holes[name]}"
    return report


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory of tiny checkpoints for the whole session (see tests/weights.py)."""
    return tmp_path_factory.mktemp("checkpoints")
