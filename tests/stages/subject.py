"""What is tested: one stage, or anything else that generates, behind one face; and for which stages a test is meant."""

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from stages.manifest import Stage, load_stage

T = TypeVar("T", bound=Callable[..., Any])


def since(first: int, last: int | None = None) -> Callable[[T], T]:
    """The test is meant for the stages from `first` on (to `last`, where a later one changes what it tests)."""

    def mark(test: T) -> T:
        test.stages = (first, last)  # type: ignore[attr-defined]
        return test

    return mark


def needs(*options: str) -> Callable[[T], T]:
    """The test says nothing about an engine without these arguments."""

    def mark(test: T) -> T:
        test.needs = options  # type: ignore[attr-defined]
        return test

    return mark


@dataclass(frozen=True)
class Subject:
    """A stage, from `stages` or from the learner's `exercises`."""

    stage: Stage
    package: str = "stages"

    @property
    def number(self) -> int:
        return self.stage.number

    @property
    def options(self) -> frozenset[str]:
        return arguments(self.number)

    @property
    def recomputes(self) -> bool:
        """Keeps no keys and values: only stage 1."""
        return self.number == 1

    @property
    def module(self) -> ModuleType:
        """The stage's file, for tests of its parts."""
        return importlib.import_module(f"{self.package}.{self.stage.module_name}")

    def part(self, name: str) -> Any:
        """A class or function that this stage defines or takes over from an earlier one."""
        if hasattr(self.module, name):
            return getattr(self.module, name)
        return next(getattr(m, name) for m in map(solution, range(self.number, 0, -1)) if hasattr(m, name))

    def home(self, name: str) -> ModuleType:
        """The module that defines this part, for tests that replace it there."""
        return sys.modules[self.part(name).__module__]

    def engine(self, path: Path, **options: Any) -> Any:
        """A fresh engine. Arguments that this stage does not have yet are left out.

        Where ranks can be chosen there is one unless more are asked for: the same code, but no process to start.
        """
        options = {"tensor_parallel_size": 1} | options
        engine_class = getattr(self.module, self.stage.class_name)
        return engine_class(path, **{k: v for k, v in options.items() if k in self.options})

    def check_idle(self, engine: Any) -> None:
        """Nothing is held when nothing runs."""
        if scheduler := getattr(engine, "scheduler", None):
            assert not scheduler.waiting and not scheduler.running, "an idle engine has sequences in its queues"
        if pool := getattr(engine, "pool", None):
            assert sorted(pool.free_list) == list(range(pool.num_blocks)), f"free when idle: {sorted(pool.free_list)}"
            assert not any(getattr(pool, "ref_counts", [])), f"reference counts when idle: {pool.ref_counts}"


def solution(number: int) -> ModuleType:
    return importlib.import_module(f"stages.{load_stage(number).module_name}")


@cache  # asked for every test, and each time the manifest would be read
def arguments(number: int) -> frozenset[str]:
    """The arguments that the engine of a stage takes."""
    return frozenset(inspect.signature(load_stage(number).engine_class()).parameters)
