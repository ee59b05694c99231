"""What a start is made of: how long each part takes, in the log."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def part_of_start(name: str) -> Iterator[None]:
    """Log how many seconds the body takes (`python -m benchmarks.engine startup` makes a table of these lines)."""
    began = time.perf_counter()
    yield
    logger.info("start: %s took %.2f s", name, time.perf_counter() - began)
