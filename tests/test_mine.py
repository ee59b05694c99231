"""A learner's stage runs on the learner's own earlier stages, but only on those that pass."""

import sys
from pathlib import Path

import pytest

from stages.manifest import load_stage
from tools.exercises import mine
from tools.exercises.exercises import PACKAGE, solution
from tools.exercises.progress import Result, digest_of, save_result


def test_what_a_stage_builds_on_are_the_stages_that_it_reaches() -> None:
    reached = {number: [stage.number for stage in mine.builds_on(load_stage(number))] for number in range(1, 8)}
    assert reached == {1: [], 2: [], 3: [], 4: [3], 5: [3, 4], 6: [3, 4, 5], 7: [3, 4, 5]}


def test_earlier_stages_that_pass_take_the_place_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "exercises"
    directory.mkdir()
    (directory / "__init__.py").write_text(PACKAGE, encoding="utf-8")
    for number in (3, 4, 5):
        stage = load_stage(number)
        text = f"{solution(stage)}\nOWN = {number}\n"
        (directory / f"{stage.module_name}.py").write_text(text, encoding="utf-8")
        failed = "test_x.py::test_that" if number == 4 else None
        save_result(directory, stage, Result(digest_of(text), failed, 9))
    for name in [name for name in sys.modules if name.split(".")[0] in ("exercises", "stages")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(mine, "EXERCISES", directory)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    try:
        assert [stage.number for stage in mine.use_own(load_stage(5), directory)] == [3]
        mine.use_own(load_stage(5), directory)
        engine = load_stage(5).engine_class("exercises")
        used = sys.modules[engine.__module__]
        assert used.OWN == 5 and sys.modules[used.make_batch.__module__].OWN == 3
        assert not hasattr(sys.modules[used.PrefixCachingPool.__module__], "OWN")
        assert sys.modules[used.PrefixCachingPool.__mro__[1].__module__].OWN == 3, "our stage 4 on the learner's 3"
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("exercises", "stages"):
                del sys.modules[name]


@pytest.fixture
def stage_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the learner's stage 4 is to be; a run of its tests is noted beside it, and fails."""
    monkeypatch.setattr(mine, "EXERCISES", tmp_path)
    monkeypatch.setattr(mine, "run_tests", lambda stage, *options: (tmp_path / "ran").write_text(str(options)))
    return tmp_path / f"{load_stage(4).module_name}.py"


def test_before_a_learner_s_stage_is_shown_its_exercises_are_tested(
    stage_4: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless there is no file, or all tests have passed on it."""
    with pytest.raises(SystemExit, match="`make stage-4-exercise` writes it"):
        mine.require_right(load_stage(4))
    stage_4.write_text("x = 1\n")
    with pytest.raises(SystemExit, match="make stage-4-test IMPL=exercises"):
        mine.require_right(load_stage(4))
    ran = stage_4.with_name("ran")
    assert ran.read_text() == "('-m', 'exercise')" and stage_4.name in capsys.readouterr().out
    ran.unlink()
    save_result(stage_4.parent, load_stage(4), Result(digest_of("x = 1\n"), None, 9))
    mine.require_right(load_stage(4))
    assert not ran.exists()
    stage_4.write_text("x = 2\n")
    monkeypatch.setattr(mine, "run_tests", lambda *_: 0)
    mine.require_right(load_stage(4))
