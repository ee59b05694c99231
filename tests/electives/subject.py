"""An elective behind the face of a stage, so that the stages' conformance suite runs over it."""

import importlib.util
import inspect
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stages.manifest import Elective, load_elective
from tests.stages.subject import Subject


@dataclass(frozen=True)
class ElectiveSubject:
    """See `tests.stages.subject.Subject`."""

    elective: Elective
    package: str = "stages"
    number: int = 5  # its costs are those of the stage that it stands on
    recomputes: bool = False

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"{self.package}.{self.elective.module_name}")

    @property
    def options(self) -> set[str]:
        return set(inspect.signature(self.elective.engine_class()).parameters)

    def engine(self, path: Path, **options: Any) -> Any:
        return getattr(self.module, self.elective.class_name)(path, **options)

    check_idle = Subject.check_idle


def make_subject(name: str, package: str) -> ElectiveSubject:
    """The elective of that name, from `stages` or from the learner's `exercises`, whose file must be there."""
    elective = load_elective(name)
    if package == "exercises":
        try:
            found = importlib.util.find_spec(f"exercises.{elective.module_name}")
        except ModuleNotFoundError:
            found = None
        if found is None:
            pytest.fail(
                f"exercises/{elective.file} does not exist yet: `make elective-{name}-exercise` writes it",
                pytrace=False,
            )
    return ElectiveSubject(elective, package)
