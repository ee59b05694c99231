"""The picture of the race: a lane for every engine, all drawn at the same time since their start.

A lane is a list of moments, wherever it comes from: an engine at work, one that ran a minute ago, or a file.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from tools.race.workload import engine_titles

# Told apart with any colour vision (Okabe and Ito); their order in the picture tells them apart without colours
COLOURS = ("#D55E00", "#E69F00", "#F0E442", "#009E73", "#56B4E9", "#0072B2", "#999999", "#CC79A7")
FULL, GHOST, PARTS = "█", "▒", ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
LONGEST_BAR = 80
ROOMY = 7  # so many lanes have a line between them, and the picture fits 24 lines
WINDOW = 1.0  # seconds over which "now" looks back


class Moment(NamedTuple):
    t: float  # seconds since the start
    tokens: int  # generated so far
    finished: int  # requests


class Standing(NamedTuple):
    """How far a lane is at some time. `now` and `mean` are rates in tokens per second."""

    tokens: int
    finished: int
    now: float
    mean: float
    seconds: float


@dataclass
class Lane:
    """One engine. `seconds` is its whole time, None as long as it runs; `mark` says what is shown of it."""

    engine: str
    title: str
    colour: str
    num_tokens: int
    num_requests: int
    moments: list[Moment] = field(default_factory=list)
    seconds: float | None = None
    mark: str = ""

    def at(self, t: float) -> Standing:
        over = self.seconds is not None and t >= self.seconds
        elapsed = self.seconds if self.seconds is not None and over else t
        last = self.latest(elapsed)
        before = self.latest(elapsed - WINDOW)
        window = max(1e-9, min(WINDOW, elapsed))
        now = 0.0 if over else (last.tokens - before.tokens) / window
        return Standing(last.tokens, last.finished, now, last.tokens / max(elapsed, 1e-9), elapsed)

    def latest(self, t: float) -> Moment:
        i = bisect_right(self.moments, t, key=lambda moment: moment.t)
        return self.moments[i - 1] if i else Moment(0.0, 0, 0)

    def finish(self, events: Sequence[dict[str, Any]], seconds: float) -> None:
        """Replace the moments that were reported on the way by those of all events."""
        self.moments, self.seconds = moments_of(events), seconds


def moments_of(events: Sequence[dict[str, Any]]) -> list[Moment]:
    """A moment for every event with new tokens or a finished request. Times of the events count from the start."""
    moments, tokens, finished = [], 0, 0
    for event in events:
        if event["type"] == "token":
            tokens += len(event["ids"])
        elif event["type"] == "finished":
            finished += 1
        else:
            continue
        moments.append(Moment(event["t"], tokens, finished))
    return moments


def make_lanes(titles: dict[str, str], num_tokens: int, num_requests: int) -> list[Lane]:
    """A lane for each of {engine: title}."""
    return [Lane(name, title, colour_of(name), num_tokens, num_requests) for name, title in titles.items()]


def colour_of(engine: str) -> str:
    """The engine's colour, the same in every race."""
    known = list(engine_titles())
    return COLOURS[known.index(engine) % len(COLOURS)] if engine in known else "default"


def draw_lanes(lanes: Sequence[Lane], t: float, width: int) -> Table:
    """All lanes at time t. A lane without moments has not started; one marked "ghost" is drawn faintly."""
    tokens = max(len("tokens"), *(2 * len(str(lane.num_tokens)) + 1 for lane in lanes))
    done = max(len("done"), *(2 * len(str(lane.num_requests)) + 1 for lane in lanes))
    title = max(len(lane.title) for lane in lanes)
    # Fixed, so that nothing moves but the bars
    widths = {"": 5, " ": title, "  ": 0, "tokens": tokens, "now/s": 6, "mean/s": 6, "done": done, "seconds": 7}
    bar_width = max(8, min(LONGEST_BAR, width - sum(widths.values()) - len(widths) + 1))
    table = Table.grid(padding=(0, 1))
    for heading, least in widths.items():
        table.add_column(justify="right" if heading.strip() else "left", min_width=least, no_wrap=True)
    table.add_row(*(Text(heading, "dim") for heading in widths))
    for lane in lanes:
        standing = lane.at(t)
        over = lane.seconds is not None and t >= lane.seconds
        faint = "dim " if lane.mark == "ghost" else ""
        started = bool(lane.moments) or lane.mark == "live"
        bar = draw_bar(standing.tokens / lane.num_tokens, bar_width, lane.colour, ghost=lane.mark == "ghost")
        figures = (
            f"{standing.tokens}/{lane.num_tokens}",
            "" if over else f"{standing.now:.0f}",
            f"{standing.mean:.0f}",
            f"{standing.finished}/{lane.num_requests}",
            f"{standing.seconds:.2f}",
        )
        style = "bold" if over and not faint else faint.strip()
        table.add_row(
            Text(lane.mark, "bold green" if lane.mark == "live" else "dim"),
            Text(lane.title, faint + lane.colour),
            bar,
            *(Text(figure if started else "", style) for figure in figures),
        )
        if len(lanes) <= ROOMY:
            table.add_row()
    return table


def draw_bar(share: float, width: int, colour: str, *, ghost: bool) -> Text:
    """A bar that grows by eighths of a character. A ghost's bar has a character of its own."""
    whole, eighths = divmod(round(share * width * 8), 8)
    full = GHOST if ghost else FULL
    part = (GHOST if eighths >= 4 else "") if ghost else PARTS[eighths]
    bar = Text(full * whole + part, f"dim {colour}" if ghost else colour)
    return bar.append("·" * (width - len(bar)), "grey37")


@dataclass(frozen=True)
class Finish:
    """A line of the final table: the lane of an engine that has finished, with its events and token ids."""

    lane: Lane
    events: Sequence[dict[str, Any]]
    tokens: list[list[int]]

    @property
    def seconds(self) -> float:
        assert self.lane.seconds is not None
        return self.lane.seconds

    @property
    def first_token(self) -> float:
        """Mean over the requests, in seconds from the start."""
        first: dict[int, float] = {}
        for event in self.events:
            if event["type"] == "token":
                first.setdefault(event["request"], event["t"])
        return statistics.mean(first.values())


def result_table(finishes: Sequence[Finish], title: str) -> Table:
    """The final table, fastest first, each against the slowest.

    Texts are compared with those of the first lane, request by request.
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("#", "engine", "seconds", "tokens/s", "1st token", "speed", "same text"):
        table.add_column(heading, justify="left" if heading == "engine" else "right", no_wrap=True)
    reference = finishes[0].tokens
    slowest = max(finish.seconds for finish in finishes)
    for place, finish in enumerate(sorted(finishes, key=lambda finish: finish.seconds), start=1):
        same = sum(mine == theirs for mine, theirs in zip(finish.tokens, reference, strict=True))
        table.add_row(
            str(place),
            Text(finish.lane.title, finish.lane.colour),
            f"{finish.seconds:.2f}",
            f"{finish.lane.num_tokens / finish.seconds:,.0f}",
            f"{finish.first_token:.2f} s",
            f"{slowest / finish.seconds:.1f}×",
            f"{same} of {len(reference)}",
        )
    return table
