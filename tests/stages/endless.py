"""A loop of a learner's that never ends is ended, with a message that says which one it is.

A thread looks at the stacks of all others, four times a second. A stack whose beginning has stayed the same for
`PATIENCE` is stuck in the last function of that beginning, and where that is in a loop of a stage or a test, an
`EndlessLoop` is raised in it. Time is counted in CPU seconds, so a slow or busy machine, a debugger's prompt and a wait
for another process do not count. A new token, or the next test, begins the count anew.

In the processes of stage 7's workers, `exercises/__init__.py` starts the same watch where `WATCHED` is set.
"""

import ast
import ctypes
import linecache
import os
import re
import sys
import threading
import time
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

PATIENCE = 5.0  # seconds of CPU time; no test computes half as long without a token
LOOK = 0.25  # seconds between two looks
WATCHED = "NANOVLLM_WATCH_LOOPS"
# A learner's file, a stage that it builds on, or a test; a worker's wait for messages is none of these
OURS = re.compile(r"(exercises|stages)[/\\]stage_\d\w*\.py$|tests[/\\]stages[/\\]test_\w+\.py$")


class EndlessLoop(AssertionError):
    """Raised in the thread that does not get out of a loop, by a subclass whose instances carry the message."""


class Watch(threading.Thread):
    """The thread that looks. `progress` is to be called whenever something was achieved."""

    def __init__(self) -> None:
        super().__init__(name="endless loops", daemon=True)
        self.achieved = 0
        self.over = threading.Event()

    def progress(self, *_: object) -> None:
        self.achieved += 1

    def end(self) -> None:
        os.environ.pop(WATCHED, None)
        self.over.set()

    def run(self) -> None:
        beginnings: dict[int, list[FrameType]] = {}
        achieved, spent, looked, cpu = self.achieved, 0.0, time.monotonic(), time.process_time()
        while not self.over.wait(LOOK):
            stacks = {thread: stack(frame) for thread, frame in sys._current_frames().items() if thread != self.ident}
            wall_now, cpu_now = time.monotonic(), time.process_time()
            # The smaller of the two: a pause costs no CPU time, and several threads use more than there is
            spent += min(wall_now - looked, cpu_now - cpu)
            looked, cpu = wall_now, cpu_now
            if achieved != self.achieved:
                achieved, spent, beginnings = self.achieved, 0.0, {}
            beginnings = {thread: common(beginnings.get(thread, now), now) for thread, now in stacks.items()}
            if spent < PATIENCE:
                continue
            for thread, frames in beginnings.items():
                if frames and (told := describe(frames[-1])):
                    interrupt(thread, told)
            spent, beginnings = 0.0, {}


def stack(frame: FrameType | None) -> list[FrameType]:
    """The frames of a thread, the outermost first."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def common(before: list[FrameType], now: list[FrameType]) -> list[FrameType]:
    length = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a is not b), None)
    return now[: min(len(before), len(now)) if length is None else length]


def describe(frame: FrameType) -> str | None:
    """What a learner should read about the loop in which `frame` is; None if it is in no loop of ours."""
    path, line = frame.f_code.co_filename, frame.f_lineno
    if not OURS.search(path):
        return None
    around = [(first, last) for first, last in loops(path) if first <= line <= last]
    if not around:
        return None
    first = around[-1][0]
    file = "/".join(Path(path).parts[-2:])
    return (
        f"an endless loop in {frame.f_code.co_qualname}, {file}:{first}\n"
        f"    {linecache.getline(path, first).strip()}\n"
        f"No request has got a token, and no test has ended, for {PATIENCE:g} s of computing. "
        f"What was to happen inside the loop, so that it ends?"
    )


@cache
def loops(path: str) -> list[tuple[int, int]]:
    """First and last line of every loop of a file, inner ones behind those that they are in."""
    tree = ast.parse("".join(linecache.getlines(path)))
    found = [n for n in ast.walk(tree) if isinstance(n, ast.While | ast.For)]
    return sorted(((n.lineno, n.end_lineno or n.lineno) for n in found), key=lambda span: (span[0], -span[1]))


def interrupt(thread: int, message: str) -> None:
    """Raise an EndlessLoop in another thread, as soon as it runs Python again."""

    def explain(self: EndlessLoop, *_: Any) -> None:
        AssertionError.__init__(self, message)

    # Only a class can be handed over, and it is called without arguments
    error = type("EndlessLoop", (EndlessLoop,), {"__init__": explain, "__module__": __name__})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def watch() -> Watch:
    """Watch this process, and the workers that it starts from now on."""
    for thread in threading.enumerate():
        if isinstance(thread, Watch) and not thread.over.is_set():
            return thread
    os.environ[WATCHED] = "1"
    watcher = Watch()
    watcher.start()
    return watcher
