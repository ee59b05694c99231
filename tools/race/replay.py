"""Show recordings of the race at the speed at which it happened: `make replay`.

    python -m tools.race.replay [--recording DIRECTORY] [--engine stage_4] [--speed 2] [--from SECONDS] [--once]

One engine from inside is slowed down until it takes 20 seconds, so that eyes can follow. Needs neither torch nor a
model. In a terminal the space bar stops and goes on, the right and left arrows go a step on or back, q ends it. Without
one, or with --once, a single picture is printed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from nanovllm.trace_view.engine_state import Event
from tools import ROOT, until_ctrl_c
from tools.race.views import EngineView, Lane, draw_lanes, result_table
from tools.race.workload import SUFFIX, EngineRun, Race, load_race

try:  # not on Windows: no keys there
    import select
    import termios
    import tty
except ImportError:
    termios = None  # type: ignore[assignment]

SHIPPED = ROOT / "assets" / "recordings"
DEFAULT = SHIPPED / "cpu"
LASTS = 20.0  # seconds that one engine from inside takes, unless it takes longer by itself
FRAME = 1 / 15  # seconds between two pictures
STRIDE = 0.1  # seconds from one picture of the race to the next, when it is gone through by hand
CLOCKS = {"wall": "wall-clock times", "cpu": "times are CPU time of the one thread"}
Key = Literal["pause", "on", "back", "quit"]
KEYS: dict[bytes, Key] = {
    b" ": "pause", b"q": "quit", b"\x1b[C": "on", b"\x1bOC": "on", b"\x1b[D": "back", b"\x1bOD": "back",
}  # fmt: skip


def badge(race: Race) -> Text:
    """The first line of every picture: that it is a recording, and of what."""
    return Text.assemble((" RECORDING ", "bold white on red"), " ", (race.source, "bold"), overflow="ellipsis")


def describe(race: Race) -> str:
    together = "all at once" if race.together else "one at a time"
    return f"{len(race.workload.prompts)} requests, {race.workload.num_tokens} tokens, {race.model}, {together}"


class RaceShow:
    """All engines of a recorded race, drawn at the same time since their start, however they were run.

    There is a picture for every time from 0 to the duration. `stops` are the times, ascending, at which a step by hand
    may rest. `speed` is that of the show where nobody asks for another.
    """

    speed = 1.0
    over = True

    def __init__(self, runs: Sequence[EngineRun]) -> None:
        self.race = runs[0].race
        workload = self.race.workload
        self.lanes = [Lane(r.engine, r.title, workload.num_tokens, len(workload.prompts)) for r in runs]
        for lane, run in zip(self.lanes, runs, strict=True):
            lane.finish(run.events, run.seconds)
        self.duration = max(run.seconds for run in runs)
        self.stops: Sequence[float] = [STRIDE * i for i in range(1, int(self.duration / STRIDE) + 1)]

    def render(self, t: float, width: int, height: int) -> RenderableType:
        in_order = sorted((lane.seconds, i) for i, lane in enumerate(self.lanes) if lane.seconds is not None)
        for place, (seconds, i) in enumerate(in_order, start=1):
            self.lanes[i].mark = f"#{place}" if seconds <= t else ""
        return Group(badge(self.race), Text(describe(self.race), "dim"), "", draw_lanes(self.lanes, t, width))

    def conclude(self, console: Console) -> None:
        """Print what comes below the last picture."""
        race = self.race
        console.print(result_table(self.lanes, f"\nThe result, recorded on {race.source}"))
        console.print(
            f"{describe(race)}; KV memory for {race.workload.kv_slots} tokens; {CLOCKS[race.machine['clock']]}."
        )


class Inside:
    """One engine from inside: queues, counters, blocks, texts. Its events may still be coming.

    make_view: a picture that has seen nothing yet. `at` has the time in the show of each event, ascending.
    """

    over = True  # no event will come any more

    def __init__(self, make_view: Callable[[], EngineView], heading: Text) -> None:
        self.make_view, self.heading = make_view, heading
        self.events: list[Event] = []
        self.at: list[float] = []
        self.reset()

    def add(self, event: Event, at: float) -> None:
        self.events.append(event)
        self.at.append(at)  # last, since a picture may be drawn meanwhile

    @property
    def duration(self) -> float:
        return self.at[-1] if self.at else 0.0

    @property
    def stops(self) -> Sequence[float]:
        """Of each step the time when the last of its sequences was planned."""
        events = zip(self.events, self.at, strict=False)
        return sorted({event["step"]: at for event, at in events if event["type"] == "scheduled"}.values())

    def reset(self) -> None:
        self.view, self.position = self.make_view(), 0

    def seek(self, t: float) -> None:
        """Let the view see all events up to time t."""
        until = bisect_right(self.at, t)
        if until < self.position:
            self.reset()
        for event in self.events[self.position : until]:
            self.view.on_event(event)
        self.position = until

    def render(self, t: float, width: int, height: int) -> RenderableType:
        self.seek(t)
        return self.view.render(self.heading, width, height)


class EngineShow(Inside):
    """One recorded engine, as `make stage-N-demo` shows it live."""

    def __init__(self, run: EngineRun) -> None:
        self.run = run
        super().__init__(lambda: EngineView(run.race.workload, run.num_blocks), Text())
        for event in run.events:
            self.add(event, event["t"])
        self.speed = min(1.0, round(run.seconds / LASTS, 2))

    @property
    def duration(self) -> float:
        return self.run.seconds

    def render(self, t: float, width: int, height: int) -> RenderableType:
        self.seek(t)
        self.view.now = t
        heading = Text(f"{self.run.title}: {t:.2f} s", "bold")
        return Group(badge(self.run.race), self.view.render(heading, width, height - 1))

    def conclude(self, console: Console) -> None:
        self.seek(self.duration)
        generated, seconds, race = self.view.generated, self.run.seconds, self.run.race
        console.print(
            f"\n{self.run.title}, recorded on {race.source}: {generated} tokens in {seconds:.2f} s, "
            f"{generated / seconds:,.0f} tokens/s; {CLOCKS[race.machine['clock']]}."
        )


Show = RaceShow | EngineShow
Wait = Callable[[float], Key | None]  # the next key within so many seconds


class Player:
    """A show and a clock for it, which can be stopped, moved, and run at another speed than real time."""

    def __init__(
        self,
        show: RaceShow | Inside,
        *,
        speed: float = 1.0,
        start: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.show, self.speed, self.clock = show, speed, clock
        self.paused = False
        self.seek(start)

    def seek(self, t: float) -> None:
        self.base, self.since = min(max(0.0, t), self.show.duration), self.clock()

    def position(self) -> float:
        """Seconds of the show that have passed."""
        if self.paused:
            return self.base
        return min(self.show.duration, self.base + self.speed * (self.clock() - self.since))

    def press(self, key: Key) -> None:
        """Pause or go on; or pause and move to the next or previous of the show's stops."""
        t, stops = self.position(), self.show.stops
        self.seek(t)
        self.paused = key != "pause" or not self.paused
        if key == "on":
            self.seek(next((stop for stop in stops if stop > t), self.show.duration))
        elif key == "back":
            self.seek(next((stop for stop in reversed(stops) if stop < t), 0.0))

    def status(self, t: float, keys: bool) -> Text:
        """The line below the picture: the time, the speed, and the keys."""
        speed = "" if self.speed == 1 else f", {self.speed:.2g} times as fast"
        text = f"{t:.2f} of {self.show.duration:.2f} s{', stopped' if self.paused else speed}"
        return Text(text + "   space: stop, go on   → ←: a step   q: end" * keys, "dim")

    def play(self, console: Console, wait: Wait) -> bool:
        """Show it from where it is to the end. Returns False if a key ended it."""
        with Live(console=console, auto_refresh=False) as live:
            while True:
                over = self.show.over  # asked before, as the last event may come now
                t = self.position()
                width, height = console.size
                picture = self.show.render(t, width, height - 2)  # a line for the status, and one that stays empty
                live.update(Group(picture, self.status(t, wait is not time.sleep)), refresh=True)
                if over and t >= self.show.duration and not self.paused:
                    return True
                key = wait(FRAME)
                if key == "quit":
                    return False
                if key is not None:
                    self.press(key)


@contextmanager
def keyboard() -> Iterator[Wait]:
    """While it is open, the keys pressed in a terminal; `time.sleep` where there are none to read."""
    if termios is None or not sys.stdin.isatty():
        yield time.sleep
        return

    def wait(seconds: float) -> Key | None:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return KEYS.get(os.read(sys.stdin.fileno(), 16)) if ready else None

    saved = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield wait
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)


def make_show(directory: Path, engine: str | None) -> RaceShow | EngineShow:
    """The race, or one engine. Raises ValueError, in one line, for what cannot be shown."""
    if engine is None:
        return RaceShow(load_race(directory))
    name = f"stage_{engine}" if engine.isdigit() else engine
    known = sorted(path.name.split(".")[0] for path in directory.glob(f"*{SUFFIX}"))
    if name not in known:
        raise ValueError(f"--engine {engine}: {directory} has {', '.join(known) or 'no recordings: make record'}")
    return EngineShow(EngineRun.load(directory / f"{name}{SUFFIX}"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Show a recorded race, or one engine of it.")
    parser.add_argument("--recording", type=Path, default=DEFAULT, help="directory (default: %(default)s)")
    parser.add_argument("--engine", metavar="NAME", help="one engine from inside: stage_4 (or 4), nanovllm")
    parser.add_argument(
        "--speed", type=float, help="2 is twice as fast, 0.1 slow motion (default: 1, or 20 s for an engine)"
    )
    parser.add_argument("--from", dest="start", type=float, metavar="SECONDS", help="where to begin")
    parser.add_argument("--once", action="store_true", help="one picture: of --from, or a third of the way")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    try:
        if options.speed is not None and not 0 < options.speed < math.inf:
            raise ValueError(f"--speed must be a positive number, got {options.speed:g}")
        show = make_show(options.recording, options.engine)
        if not 0 <= (options.start or 0) <= show.duration:
            raise ValueError(f"--from must be from 0 to {show.duration:.2f} seconds, got {options.start:g}")
    except ValueError as error:
        sys.exit(str(error))
    if options.once or not console.is_terminal:
        t = show.duration / 3 if options.start is None else options.start
        console.print(show.render(t, console.width, console.height))
        console.print(Text(f"{t:.2f} of {show.duration:.2f} s", "dim"))
        show.conclude(console)
        return
    with keyboard() as wait:
        to_the_end = Player(show, speed=options.speed or show.speed, start=options.start or 0.0).play(console, wait)
    if to_the_end:
        show.conclude(console)


if __name__ == "__main__":
    sys.exit(until_ctrl_c(main))
