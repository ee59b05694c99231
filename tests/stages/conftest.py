"""Which stages are tested, from where, and what a learner reads when a test fails.

A test that takes the fixture `subject` runs once for every stage from which on it applies (see `subject.since` and
`subject.needs`). `--stage 4` leaves only stage 4; `--impl exercises` takes the learner's file in place of ours.
"""

import importlib.util
import re
import textwrap
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from stages.core import Sequence
from stages.manifest import Stage, load_stage, load_stages
from tests.stages.endless import watch
from tests.stages.likely import hole_at, in_short
from tests.stages.ranks import awkward_model, awkward_ranks, start_ranks, story_ranks
from tests.stages.shadow import shadow_checkpoint
from tests.stages.subject import Subject, arguments
from tools.exercises.exercises import find_holes, line_width, solution
from tools.exercises.mine import use_own
from tools.exercises.progress import EXERCISES, Result, digest_of, save_result

ASSETS = Path(__file__).parents[2] / "assets"
__all__ = ["awkward_model", "awkward_ranks", "start_ranks", "story_ranks"]  # fixtures of stage 7

WITHOUT_SUBJECT = {"test_paged_attention_triton.py": 3}  # files that belong to one stage though they test no engine


def pytest_configure(config: pytest.Config) -> None:
    known = [s.number for s in load_stages()]
    for number in config.getoption("stage") or ():
        if number not in known:
            raise pytest.UsageError(f"--stage {number}: there are only the stages {', '.join(map(str, known))}")
    if learning(config):
        config.pluginmanager.register(Lesson(config), "lesson")


def learning(config: pytest.Config) -> bool:
    return bool(config.getoption("impl") == "exercises")


def stages_of(config: pytest.Config) -> list[int]:
    return config.getoption("stage") or [s.number for s in load_stages()]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of other stages are not even read."""
    number = re.match(r"test_stage_(\d+)_", collection_path.name)
    return True if number and int(number[1]) not in stages_of(config) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        numbers = stages_of(metafunc.config)
        ids = [f"stage{n}" for n in numbers]
        metafunc.parametrize("subject", numbers, ids=ids, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here:
        if exercise_of(item):
            item.add_marker("exercise")
    dropped = {item for item in here if not applies(config, item)}
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]
    if learning(config):  # each exercise by itself, then the parts of a stage, then the whole of it
        own = tuple(f"test_stage_{number}_" for number in config.getoption("stage") or ())

        def place(item: pytest.Item) -> tuple[object, ...]:
            name = item.path.name
            several_ranks = "start_ranks" in getattr(item, "fixturenames", ())  # these take seconds to start
            # Conformance before the other tests of the whole: where it fails, the oracle says what to suspect
            whole = not name.startswith(own), not name.startswith("test_stage_"), name != "test_conformance.py"
            return exercise_of(item) or "9", *whole, several_ranks

        items.sort(key=place)


def exercise_of(item: pytest.Item) -> str | None:
    return getattr(getattr(item, "function", None), "exercise", None)


def applies(config: pytest.Config, item: pytest.Item) -> bool:
    wanted = config.getoption("stage")
    callspec: Any = getattr(item, "callspec", None)
    number: Any = (callspec.params if callspec else {}).get("subject", WITHOUT_SUBJECT.get(item.path.name))
    if number is None:
        return not learning(config)  # tests what all stages share, none of which is the learner's
    if wanted and number not in wanted:
        return False
    test: Any = getattr(item, "function", None)
    first, last = getattr(test, "stages", (1, None))
    if number < first or (last is not None and number > last):
        return False
    return set(getattr(test, "needs", ())) <= arguments(number)


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Subject:
    """The stage under test."""
    package = request.config.getoption("impl")
    found = Subject(load_stage(request.param), package)
    name = f"{package}.{found.stage.module_name}"
    if package == "exercises" and (not importlib.util.find_spec(package) or not importlib.util.find_spec(name)):
        hint = f"{name.replace('.', '/')}.py does not exist yet: `make stage-{found.number}-exercise` writes it"
        if request.config.getoption("stage"):
            pytest.fail(hint, pytrace=False)
        pytest.skip(hint)
    return found


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory of tiny checkpoints for the whole session (see tests/weights.py)."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def shadow(checkpoints: Path) -> Path:
    return shadow_checkpoint(checkpoints)


@pytest.fixture(scope="session")
def story_model() -> Path:
    """The embedded model. Before there are any assets the test is skipped; once there are, a missing one is a fault."""
    if not ASSETS.is_dir():
        pytest.skip("the embedded model is not there yet: assets/ does not exist")
    model = ASSETS / "story_model"
    missing = [n for n in ("config.json", "model.safetensors", "tokenizer.json") if not (model / n).is_file()]
    if missing:
        pytest.fail(f"assets/story_model lacks {', '.join(missing)}; restore it from git", pytrace=False)
    return model


# --- a learner's run --------------------------------------------------------------------------------------------------


def still_open(name: str, stage: int) -> str:
    """What the test of an open exercise says: its hint, not a traceback."""
    hints = {f"exercise {hole.name}": hole.hint for hole in find_holes(solution(load_stage(stage)))} if stage else {}
    told = f"still open: {name}: {hints[name]}" if name in hints else f"still open: {name}"
    return textwrap.fill(told, line_width(), break_on_hyphens=False)


def runs_all(config: pytest.Config) -> bool:
    """Whether all tests of a stage run, so that what they find is worth a record."""
    chosen = config.option.keyword or config.option.markexpr not in config.getini("addopts")
    return not chosen and config.args == ["tests/stages"]


class Lesson:
    """A run on a learner's file: what is wrong first, told in short; which exercises are right; and a record of it.

    The tests of an exercise end with its first failure, and the run ends before the other tests if an exercise is not
    right yet: they could only say the same, less clearly. Otherwise it ends with the first failure.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.one_failure = not config.option.maxfail  # the user has not asked for more
        config.option.reportchars = config.option.reportchars.strip("fE")  # every failure is told once
        self.whole = runs_all(config)
        self.watch = watch()
        self.holes: dict[str, str] = {}  # exercise -> right, wrong, open, or for which other exercise it waits
        self.failed: dict[int, str] = {}  # stage -> its first test that failed
        self.passed: dict[int, int] = {}
        self.digests: dict[int, str] = {}  # of the files in exercises/
        self.own: list[Stage] = []  # earlier stages of the learner's on which the file is tested
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(Sequence, "finish_reason", self.checked(Sequence.finish_reason))
        package = importlib.util.find_spec("exercises")
        if package is None or package.origin != str(EXERCISES / "__init__.py"):
            return  # a copy that somebody tests, for instance with a mistake planted
        for number in config.getoption("stage") or ():
            path = EXERCISES / f"{load_stage(number).module_name}.py"
            if path.is_file():
                self.digests[number] = digest_of(path.read_text(encoding="utf-8"))
                self.own += use_own(load_stage(number))

    def pytest_report_header(self) -> str | None:
        numbers = " and ".join(str(stage.number) for stage in self.own)
        return f"on your own stage{'s' * (len(self.own) > 1)} {numbers}" if self.own else None

    def checked(self, finish_reason: Any) -> Any:
        """A new token is progress, unless there are more than were wanted."""

        def checked(seq: Sequence, eos_token_ids: frozenset[int]) -> Any:
            if len(seq.token_ids) > seq.limit:
                raise AssertionError(
                    f"request {seq.request} has {seq.num_output_tokens} output tokens, and max_tokens is "
                    f"{seq.params.max_tokens}\nlikely: the value that append_token returns is not used: it tells "
                    "whether the sequence is finished"
                )
            self.watch.progress()
            return finish_reason(seq, eos_token_ids)

        return checked

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        hole = exercise_of(item)
        if hole is None and self.one_failure and not set(self.holes.values()) <= {"right"}:
            item.session.shouldfail = "first the exercises, each by itself; then the stage as a whole"
            return True  # True: the test need not run
        return True if self.holes.get(hole or "", "right") != "right" else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report: Any = yield
        self.watch.progress()
        hole, stage = exercise_of(item), getattr(item, "callspec", None)
        number = (stage.params if stage else {}).get("subject") or WITHOUT_SUBJECT.get(item.path.name, 0)
        if call.excinfo is not None and report.failed:
            is_open = call.excinfo.errisinstance(NotImplementedError)
            self.failed.setdefault(number, item.nodeid)
            if hole and not is_open:
                self.holes[hole] = "wrong"
            elif hole:
                name = str(call.excinfo.value).removeprefix("exercise ")
                self.holes[hole] = "open" if name == hole else f"waits for {name}"
            if is_open and hole and self.holes[hole] != "open" and self.holes.get(name) == "open":
                report.longrepr = f"waits for exercise {name}, which is open"
            elif is_open:
                report.longrepr = still_open(str(call.excinfo.value), number)
            elif item.config.option.tbstyle == "auto" and not call.excinfo.errisinstance(pytest.fail.Exception):
                test: Any = getattr(item, "function", None)
                culprit = hole_at(test, call.excinfo.tb)
                if hole and culprit and culprit != hole and self.holes.get(culprit) == "wrong":
                    self.holes[hole] = f"waits for {culprit}"
                    report.longrepr = f"waits for exercise {culprit}, which is wrong"
                else:
                    report.longrepr = in_short(test, call.excinfo.value, call.excinfo.tb)
            if hole is None and self.one_failure:
                item.session.shouldfail = "one thing at a time: the tests end here"
        elif call.when == "call" and report.passed:
            self.passed[number] = self.passed.get(number, 0) + 1
            if hole:
                self.holes.setdefault(hole, "right")
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.holes:
            terminalreporter.section("exercises")
            for hole, state in sorted(self.holes.items()):
                terminalreporter.write_line(f"{hole}  {state}", green=state == "right", red=state == "wrong")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.watch.end()
        self.patch.undo()
        called_off = exitstatus == pytest.ExitCode.INTERRUPTED and not session.testsfailed
        for number, digest in self.digests.items() if self.whole and not called_off else ():
            wrong = [hole for hole, state in sorted(self.holes.items()) if state == "wrong"]
            save_result(
                EXERCISES,
                load_stage(number),
                Result(digest, self.failed.get(number), self.passed.get(number, 0), wrong=wrong),
            )
