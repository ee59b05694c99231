"""Progress follows the learner's files, and believes no result that was recorded for another text."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages.manifest import Chapter, Stage, load_elective, load_electives, load_stage, load_stages
from tools.exercises import progress
from tools.exercises.exercises import exercise_source, find_holes, solution
from tools.exercises.progress import Result, digest_of, main, read_progress, save_result

FOUR = load_stage(4)


def write(directory: Path, stage: Chapter, text: str) -> str:
    (directory / stage.file).parent.mkdir(exist_ok=True)
    (directory / stage.file).write_text(text, encoding="utf-8")
    return digest_of(text)


def test_from_nothing_to_done(tmp_path: Path) -> None:
    names = [hole.name for hole in find_holes(solution(FOUR))]
    p = read_progress(FOUR, tmp_path)
    assert (p.written, p.open_holes, p.done) == (False, names, False) and "make stage-4-exercise" in p.next_step
    write(tmp_path, FOUR, exercise_source(FOUR))
    p = read_progress(FOUR, tmp_path)
    assert p.open_holes == names and f"fill in exercise {names[0]}" in p.next_step
    write(tmp_path, FOUR, exercise_source(FOUR, {names[1]}))
    assert read_progress(FOUR, tmp_path).open_holes == [names[1]]
    digest = write(tmp_path, FOUR, solution(FOUR))
    p = read_progress(FOUR, tmp_path)
    assert not p.open_holes and not p.done and "make stage-4-test IMPL=exercises" in p.next_step
    save_result(tmp_path, FOUR, Result(digest, "test_x.py::test_that", 3))
    p = read_progress(FOUR, tmp_path)
    assert not p.done and "mend test_that" in p.next_step
    save_result(tmp_path, FOUR, Result(digest, None, 30))
    assert read_progress(FOUR, tmp_path).done


@pytest.mark.parametrize("stage", [*load_stages(), *load_electives()], ids=lambda stage: stage.slug)
def test_every_exercise_of_every_stage_is_seen_to_be_open(stage: Chapter, tmp_path: Path) -> None:
    write(tmp_path, stage, exercise_source(stage))
    p = read_progress(stage, tmp_path)
    assert len(p.open_holes) == p.holes >= 2


def test_a_hole_that_is_filled_in_wrongly_is_not_filled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, *_ = (hole.name for hole in find_holes(solution(FOUR)))
    digest = write(tmp_path, FOUR, exercise_source(FOUR, {two}))
    save_result(tmp_path, FOUR, Result(digest, "test_x.py::test_that", 3, wrong=[one]))
    p = read_progress(FOUR, tmp_path)
    assert (p.open_holes, p.wrong) == ([two], [one]) and f"mend exercise {one}" in p.next_step
    assert main([], tmp_path) == 0
    assert "▣ □ ■ ■" in capsys.readouterr().out
    write(tmp_path, FOUR, exercise_source(FOUR, {two}) + "# changed\n")
    assert read_progress(FOUR, tmp_path).wrong == []


def test_what_is_begun_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], tmp_path) == 0
    assert "Next: stage 1: read make stage-1-notebook" in capsys.readouterr().out
    write(tmp_path, FOUR, exercise_source(FOUR))
    assert main([], tmp_path) == 0
    assert "Next: stage 4: fill in exercise 4.1" in capsys.readouterr().out


def test_an_elective_counts_and_is_next_only_when_it_is_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fp8 = load_elective("fp8")

    def say() -> str:
        assert main([], tmp_path) == 0
        return " ".join(capsys.readouterr().out.split())

    said = say()
    assert "moe Mixture of experts" in said and "fp8 FP8" in said and "Next: stage 1:" in said
    total = sum(len(find_holes(solution(chapter))) for chapter in [*load_stages(), *load_electives()])
    assert f" 0 of {total} exercises" in said
    write(tmp_path, fp8, exercise_source(fp8))
    assert "Next: elective fp8: fill in exercise fp8.1 in exercises/electives/fp8.py" in say()
    save_result(tmp_path, fp8, Result(write(tmp_path, fp8, solution(fp8)), None, 30))
    said = say()
    assert f" 3 of {total} exercises" in said and "Next: stage 1:" in said
    for stage in load_stages():
        save_result(tmp_path, stage, Result(write(tmp_path, stage, solution(stage)), None, 30))
    said = say()
    assert "All stages are done." in said and "Or elective moe: read notebooks/11_mixture_of_experts.ipynb" in said
    assert "then make elective-moe-exercise" in said and "elective fp8" not in said


def test_a_changed_file_is_not_done_any_more(tmp_path: Path) -> None:
    save_result(tmp_path, FOUR, Result(write(tmp_path, FOUR, solution(FOUR)), None, 30))
    write(tmp_path, FOUR, solution(FOUR) + "# changed\n")
    assert read_progress(FOUR, tmp_path).result is None


@pytest.mark.parametrize(
    ("options", "all_run"),
    [({}, True), ({"keyword": "prefix"}, False), ({"markexpr": "exercise"}, False), ({"args": ["tests"]}, False)],
    ids=["all", "by_name", "exercises", "elsewhere"],
)
def test_only_a_run_of_all_tests_is_recorded(options: dict[str, Any], all_run: bool) -> None:
    from tests.stages.conftest import runs_all

    given = {"keyword": "", "markexpr": "not slow", "args": ["tests/stages"]} | options
    config: Any = SimpleNamespace(option=SimpleNamespace(**given), args=given["args"])
    config.getini = lambda name: ["--strict-markers", "-m", "not slow"]
    assert runs_all(config) is all_run


@pytest.mark.parametrize(
    ("options", "all_run"),
    [({}, True), ({"markexpr": "not gpu"}, True), ({"keyword": "byte"}, False), ({"args": ["tests"]}, False)],
    ids=["fast", "all", "by_name", "elsewhere"],
)
def test_only_a_run_of_all_tests_of_an_elective_is_recorded(options: dict[str, Any], all_run: bool) -> None:
    from tests.electives.conftest import runs_all

    given = {"keyword": "", "markexpr": "not slow and not gpu", "args": ["tests/electives"]} | options
    config: Any = SimpleNamespace(option=SimpleNamespace(**given), args=given["args"])
    assert runs_all(config) is all_run


@pytest.mark.parametrize("failing", [None, "test_fp8.py::test_second"])
def test_what_an_elective_s_tests_find_is_kept(
    failing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first failure counts. A run that is called off before it says nothing."""
    from tests.electives import conftest

    monkeypatch.setattr(conftest, "EXERCISES", tmp_path)
    fp8 = load_elective("fp8")
    digest = write(tmp_path, fp8, solution(fp8))
    for status in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.OK):
        record = conftest.Record(fp8)
        for name in ("test_first", "test_second", "test_third"):
            node = f"test_fp8.py::{name}"
            failed = failing is not None and name != "test_first"
            for when in ("setup", "call", "teardown"):
                broken = failed and when == "call"
                told: Any = SimpleNamespace(when=when, nodeid=node, passed=not broken, failed=broken)
                record.pytest_runtest_logreport(told)
        record.pytest_sessionfinish(status)
        kept = progress.load_results(tmp_path).get(fp8.module_name)
        expected = Result(digest, failing, 1 if failing else 3)
        assert kept == (None if status == pytest.ExitCode.INTERRUPTED and failing is None else expected)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"stage_4_prefix_caching": {"digest": "x"}}'])
def test_a_damaged_record_counts_as_none(tmp_path: Path, damage: str) -> None:
    (tmp_path / "progress.json").write_text(damage)
    assert progress.load_results(tmp_path) == {}


def test_only_what_was_filled_in_and_has_changed_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(stage: Stage, *options: str) -> int:
        ran.append(stage.name)
        text = (tmp_path / stage.file).read_text(encoding="utf-8")
        save_result(tmp_path, stage, Result(digest_of(text), None, 7))
        return 0

    def call(*arguments: str) -> str:
        ran.clear()
        assert main(list(arguments), tmp_path) == 0
        return capsys.readouterr().out

    monkeypatch.setattr(progress, "run_tests", run)
    write(tmp_path, load_stage(1), exercise_source(load_stage(1)))
    write(tmp_path, FOUR, solution(FOUR))
    assert "7 pass" not in call() and ran == []
    assert "7 pass" in call("--run") and ran == ["1", "4"]
    assert "Next: stage 1" in call("--run") and ran == []
