"""The list of stages and electives, read from stages.toml. Everything that names one of them asks here."""

import importlib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """What stages and electives say of themselves."""

    name: str  # what make targets and exercises call it: "4", or "moe"
    slug: str
    title: str
    class_name: str
    idea: str
    removes: str
    costs: str
    needs: list[str]
    options: list[str]  # engine arguments beyond model, device, dtype and on_event
    showcase: str
    exercises: list[list[int]]  # about how many minutes each hole takes, and its difficulty, 1 to 3

    @property
    def kind(self) -> str:
        """ "stage" or "elective"."""
        return type(self).__name__.lower()

    @property
    def module_name(self) -> str:
        raise NotImplementedError

    @property
    def file(self) -> str:
        """The file within stages/, or within exercises/."""
        return f"{self.module_name.replace('.', '/')}.py"

    def engine_class(self, package: str = "stages") -> Any:
        """The engine of this chapter; `package="exercises"` takes the learner's file instead of ours."""
        return getattr(importlib.import_module(f"{package}.{self.module_name}"), self.class_name)


@dataclass(frozen=True, kw_only=True)
class Stage(Chapter):
    number: int

    @property
    def module_name(self) -> str:
        return f"stage_{self.number}_{self.slug}"


@dataclass(frozen=True, kw_only=True)
class Elective(Chapter):
    model: str  # an embedded one that shows what the elective is about, by its folder in assets/
    demo: dict[str, Any] = field(default_factory=dict)  # engine arguments with which the live view shows it

    @property
    def module_name(self) -> str:
        return f"electives.{self.slug}"


def read_manifest() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(Path(__file__).with_name("stages.toml").read_text(encoding="utf-8"))


def load_stages() -> list[Stage]:
    """All stages in order."""
    return [Stage(name=str(stage["number"]), **stage) for stage in read_manifest()["stage"]]


def load_stage(number: int) -> Stage:
    """The stage of that number. Raises ValueError if there is none."""
    stages = {s.number: s for s in load_stages()}
    if number not in stages:
        raise ValueError(f"there is no stage {number}; there are {', '.join(map(str, sorted(stages)))}")
    return stages[number]


def load_electives() -> list[Elective]:
    """All electives, in the order in which they are listed."""
    return [Elective(**elective) for elective in read_manifest()["elective"]]


def load_elective(name: str) -> Elective:
    """The elective of that name. Raises ValueError if there is none."""
    electives = {e.name: e for e in load_electives()}
    if name not in electives:
        raise ValueError(f"there is no elective {name!r}; there are {', '.join(electives)}")
    return electives[name]


def load_chapter(name: str) -> Chapter:
    """The stage of that number, or the elective of that name. Raises ValueError if there is none."""
    return load_stage(int(name)) if name.isdecimal() else load_elective(name)
