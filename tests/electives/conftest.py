"""Which electives are tested: all, or those of `--elective NAME`, by the names of their test files."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from stages.manifest import load_electives
from tools.exercises.exercises import find_holes, solution


def pytest_configure(config: pytest.Config) -> None:
    known = [elective.name for elective in load_electives()]
    for name in config.getoption("elective") or ():
        if name not in known:
            raise pytest.UsageError(f"--elective {name}: there are only the electives {', '.join(known)}")


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
