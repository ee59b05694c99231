"""What a start is made of: how long each part takes, in the log at level DEBUG; and large imports that cost less."""

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
    """Within this context no garbage is collected. Later collections pass over all objects that exist when it ends.

    An import leaves next to no garbage. Yet while torch is imported, collections visit all objects made so far, again
    and again, and this takes a tenth of the time. Later each full collection visits all of them. This context does
    nothing if torch has been imported already, or if garbage collection is switched off.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.collect()  # for `freeze` would keep what is garbage now
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
