"""A learner's stage in the place of ours, on the learner's own earlier stages where these pass their tests.

A stage's file imports what it builds on from `stages`. Before a learner's file is imported, the earlier files that
`progress` has recorded as done take the names of ours in `sys.modules`.
"""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from stages.manifest import Chapter, Stage, load_stages
from tools.exercises.exercises import solution
from tools.exercises.progress import EXERCISES, read_progress, run_tests


def builds_on(stage: Chapter) -> list[Stage]:
    """The earlier stages whose code runs in this one, in order."""
    imported = {int(n) for n in re.findall(r"^from stages\.stage_(\d+)_\w+ import", solution(stage), re.MULTILINE)}
    direct = [earlier for earlier in load_stages() if earlier.number in imported]
    found = {s.number: s for earlier in direct for s in [*builds_on(earlier), earlier]}
    return [found[number] for number in sorted(found)]


def use_own(stage: Chapter, directory: Path = EXERCISES) -> list[Stage]:
    """Let the learner's own earlier stages stand for ours from now on in this process. Returns those that do."""
    own = [earlier for earlier in builds_on(stage) if read_progress(earlier, directory).done]
    for earlier in own:
        sys.modules[f"stages.{earlier.module_name}"] = importlib.import_module(f"exercises.{earlier.module_name}")
    return own


def require_right(stage: Stage) -> None:
    """End the program unless all exercises in the learner's file are right, with what the tests say of the first wrong.

    The tests of the exercises run now, unless all tests of the stage have passed on this very file.
    """
    progress, file, n = read_progress(stage, EXERCISES), f"exercises/{stage.module_name}.py", stage.number
    if not progress.written:
        sys.exit(f"{file} does not exist yet: `make stage-{n}-exercise` writes it")
    if not progress.done:
        print(f"First the exercises in {file}, each by itself:", flush=True)
        if run_tests(stage, "-m", "exercise"):
            sys.exit(f"Your stage {n} runs when they are right. The same tests: make stage-{n}-test IMPL=exercises")


def engine_class(stage: Chapter, impl: str) -> Any:
    """The engine of a chapter. With impl="exercises" it is that of the learner's file, which must exist."""
    if impl == "exercises":
        use_own(stage)
    return stage.engine_class(impl)
