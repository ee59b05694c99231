"""A pytest plugin for CI, where everything is installed: `-p tests.no_skips` fails a run that skips a test."""

import pytest

_skipped: set[str] = set()


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        _skipped.add(f"{report.nodeid}: {reason.removeprefix('Skipped: ')}")


pytest_runtest_logreport = pytest_collectreport = _note


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """xdist: its processes see modules that are skipped as a whole, and nobody else does."""
    _skipped.update(getattr(node, "workeroutput", {}).get("skipped", ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    workeroutput = getattr(session.config, "workeroutput", None)
    if workeroutput is not None:
        workeroutput["skipped"] = sorted(_skipped)
    elif _skipped and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skipped:
        terminalreporter.section("skipped, and nothing should be")
        for line in sorted(_skipped):
            terminalreporter.line(line)
