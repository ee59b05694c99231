"""Ctrl-C in a tool: one line and exit status 130, no traceback."""

import argparse
import runpy
import sys

import pytest

from tools import until_ctrl_c


def called_off(*_: object) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "module",
    [
        *(f"tools.{name}" for name in ("setup_env", "exercises.mutants", "exercises.progress")),
        *(f"tools.race.{name}" for name in ("demo", "race", "replay")),
        "benchmarks.stages.stage_bench",
    ],
)
def test_a_tool_that_is_called_off_says_so_in_one_line(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, module, raising=False)  # or runpy warns that it is there already
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", called_off)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        runpy.run_module(module, run_name="__main__")
    assert getattr(ended.value, "code", "a traceback") == 130
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (2, 2)])
def test_otherwise_the_status_is_what_the_tool_returns(returned: int | None, status: int) -> None:
    assert until_ctrl_c(lambda: returned) == status
