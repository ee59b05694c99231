"""What learners write in the holes: the first failure says which exercise is wrong, and what is probably mistaken."""

import re
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stages.manifest import Stage, load_stage, load_stages
from tests.stage_jobs import ROOT, Job, StageJobs
from tests.stages import endless
from tests.stages.endless import EndlessLoop, Watch
from tests.stages.likely import check, in_short
from tools.exercises.exercises import PACKAGE, exercise_source, find_holes, solution
from tools.exercises.mutants import Mutant

by_slug = pytest.mark.parametrize("stage", load_stages(), ids=lambda stage: stage.slug)


def mistakes_of(stage: Stage) -> list[tuple[Mutant, str]]:
    """Each mistake, and what is to be said of it."""
    path = ROOT / "tests" / "stages" / "mistakes" / f"stage_{stage.number}.toml"
    listed = tomllib.loads(path.read_text(encoding="utf-8"))["mistake"]
    return [(Mutant(m["name"], "", m["old"], m["new"], ""), m["says"]) for m in listed]


def hole_of(stage: Stage, mistake: Mutant) -> str:
    source = solution(stage)
    line = source.count("\n", 0, source.index(mistake.old) + mistake.old.index(mistake.old.strip()))
    return next(hole.name for hole in find_holes(source) if hole.first <= line <= hole.end)


@by_slug
def test_the_catalogue_has_twelve_mistakes_in_all_holes(stage: Stage) -> None:
    found = mistakes_of(stage)
    assert len(found) >= 12 and len({mistake.apply(solution(stage)) for mistake, _ in found}) == len(found)
    assert {hole_of(stage, mistake) for mistake, _ in found} == {hole.name for hole in find_holes(solution(stage))}
    for mistake, says in found:
        compile(mistake.apply(solution(stage)), mistake.name, "exec")
        assert len(says) > 10, mistake.name


def run_as_learner(stage: Stage, text: str, target: str) -> str:
    """What a learner reads whose file of the stage has this text."""
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory) / "exercises"
        package.mkdir()
        (package / "__init__.py").write_text(PACKAGE, encoding="utf-8")
        (package / f"{stage.module_name}.py").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", target, "-q", f"--stage={stage.number}", "--impl=exercises"]
        options = ["-o", f"pythonpath={directory} {ROOT}"]
        options += [f"-pno:{plugin}" for plugin in ("cacheprovider", "nbval", "schemathesis")]
        return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.slow
def test_an_exercise_that_needs_a_wrong_one_waits_for_it() -> None:
    """The message is told once, and the exercise that could not run is not called wrong. An open one likewise."""
    stage = load_stage(4)
    text = solution(stage).replace("parent.to_bytes(8", "parent.to_bytes(2")
    told = run_as_learner(stage, text, "tests/stages/test_stage_4_prefix_caching.py")
    assert told.count("likely: a digest has 64 bits") == 1 and "waits for exercise 4.1, which is wrong" in told, told
    assert re.findall(r"^4\.\d  .+$", told, re.MULTILINE) == [
        "4.1  wrong",
        *(f"4.{n}  waits for 4.1" for n in (2, 3, 4)),
    ]
    told = run_as_learner(stage, exercise_source(stage), "tests/stages/test_stage_4_prefix_caching.py")
    assert told.count("still open: exercise 4.1: ") == 1 and "waits for exercise 4.1, which is open" in told, told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_first_failure_names_the_exercise_and_the_likely_mistake(stage_jobs: StageJobs) -> None:
    found = {
        f"{s.number} {mistake.name}": (s, mistake, says) for s in load_stages() for mistake, says in mistakes_of(s)
    }
    jobs = [
        Job(name, stage.name, mistake.apply(solution(stage)), f"tests/stages/test_{stage.module_name}.py")
        for name, (stage, mistake, _) in found.items()
    ]
    results, misses = stage_jobs.run(jobs, timeout=850), []
    for name, (stage, mistake, says) in found.items():
        told = results[name].message
        if says not in told or not told.startswith(f"exercise {hole_of(stage, mistake)}\n"):
            misses.append(f"{name}: {told}")
    assert not misses, "\n\n".join(misses)


# --- what a failure says ----------------------------------------------------------------------------------------------


def test_a_likely_mistake_is_told_where_it_explains_the_result() -> None:
    check("sum", 3, 3, {"never told": 3})
    with pytest.raises(AssertionError, match=r"^sum: 4 instead of 3\nlikely: one too many$"):
        check("sum", 4, 3, {"one too few": 2, "one too many": 4})
    with pytest.raises(AssertionError, match=r"^sum: 5 instead of 3$"):
        check("sum", 5, 3, {"one too many": 4})
    with pytest.raises(AssertionError, match="likely: a `return` is missing"):
        check("sum", None, 3)
    with pytest.raises(AssertionError, match="1 instead of True"):
        check("flag", 1, True)


def in_exercises(tmp_path: Path, text: str) -> ModuleType:
    """A learner's file with this text."""
    path = tmp_path / "exercises" / "stage_9_example.py"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    module = ModuleType("example")
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def test_a_failure_shows_the_way_through_the_learner_s_file(tmp_path: Path) -> None:
    module = in_exercises(
        tmp_path, "def f():\n    # exercise 9.1: nothing.\n    return [1 // x for x in (0,)]\n    # end exercise\n"
    )

    def test_example() -> None:
        """What it is about.

        More of it."""

    with pytest.raises(ZeroDivisionError) as raised:
        module.f()
    told = in_short(test_example, raised.value, raised.value.__traceback__)
    assert told.startswith("exercise 9.1\nWhat it is about.\n\n  exercises/stage_9_example.py:3, in exercise 9.1\n")
    assert told.count("in exercise 9.1") == 1  # a comprehension has a frame of its own up to Python 3.11
    assert told.endswith("    return [1 // x for x in (0,)]\nZeroDivisionError: integer division or modulo by zero")


# --- loops that never end ---------------------------------------------------------------------------------------------

LOOPS = """
def spin(steps):
    for _ in range(1):
        while steps:
            helper(steps)


def helper(steps):
    return [step for step in steps]


def busy(done):
    total = 0
    while not done():
        total += 1
    return total
"""


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(endless, "PATIENCE", 0.15)
    monkeypatch.setattr(endless, "LOOK", 0.02)
    watch = Watch()
    watch.start()
    yield watch
    watch.over.set()
    watch.join()


def test_an_endless_loop_is_ended_with_its_function_and_line(watched: Watch, tmp_path: Path) -> None:
    """In a thread, as the ranks of some tests are."""
    module, caught = in_exercises(tmp_path, LOOPS), list[BaseException]()

    def work() -> None:
        try:
            module.spin([1, 2, 3])
        except EndlessLoop as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=20)
    [error] = caught
    first, second, *_ = str(error).splitlines()
    assert (first, second) == ("an endless loop in spin, exercises/stage_9_example.py:4", "    while steps:")


def test_a_loop_with_progress_a_pause_and_a_loop_of_others_are_left_alone(watched: Watch, tmp_path: Path) -> None:
    module = in_exercises(tmp_path, LOOPS)

    def for_a_while(each: Callable[[], object], cpu: bool = True) -> Callable[[], bool]:
        clock = time.process_time if cpu else time.monotonic
        end = clock() + 0.4

        def done() -> bool:
            each()
            return clock() > end

        return done

    assert module.busy(for_a_while(watched.progress)) > 0
    assert module.busy(for_a_while(lambda: time.sleep(0.1), cpu=False)) > 0
    done = for_a_while(lambda: None)
    while not done():  # this file is none of a stage's
        pass


@pytest.mark.slow
def test_a_loop_in_another_rank_s_process_is_ended_too() -> None:
    """A worker is stuck, and the leader waits for it: within 20 s of computing, the message is the worker's."""
    stage = load_stage(7)
    text = solution(stage).replace(
        "    work = [piece", "    while group_rank_is_one(self):\n            pass\n        work = [piece"
    )
    assert text != solution(stage)
    text += "\n\ndef group_rank_is_one(rank: Rank) -> bool:\n    return rank.group.rank == 1\n"
    target = "tests/stages/test_stage_7_tensor_parallel.py::test_stories_are_hf_s_on_every_number_of_ranks"
    started = time.monotonic()
    told = run_as_learner(stage, text, target)
    assert "an endless loop in Rank.__call__, exercises/stage_7_tensor_parallel.py" in told, told
    assert "rank 1 failed" in told and time.monotonic() - started < 100
