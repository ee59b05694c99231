"""What makes the assets, the exercises and the diffs; nothing here is needed to run an engine."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # of the repository
CALLED_OFF = 130  # 128 + SIGINT, as a shell counts


def cache() -> Path:
    """The folder for models and other files that are downloaded once. It may not exist yet."""
    return Path(os.environ.get("NANOVLLM_CACHE") or "~/.cache/nanovllm").expanduser()


def until_ctrl_c(main: Callable[[], int | None]) -> int:
    """The exit status of `main`, whose None is 0. Ctrl-C ends it with a line and CALLED_OFF, without a traceback.

    A reader that has seen enough, as in `| head`, ends it without a word and with 0.
    """
    try:
        status = main() or 0
        sys.stdout.flush()  # while a closed pipe can still be caught
        return status
    except KeyboardInterrupt:
        print("\ncalled off", file=sys.stderr)  # on a line of its own: a text may end anywhere, and terminals show ^C
        return CALLED_OFF
    except (BrokenPipeError, SystemExit) as error:
        pipe = error if isinstance(error, BrokenPipeError) else error.__context__  # rich makes a SystemExit of it
        if not isinstance(pipe, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return 0
