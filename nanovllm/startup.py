"""What a start is made of: how long each part takes, in the log at level DEBUG; and imports that cost less."""

import gc
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def part_of_start(name: str) -> Iterator[None]:
    """Log how many seconds the body takes (`python -m benchmarks.engine startup` makes a table of these lines)."""
    began = time.perf_counter()
    yield
    logger.debug("start: %s took %.2f s", name, time.perf_counter() - began)


@contextmanager
def large_imports() -> Iterator[None]:
    """Within this context no garbage is collected, and later collections pass over what is there when it ends.

    An import leaves next to no garbage. Yet while torch is imported, collections visit all that it has made so far,
    again and again, for a tenth of the time; later, each full collection visits all of it. Nothing happens if torch has
    been imported already, or if garbage is not collected anyway.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.collect()  # nobody would look for it later
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
