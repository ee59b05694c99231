"""What makes the assets, the exercises and the diffs; nothing here is needed to run an engine."""

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # of the repository
CALLED_OFF = 130  # 128 + SIGINT, as a shell counts


def until_ctrl_c(main: Callable[[], int | None]) -> int:
    """The exit status of `main`, whose None is 0. Ctrl-C ends it with a line and CALLED_OFF, without a traceback."""
    try:
        return main() or 0
    except KeyboardInterrupt:
        print("\ncalled off", file=sys.stderr)  # on a line of its own: a text may end anywhere, and terminals show ^C
        return CALLED_OFF
