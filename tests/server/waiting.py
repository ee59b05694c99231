"""Waiting, with an end."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        await asyncio.sleep(0.001)
