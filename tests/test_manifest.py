"""The manifest says what is there, and every stage keeps to the form that all of them have."""

import ast
import inspect
import re
import tomllib

import pytest

from stages.core import Engine
from stages.manifest import Chapter, Stage, load_elective, load_electives, load_stage, load_stages
from tools import ROOT

STAGES, ELECTIVES = load_stages(), load_electives()
CHAPTERS: list[Chapter] = [*STAGES, *ELECTIVES]
by_slug = pytest.mark.parametrize("stage", CHAPTERS, ids=lambda stage: stage.slug)
SHARED = set(inspect.signature(Engine.__init__).parameters)  # model, device, dtype, on_event and self
MAX_LINES = 300
MAX_DOCSTRING_LINES = 12


def text_of(stage: Chapter) -> str:
    return (ROOT / "stages" / f"{stage.module_name.replace('.', '/')}.py").read_text(encoding="utf-8")


def docstring(stage: Chapter) -> str:
    return ast.get_docstring(ast.parse(text_of(stage))) or ""


def test_the_manifest_lists_the_files_there_are_in_order() -> None:
    assert [stage.number for stage in STAGES] == list(range(1, len(STAGES) + 1))
    assert {f"{stage.module_name}.py" for stage in STAGES} == {p.name for p in (ROOT / "stages").glob("stage_*.py")}


def test_the_manifest_lists_the_electives_there_are() -> None:
    files = {path.stem for path in (ROOT / "stages" / "electives").glob("[a-z]*.py")}
    assert {elective.slug for elective in ELECTIVES} == files
    assert len({elective.name for elective in ELECTIVES}) == len(ELECTIVES)
    assert all(elective.needs[0] == "stage 5" for elective in ELECTIVES)
    assert all((ROOT / "assets" / elective.model / "config.json").is_file() for elective in ELECTIVES)
    assert {f"test_{slug}.py" for slug in files} == {p.name for p in (ROOT / "tests" / "electives").glob("test_*.py")}


@by_slug
def test_a_stage_says_all_that_the_manifest_has_room_for(stage: Chapter) -> None:
    for field in ("title", "idea", "removes", "costs", "showcase"):
        assert getattr(stage, field).strip()
    if isinstance(stage, Stage):
        for need in stage.needs[stage.number == 1 :]:
            assert load_stage(int(need.removeprefix("stage "))).number < stage.number


@by_slug
def test_a_stage_file_keeps_to_its_budget(stage: Chapter) -> None:
    assert len(text_of(stage).splitlines()) <= MAX_LINES


@by_slug
def test_the_engine_takes_the_options_of_the_manifest(stage: Chapter) -> None:
    parameters = inspect.signature(stage.engine_class()).parameters
    own = {name: p for name, p in parameters.items() if name not in SHARED}
    assert set(stage.options) <= own.keys()
    # Whatever else a stage offers chooses between ways to compute the same, which the manifest need not know
    assert own.keys() - set(stage.options) <= {"attention"}
    for name, parameter in own.items():
        assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty, name
    for name in SHARED - {"self"}:
        assert name in parameters
    with pytest.raises(TypeError, match="no_such_option"):
        stage.engine_class()("somewhere", no_such_option=1)


@by_slug
def test_the_docstring_tells_the_story_in_order(stage: Chapter) -> None:
    text = docstring(stage)
    name = f"Stage {stage.number}" if isinstance(stage, Stage) else "Elective"
    assert re.search(rf"^{name}: (the )?{re.escape(stage.title)}\.$", text.splitlines()[0], re.IGNORECASE)
    places = [re.search(rf"^{start}", text, re.MULTILINE) for start in ("What hurts?:", "The idea:", "Still hurts:")]
    assert all(places), "a heading is missing"
    assert places == sorted(places, key=lambda m: m.start() if m else 0)
    assert len(text.splitlines()) <= MAX_DOCSTRING_LINES
    if isinstance(stage, Stage) and stage.number < len(STAGES):
        assert f"tage {stage.number + 1}" in text[text.index("Still hurts:") :], "what hurts leads to the next stage"


def test_an_unknown_stage_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="there is no stage 0; there are 1, 2, 3"):
        load_stage(0)
    with pytest.raises(ValueError, match="there is no elective 'fp7'; there are moe"):
        load_elective("fp7")


def test_the_manifest_travels_with_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "*.toml" in project["tool"]["setuptools"]["package-data"]["stages"]
