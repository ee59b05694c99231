"""The exercises of stages and lectures: what the tool writes, and that tests and checks notice every hole."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stages.core import SamplingParams
from stages.manifest import Chapter, Elective, load_electives, load_stages
from tests.stage_jobs import Job, StageJobs
from tests.weights import lively_qwen3, lively_qwen3_moe
from tools.exercises import exercises
from tools.exercises.exercises import (
    SOLUTIONS,
    Hole,
    LectureExercise,
    cut,
    exercise_source,
    find_holes,
    lecture_exercises,
    run_check,
    solution,
    write_stage,
)
from tools.lectures.lecture import lecture_paths, read_lecture

STAGES = load_stages()
CHAPTERS: list[Chapter] = [*STAGES, *load_electives()]
LECTURES = lecture_exercises()

HOLES = [(stage, hole) for stage in CHAPTERS for hole in find_holes(solution(stage))]
by_slug = pytest.mark.parametrize("stage", CHAPTERS, ids=lambda stage: stage.slug)
by_hole = pytest.mark.parametrize(("stage", "hole"), HOLES, ids=lambda x: x.name if isinstance(x, Hole) else x.slug)

EXAMPLE = """\
def f(x):
    # exercise 1.1: double x, and
    #   say "so" or 'so'.
    x = 2 * x
    print("so")
    # end exercise
    return x


def g(x):
    # exercise 1.2: nothing.
    pass
    # end exercise
"""


@by_slug
def test_every_stage_has_two_to_four_small_holes(stage: Chapter) -> None:
    holes = find_holes(solution(stage))
    assert 2 <= len(holes) <= 4
    assert len(stage.exercises) == len(holes), "stages.toml has minutes and difficulty of each"
    assert all(5 <= minutes <= 30 and difficulty in (1, 2, 3) for minutes, difficulty in stage.exercises)
    assert sorted(hole.name for hole in holes) == [f"{stage.name}.{i + 1}" for i in range(len(holes))]
    for hole in holes:
        assert 3 <= hole.num_code_lines <= 15, f"exercise {hole.name} asks for {hole.num_code_lines} lines"
        assert hole.hint.endswith("."), f"the hint of {hole.name} breaks off: {hole.hint!r}"


def test_a_cut_keeps_the_hint_and_hides_the_solution() -> None:
    text = cut(EXAMPLE, {"1.1"})
    assert "2 * x" not in text and "pass" in text
    assert "    # exercise 1.1: double x, and\n    #   say \"so\" or 'so'.\n    raise NotImplementedError(" in text
    assert text.count("double x") == 1, "the hint stands there once"
    namespace: dict[str, object] = {}
    exec(text, namespace)
    with pytest.raises(NotImplementedError, match=r"^exercise 1\.1$"):
        namespace["f"](1)  # type: ignore[operator]


def test_a_cut_of_nothing_is_the_solution() -> None:
    assert cut(EXAMPLE, set()) == EXAMPLE
    assert "pass" not in cut(EXAMPLE) and "2 * x" not in cut(EXAMPLE)


@pytest.mark.parametrize(
    "text",
    [
        EXAMPLE.replace("    # end exercise\n", "", 1),
        EXAMPLE.replace("# end exercise", "# end of exercise"),
        EXAMPLE.replace("# exercise 1.2:", "# exercise 1.2"),
        EXAMPLE + "# end exercise\n",
    ],
    ids=["never closed", "misspelt end", "misspelt start", "closed twice"],
)
def test_a_damaged_marker_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="exercise"):
        find_holes(text)


def test_a_hole_may_say_what_to_begin_with() -> None:
    text = EXAMPLE.replace("    x = 2", "    # instead: if x:\n    # instead:     x += x  # yours to mend\n    x = 2")
    text = text.replace("    pass\n", "    # instead:\n    pass\n")
    assert (
        cut(text)
        == """\
def f(x):
    # exercise 1.1: double x, and
    #   say "so" or 'so'.
    if x:
        x += x  # yours to mend
    # end exercise
    return x


def g(x):
    # exercise 1.2: nothing.
    # end exercise
"""
    )
    assert [hole.num_code_lines for hole in find_holes(text)] == [2, 1]


def test_an_unknown_exercise_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no exercise 9.9; there are 1.1, 1.2"):
        cut(EXAMPLE, {"9.9"})


def generate(stage: Chapter, source: str, checkpoint: Path) -> list[list[int]]:
    """Two requests through the engine of that text, with a pool so small that stage 5 must preempt one of them."""
    module = ModuleType("exercise")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "exercise", module)  # dataclasses look their module up
        exec(source, vars(module))
    small = {"max_num_seqs": 2, "block_size": 2, "num_blocks": 6, "max_num_batched_tokens": 64}
    small["tensor_parallel_size"] = 1  # a module that is no file cannot be found by another process
    engine = getattr(module, stage.class_name)(checkpoint, **{k: v for k, v in small.items() if k in stage.options})
    out: list[list[int]] = engine.generate([[5, 6, 7, 8], [5, 6, 9]], SamplingParams(0.0, 5, ignore_eos=True))
    return out


@pytest.fixture
def checkpoint(stage: Chapter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = lively_qwen3_moe if stage.name == "moe" else lively_qwen3
    return build(tmp_path_factory.getbasetemp() / "checkpoint", num_hidden_layers=1)


@by_hole
def test_even_a_small_run_meets_every_hole(stage: Chapter, hole: Hole, checkpoint: Path) -> None:
    with pytest.raises(NotImplementedError) as raised:
        generate(stage, exercise_source(stage, {hole.name}), checkpoint)
    assert str(raised.value) == f"exercise {hole.name}"


@by_slug
def test_with_no_hole_open_an_exercise_is_the_stage(stage: Chapter, checkpoint: Path) -> None:
    out = generate(stage, exercise_source(stage, set()), checkpoint)
    ours = stage if isinstance(stage, Elective) else STAGES[0]
    assert out == generate(ours, solution(ours), checkpoint)
    assert [len(tokens) for tokens in out] == [5, 5]


@pytest.mark.slow
@pytest.mark.timeout(900)
@by_slug
def test_the_stage_s_tests_notice_every_hole_and_pass_without(stage: Chapter, stage_jobs: StageJobs) -> None:
    names = [hole.name for hole in find_holes(solution(stage))]
    jobs = [Job(name, stage.name, exercise_source(stage, {name})) for name in names]
    jobs += [Job("all", stage.name, exercise_source(stage)), Job("none", stage.name, exercise_source(stage, set()))]
    results = stage_jobs.run(jobs, timeout=800)
    nothing_open = results.pop("none")
    assert nothing_open.test is None and nothing_open.passed > 10, nothing_open
    assert results.pop("all").test is not None
    for name, result in results.items():
        assert result.test is not None, f"no test notices that exercise {name} is open"
        assert f"still open: exercise {name}: " in result.message


@by_slug
def test_the_written_file_parses_and_is_laid_out(stage: Chapter, tmp_path: Path) -> None:
    target = write_stage(stage, tmp_path)
    tree = ast.parse(target.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree) == ast.get_docstring(ast.parse(solution(stage)))
    ruff = [sys.executable, "-m", "ruff"]
    flags = ["--isolated", "--no-cache", "--line-length=120", str(target)]
    # A hole leaves names unused (F401, F841, B007), or used before the learner has written them (F821)
    rules = ["--select=E,F,I,UP,B,SIM,W,C4", "--ignore=F401,F841,F821,B007"]
    for command in ([*ruff, "format", "--check", *flags], [*ruff, "check", *rules, *flags]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_tool_never_overwrites_work(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    target = tmp_path / "exercises" / f"{STAGES[0].module_name}.py"
    assert exercises.main(["1"], target.parent) == 0
    assert re.search(r"1\.1  about \d+ minutes, difficulty [123] of 3", capsys.readouterr().out)
    target.write_text("# my work")
    assert exercises.main(["1"], target.parent) == 1
    assert target.read_text() == "# my work"
    assert "make stage-1-exercise ARGS=--force" in capsys.readouterr().err
    assert exercises.main(["1", "--force"], target.parent) == 0
    assert target.with_name(f"{target.name}.bak").read_text() == "# my work"
    target.write_text("# my second try")
    assert exercises.main(["1", "--force"], target.parent) == 0
    assert {path.read_text() for path in target.parent.glob("*.bak")} == {"# my work", "# my second try"}


def test_a_checkpoint_fills_in_what_comes_before_it_and_keeps_the_old_file(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    stage = STAGES[3]
    names = [hole.name for hole in find_holes(solution(stage))]
    target = tmp_path / "exercises" / f"{stage.module_name}.py"
    target.parent.mkdir()
    target.write_text("# my work")
    for checkpoint in range(1, len(names) + 2):
        assert exercises.main([str(stage.number), "--checkpoint", str(checkpoint)], target.parent) == 0
        assert target.read_text(encoding="utf-8") == exercise_source(stage, set(names[checkpoint - 1 :]))
        assert re.findall(r"^  (\d\.\d)  ", capsys.readouterr().out, re.MULTILINE) == names[checkpoint - 1 :]
    assert target.with_name(f"{target.name}.bak").read_text() == "# my work"
    for checkpoint in (0, len(names) + 2):
        assert exercises.main([str(stage.number), "--checkpoint", str(checkpoint)], target.parent) == 1
        assert f"checkpoints 1 to {len(names) + 1}" in capsys.readouterr().err


def test_a_stage_that_does_not_exist_is_named(capsys: pytest.CaptureFixture) -> None:
    assert exercises.main(["99"]) == 1
    assert "there is no stage 99" in capsys.readouterr().err


def test_an_elective_s_file_lies_in_a_folder_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    elective = load_electives()[0]
    assert exercises.main([elective.name], tmp_path / "exercises") == 0
    assert f"make elective-{elective.name}-test IMPL=exercises" in capsys.readouterr().out
    written = tmp_path / "exercises" / "electives" / f"{elective.slug}.py"
    assert written.read_text(encoding="utf-8") == exercise_source(elective)
    assert exercises.main([elective.name], tmp_path / "exercises") == 1
    assert f"exercises/electives/{elective.slug}.py is there already" in capsys.readouterr().err


# --- the lectures' ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", lecture_paths(), ids=lambda path: path.stem)
def test_two_exercises_go_with_a_lecture(path: Path) -> None:
    number = read_lecture(path).stage.number
    mine = [exercise for name, exercise in LECTURES.items() if name.startswith(str(number))]
    assert [exercise.name for exercise in mine] == [f"{number}a", f"{number}b"]
    for exercise in mine:
        assert exercise.check.is_file() and {hole.name for hole in find_holes(exercise.source())} == {exercise.name}
        assert f"python -m tools.exercises.exercises {exercise.name}" in exercise.text
        docstring = ast.get_docstring(ast.parse(exercise.source()))
        assert docstring == f"Exercise {exercise.name}: {exercise.title}\n\n{exercise.text}"


def test_an_exercise_is_handed_out_once_and_then_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked: list[Path] = []

    def check(exercise: LectureExercise, directory: Path) -> int:
        checked.append(directory)
        return 1

    monkeypatch.setattr(exercises, "run_check", check)
    assert exercises.main(["4b"], tmp_path) == 0
    assert "Exercise 4b: " in capsys.readouterr().out and not checked
    mine = tmp_path / "stage_4b_rounding_loss.py"
    mine.write_text("# mine", encoding="utf-8")
    assert exercises.main(["4b"], tmp_path) == 1
    assert checked == [tmp_path] and mine.read_text(encoding="utf-8") == "# mine"
    assert exercises.main(["4b", "--force"], tmp_path) == 0
    assert mine.with_name(f"{mine.name}.bak").read_text(encoding="utf-8") == "# mine"
    assert exercises.main(["9z"], tmp_path) == 1
    assert "there is no exercise '9z'; there are" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("exercise", LECTURES.values(), ids=LECTURES.keys())
def test_the_solution_passes_and_the_starting_file_does_not(exercise: LectureExercise, tmp_path: Path) -> None:
    assert run_check(exercise, SOLUTIONS) == pytest.ExitCode.OK
    (tmp_path / exercise.solution.name).write_text(exercise.source(), encoding="utf-8")
    assert run_check(exercise, tmp_path) == pytest.ExitCode.TESTS_FAILED
