"""Runs of a stage's tests in a process of their own, for tests about these tests: pytest does not nest well."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Job:
    """Put `source` in the place of the stage's file and run its tests (those in `target`)."""

    name: str
    stage: str  # number of a stage, or name of an elective
    source: str
    target: str | None = None


@dataclass(frozen=True)
class Result:
    """What the first failing test was and what it said; `test` is None if all passed."""

    test: str | None
    message: str
    passed: int


def run_jobs(jobs: list[Job], timeout: float) -> dict[str, Result]:
    """Results by the jobs' names."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.stage_jobs"],
        input=json.dumps([asdict(job) for job in jobs]),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: Result(**result) for name, result in json.loads(done.stdout).items()}


def main() -> None:
    from stages.manifest import load_chapter
    from tools.exercises.mutants import run_tests

    results = {}
    for job in (Job(**job) for job in json.load(sys.stdin)):
        verdict = run_tests(load_chapter(job.stage), job.source, job.target)
        results[job.name] = {"test": verdict.test, "message": verdict.message, "passed": verdict.passed}
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
