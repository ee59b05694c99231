"""Run the tests of a stage on any text of its file: a learner's, one with a hole, one with a planted mistake.

The text takes the place of the learner's file, as a package `exercises` in a temporary directory. All runs share the
calling process, because importing torch and transformers takes longer than most of them.
"""

import contextlib
import importlib
import io
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from stages.manifest import Stage

ROOT = Path(__file__).resolve().parents[2]
SECONDS_PER_TEST = 120  # some mistakes never end, and that is how they are caught


@dataclass(eq=False)  # pytest keeps its plugins in sets
class Verdict:
    """pytest's plugin for one run: which test failed first, and what it said."""

    test: str | None = None
    message: str = ""
    passed: int = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        if report.failed and self.test is None:
            self.test = report.nodeid.removeprefix("tests/stages/")
            crash = getattr(report.longrepr, "reprcrash", None)
            self.message = crash.message if crash else str(report.longrepr)


def solution(stage: Stage) -> str:
    return (ROOT / "stages" / f"{stage.module_name}.py").read_text(encoding="utf-8")


def run_tests(stage: Stage, source: str, target: str = "tests/stages") -> Verdict:
    """The tests of `stage` in `target`, up to the first failure, with `source` for its file.

    Raises RuntimeError with pytest's output if no test failed and yet the run did not pass: a test file that cannot be
    imported, or no test to run.
    """
    verdict, output = Verdict(), io.StringIO()
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory) / "exercises"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / f"{stage.module_name}.py").write_text(source, encoding="utf-8")
        for name in list(sys.modules):  # what an earlier run imported must not answer for this one
            if name.split(".")[0] == "exercises" or name.startswith("tests.stages"):
                del sys.modules[name]
        importlib.invalidate_caches()
        search_path = shlex.join([directory, str(ROOT)])  # before a real exercises/ of the learner
        command = [target, f"--stage={stage.number}", "--impl=exercises", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-o", f"pythonpath={search_path}", f"--timeout={SECONDS_PER_TEST}"]
        with contextlib.chdir(ROOT), contextlib.redirect_stdout(output):
            code = pytest.main(command, plugins=[verdict])
    if verdict.test is None and code != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest {shlex.join(command)} ended with {code!r}:\n{output.getvalue()}")
    return verdict
