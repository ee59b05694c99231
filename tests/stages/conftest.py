"""Which stages are tested, from where, and what a learner reads when a test fails.

A test that takes the fixture `subject` runs once for every stage from which on it applies (see `subject.since` and
`subject.needs`). `--stage 4` leaves only stage 4; `--impl exercises` takes the learner's file in place of ours.
"""

import importlib.util
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from stages.manifest import load_stage, load_stages
from tests.stages.ranks import awkward_model, awkward_ranks, start_ranks, story_ranks
from tests.stages.shadow import shadow_checkpoint
from tests.stages.subject import Subject, arguments

ASSETS = Path(__file__).parents[2] / "assets"
__all__ = ["awkward_model", "awkward_ranks", "start_ranks", "story_ranks"]  # fixtures of stage 7

WITHOUT_SUBJECT = {"test_paged_attention_triton.py": 3}  # files that belong to one stage though they test no engine


def pytest_configure(config: pytest.Config) -> None:
    known = [s.number for s in load_stages()]
    for number in config.getoption("stage") or ():
        if number not in known:
            raise pytest.UsageError(f"--stage {number}: there are only the stages {', '.join(map(str, known))}")
    if learning(config):  # a learner wants the first thing that is wrong, and why; not sixty tracebacks
        if config.option.tbstyle == "auto":
            config.option.tbstyle = "short"
        config.option.maxfail = config.option.maxfail or 3


def learning(config: pytest.Config) -> bool:
    return bool(config.getoption("impl") == "exercises")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        numbers = [s.number for s in load_stages()]
        ids = [f"stage{n}" for n in numbers]
        metafunc.parametrize("subject", numbers, ids=ids, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    dropped = {item for item in here if not applies(config, item)}
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]
    if learning(config):  # the parts of a stage before the whole of it
        own = tuple(f"test_stage_{number}_" for number in config.getoption("stage") or ())

        def place(item: pytest.Item) -> tuple[bool, bool, bool]:
            name = item.path.name
            several_ranks = "start_ranks" in getattr(item, "fixturenames", ())  # these take seconds to start
            return not name.startswith(own), not name.startswith("test_stage_"), several_ranks

        items.sort(key=place)


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """An open exercise is not a mistake: show its text, not a traceback."""
    report: Any = yield
    if call.excinfo is not None and learning(item.config) and call.excinfo.errisinstance(NotImplementedError):
        report.longrepr = f"still open: {call.excinfo.value}"
    return report


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
