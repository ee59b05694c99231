"""`answers` is the module that a check is about: the file of the same name in the directory given with --answers."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
STORY_MODEL = str(ROOT / "assets" / "story_model")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--answers", type=Path, required=True, help="directory with the files to be checked")


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> ModuleType:
    name = request.path.stem.removeprefix("check_")
    path = request.config.getoption("--answers") / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"answers_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def story_model() -> str:
    return STORY_MODEL
