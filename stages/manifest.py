"""The list of stages, read from stages.toml. Everything that names a stage asks here."""

import importlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Stage:
    number: int
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
    def module_name(self) -> str:
        return f"stage_{self.number}_{self.slug}"

    def engine_class(self, package: str = "stages") -> Any:
        """The engine of this stage; `package="exercises"` takes the learner's file instead of ours."""
        return getattr(importlib.import_module(f"{package}.{self.module_name}"), self.class_name)


def load_stages() -> list[Stage]:
    """All stages in order."""
    raw = tomllib.loads(Path(__file__).with_name("stages.toml").read_text(encoding="utf-8"))
    return [Stage(**stage) for stage in raw["stage"]]


def load_stage(number: int) -> Stage:
    """The stage of that number. Raises ValueError if there is none."""
    stages = {s.number: s for s in load_stages()}
    if number not in stages:
        raise ValueError(f"there is no stage {number}; there are {', '.join(map(str, sorted(stages)))}")
    return stages[number]
