"""Runs of a stage's tests in a process of their own, for tests about these tests: pytest does not nest well.

One process serves all tests that ask (the fixture `stage_jobs`), since it takes longer to start than most runs do.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Timer
from typing import Any

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


class StageJobs:
    """The process that runs the jobs. The first of them starts it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def run(self, jobs: Sequence[Job], timeout: float) -> dict[str, Result]:
        """Results by the jobs' names. Raises RuntimeError, with what the process said, if the process ends, which is
        killed after `timeout` seconds."""
        process = self.process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        too_late = Timer(timeout, process.kill)
        too_late.start()
        results = {}
        try:
            for job in jobs:
                print(json.dumps(asdict(job)), file=process.stdin, flush=True)
                results[job.name] = Result(**json.loads(process.stdout.readline()))
        except (OSError, ValueError) as error:
            code = process.wait()
            self.close()
            self.stderr.seek(0)
            said = self.stderr.read()[-4000:]
            raise RuntimeError(f"the process ended with code {code} in job {job.name}:\n{said}") from error
        finally:
            too_late.cancel()
        return results

    def _start(self) -> "subprocess.Popen[str]":
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.stderr}
        return subprocess.Popen([sys.executable, "-m", "tests.stage_jobs"], text=True, cwd=ROOT, **pipes)

    def close(self) -> None:
        """End the process; another job starts another one."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()  # which closes the pipes
            self.process = None


def main() -> None:
    from stages.manifest import load_chapter
    from tools.exercises.mutants import run_tests

    questions, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the tests print is no answer
    for line in questions:
        job = Job(**json.loads(line))
        verdict = run_tests(load_chapter(job.stage), job.source, job.target)
        result = Result(verdict.test, verdict.message, verdict.passed)
        print(json.dumps(asdict(result)), file=answers, flush=True)


if __name__ == "__main__":
    main()
