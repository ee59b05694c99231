"""Small programs whose output lectures show: `python -m tools.lectures.lecture_experiments` runs them all, and
stores it.

lectures/experiments holds each beside its output (NAME.py and NAME.txt). They print nothing that depends on the
machine, such as times; a test runs them again and compares.
"""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path

from tools.exercises.exercises import ROOT

EXPERIMENTS = ROOT / "lectures" / "experiments"


def experiments() -> list[Path]:
    return sorted(EXPERIMENTS.glob("*.py"))


def printed_by(path: Path) -> str:
    """What the program prints, run as a script within this process."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def main() -> None:
    for path in experiments():
        path.with_suffix(".txt").write_text(printed_by(path), encoding="utf-8")
        print(path.with_suffix(".txt").relative_to(ROOT))


if __name__ == "__main__":
    main()
