"""What `make replay` draws of recordings: the race, or one engine from inside. Imports no torch.

A show is a picture for every time from 0 to its duration. On each it says that it is a recording, of what and of when.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from string import ascii_letters, digits
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tools.race.demo_live import EngineView, Request
from tools.race.recording import About, Recording
from tools.race.view import draw_lanes, finish_of, make_lanes, result_table

LETTERS = ascii_letters[26:] + ascii_letters[:26] + digits
STRIDE = 0.1  # seconds from one picture of the race to the next, when it is gone through by hand
COUNTERS = 52  # columns for the counters
CLOCKS = {"wall": "wall-clock times", "cpu": "times are CPU time of the one thread"}


class Show(Protocol):
    """`stops` are the times, ascending, at which a step by hand may rest."""

    duration: float
    stops: Sequence[float]

    def render(self, t: float, width: int, height: int) -> RenderableType: ...

    def conclude(self, console: Console) -> None:
        """What is printed below the last picture."""
        ...


def badge(about: About) -> Text:
    """The line that no picture goes without."""
    return Text.assemble((" RECORDING ", "bold white on red"), " ", (about.source, "bold"), overflow="ellipsis")


def describe(about: About) -> str:
    together = ", all at once" if about.together else ", one at a time"
    workload = about.workload
    return f"{len(workload.prompts)} requests, {workload.num_tokens} tokens, {about.model}{together}"


class RaceShow:
    """All engines of a recorded race, drawn at the same time since their start, however they were run."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.recordings = recordings
        self.about = recordings[0].about
        workload = self.about.workload
        self.lanes = make_lanes({r.engine: r.title for r in recordings}, workload.num_tokens, len(workload.prompts))
        for lane, recording in zip(self.lanes, recordings, strict=True):
            lane.finish(recording.events, recording.seconds)
        self.duration = max(recording.seconds for recording in recordings)
        self.stops: Sequence[float] = [STRIDE * i for i in range(1, int(self.duration / STRIDE) + 1)]

    def render(self, t: float, width: int, height: int) -> RenderableType:
        in_order = sorted((lane for lane in self.lanes if lane.seconds is not None), key=lambda lane: lane.seconds or 0)
        for place, lane in enumerate(in_order, start=1):
            lane.mark = f"#{place}" if lane.seconds is not None and lane.seconds <= t else ""
        return Group(badge(self.about), Text(describe(self.about), "dim"), "", draw_lanes(self.lanes, t, width))

    def conclude(self, console: Console) -> None:
        pairs = zip(self.lanes, self.recordings, strict=True)
        finishes = [finish_of(lane, recording.events, recording.tokens) for lane, recording in pairs]
        about = self.about
        title = f"\nThe result, recorded on {about.source}"
        console.print(result_table(finishes, title))
        console.print(f"{describe(about)}; KV memory for {about.workload.kv_slots} tokens; {clock_of(about)}.")


def clock_of(about: About) -> str:
    return CLOCKS.get(about.machine.get("clock", "wall"), "")


class EngineShow:
    """One recorded engine from inside: queues, counters, blocks, texts, as `make stage-N-demo` shows them."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.duration = recording.seconds
        self.stops: Sequence[float] = step_times(recording.events)
        self.reset()

    def reset(self) -> None:
        self.view, self.position = ReplayView(self.recording), 0

    def seek(self, t: float) -> None:
        """Let the view see all events up to time t."""
        until = bisect_right(self.recording.events, t, key=lambda event: event["t"])
        if until < self.position:
            self.reset()
        for event in self.recording.events[self.position : until]:
            self.view.on_event(event)
        self.position = until

    def render(self, t: float, width: int, height: int) -> RenderableType:
        self.seek(t)
        self.view.now = t
        return Group(badge(self.recording.about), self.view.render_in(width, height - 1))

    def conclude(self, console: Console) -> None:
        recording, about = self.recording, self.recording.about
        self.seek(self.duration)
        speed = self.view.generated / recording.seconds
        console.print(
            f"\n{recording.title}, recorded on {about.source}: {self.view.generated} tokens in "
            f"{recording.seconds:.2f} s, {speed:,.0f} tokens/s; {clock_of(about)}."
        )


def step_times(events: Sequence[dict[str, Any]]) -> list[float]:
    """When each step has been planned: the time of its last `scheduled` event."""
    times: dict[int, float] = {}
    for event in events:
        if event["type"] == "scheduled":
            times[event["step"]] = event["t"]
    return sorted(times.values())


class ReplayView(EngineView):
    """The live view of a stage, fed from a file, and cut to the size of the terminal."""

    def __init__(self, recording: Recording) -> None:
        workload = recording.about.workload
        super().__init__(recording.title, workload.max_tokens, recording.num_blocks, lambda _: "")
        self.requests = [Request(LETTERS[i % len(LETTERS)], n) for i, n in enumerate(workload.max_tokens)]
        self.stories = ["" for _ in self.requests]
        self.last_change = [-1] * len(self.requests)  # how many tokens there were when a text grew last
        self.started = self.now = 0.0

    def on_event(self, event: dict[str, Any]) -> None:
        if event["type"] != "scheduled":
            # With asynchronous scheduling the tokens of a step come when the next one has been planned already
            event = event | {"step": self.step}
        super().on_event(event)
        if event["type"] == "token":
            self.stories[event["request"]] += event["text"]
            self.last_change[event["request"]] = self.generated

    def queues(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for status in ("running", "waiting", "finished"):
            letters = Text(overflow="fold")
            for i, request in enumerate(self.requests):
                if request.status == status:
                    letters.append(request.letter, f"bold {self.colour(i)}")
            table.add_row(status, letters)
        return table

    def texts_in(self, width: int, height: int) -> Table:
        """The ends of as many texts as there are lines: of those that grew last, in the order of the requests."""
        newest = sorted(range(len(self.requests)), key=lambda i: self.last_change[i], reverse=True)[:height]
        table = Table.grid(padding=(0, 1))
        room = max(20, width - 14)
        for i in sorted(newest):
            request, shown = self.requests[i], " ".join(self.stories[i].split())
            table.add_row(
                Text(request.letter, f"bold {self.colour(i)}"),
                Text(f"{len(request.ids)}/{request.max_tokens}".rjust(7), "dim"),
                Text(shown if len(shown) <= room else f"…{shown[1 - room :]}", no_wrap=True, overflow="crop"),
            )
        return table

    def render_in(self, width: int, height: int) -> RenderableType:
        """The picture in at most `height` lines, if there are some 20."""
        above = Table.grid(expand=True)
        above.add_column(ratio=1)
        above.add_column(width=COUNTERS)
        counters = self.counters()
        letters_a_line = max(1, width - COUNTERS - 4 - len("finished "))
        # Room for the three queues even when the letters of one need more lines
        rows = max(counters.row_count, 3 + (len(self.requests) - 1) // letters_a_line)
        above.add_row(
            Panel(self.queues(), title="queues", height=rows + 2),
            Panel(counters, title="counters", height=rows + 2),
        )
        blocks = self.block_map() if self.num_blocks else Text("it has no blocks", "dim")
        used = 1 + rows + 2 + len(blocks.plain.splitlines()) + 2 + 2
        return Group(
            Text(f"{self.title}: {self.now:.2f} s", "bold"),
            above,
            Panel(blocks, title=self.legend()),
            Panel(self.texts_in(width, max(1, height - used)), title="texts"),
        )
