"""How a tool ends when somebody presses Ctrl-C: with one line and the exit status of shells, without a traceback."""

import sys
from collections.abc import Callable

CALLED_OFF = 130  # 128 + SIGINT, as a shell counts


def until_ctrl_c(main: Callable[[], int | None]) -> int:
    """The exit status of `main`, whose None is 0; that of Ctrl-C if it is called off."""
    try:
        return main() or 0
    except KeyboardInterrupt:
        print("\ncalled off", file=sys.stderr)  # on a line of its own: a text may end anywhere, and terminals show ^C
        return CALLED_OFF
