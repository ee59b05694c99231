"""The server's log, which nobody can flood: a message that comes again and again is counted instead."""

import logging
import time
from collections.abc import Callable

LEVELS = "debug", "info", "warning", "error"
SECONDS, OFTEN, MOST = 60.0, 5, 1000


class NoStorm(logging.Filter):
    """Lets the same message through `OFTEN` times in `SECONDS`, and says later how many more there were.

    Messages are the same if they come from the same place and begin alike. The access log is not thinned out: it is
    there to have every line, and can be switched off.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}  # since when, and how often since then

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == "nanovllm.access":
            return True
        if len(self._seen) > MOST:
            self._seen.clear()
        now, key = self._clock(), (record.name, record.lineno, str(record.msg)[:40])
        since, number = self._seen.get(key, (now, 0))
        if now - since >= SECONDS:
            if number > OFTEN:
                record.msg, record.args = f"{record.getMessage()} (and {number - OFTEN} times more before)", ()
            since, number = now, 0
        self._seen[key] = since, number + 1
        return number < OFTEN


def set_up(level: str) -> None:
    """All of this process logs to standard error, from `level` on."""
    handler = logging.StreamHandler()
    handler.addFilter(NoStorm())
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s", handlers=[handler])
    # uvicorn tells at these levels of every start and end of its own.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
