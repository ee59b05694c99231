"""The exercises of the lectures: two a stage, with checks that solutions pass and starting files do not."""

from pathlib import Path

import pytest

from tools.lectures import lecture_exercises
from tools.lectures.lecture import lecture_paths, read_lecture
from tools.lectures.lecture_exercises import SOLUTIONS, STARTS, Exercise, all_exercises, run_check

by_lecture = pytest.mark.parametrize("path", lecture_paths(), ids=lambda path: path.stem)
by_exercise = pytest.mark.parametrize("exercise", all_exercises(), ids=lambda exercise: exercise.name)


@by_lecture
def test_two_exercises_go_with_it(path: Path) -> None:
    number = read_lecture(path).stage.number
    mine = [exercise for exercise in all_exercises() if exercise.stage == number]
    assert [exercise.name for exercise in mine] == [f"{number}a", f"{number}b"]
    for exercise in mine:
        assert exercise.check.is_file() and (SOLUTIONS / f"{exercise.stem}.py").is_file()
        assert f"python -m tools.lectures.lecture_exercises {exercise.name}" in exercise.text


def test_an_exercise_is_handed_out_once_and_then_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked: list[Path] = []

    def check(exercise: Exercise, directory: Path) -> int:
        checked.append(directory)
        return 1

    monkeypatch.setattr(lecture_exercises, "run_check", check)
    assert lecture_exercises.main(["4b"], tmp_path) == 0
    assert "Exercise 4b: " in capsys.readouterr().out and not checked
    mine = tmp_path / "stage_4b_rounding_loss.py"
    mine.write_text("# mine", encoding="utf-8")
    assert lecture_exercises.main(["4b"], tmp_path) == 1
    assert checked == [tmp_path] and mine.read_text(encoding="utf-8") == "# mine"
    assert lecture_exercises.main(["9z"], tmp_path) == 1
    assert "there is no exercise '9z'; there are" in capsys.readouterr().err


@pytest.mark.slow
@by_exercise
def test_the_solution_passes_and_the_starting_file_does_not(exercise: Exercise) -> None:
    assert run_check(exercise, SOLUTIONS) == pytest.ExitCode.OK
    assert run_check(exercise, STARTS) == pytest.ExitCode.TESTS_FAILED
