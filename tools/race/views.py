"""What the race, the demos and the replays draw in a terminal, from events alone: imports no torch.

The lanes of a race all show the same time since the start; their moments come from an engine at work, from one that
ran a minute ago, or from a file. An `EngineView` shows one engine from inside: who waits and who runs, which block
holds what, every text as it grows.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from string import ascii_lowercase, ascii_uppercase, digits
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nanovllm.trace_view.engine_state import EngineState, Event
from tools.race.workload import Workload, engine_titles, tokens_of

# Told apart with any colour vision (Okabe and Ito). The order of lanes and the letters of sequences say the same again
COLOURS = ("#D55E00", "#E69F00", "#F0E442", "#009E73", "#56B4E9", "#0072B2", "#999999", "#CC79A7")
FULL, GHOST, PARTS = "█", "▒", ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
LONGEST_BAR = 80
ROOMY = 7  # so many lanes have a line between them, and the picture fits 24 lines
WINDOW = 1.0  # seconds over which "now" looks back
LETTERS = ascii_uppercase + ascii_lowercase + digits
BLOCKS_A_ROW = 32
COUNTERS = 52  # columns for the counters


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
    num_tokens: int
    num_requests: int
    moments: list[Moment] = field(default_factory=list)
    events: Sequence[Event] = ()  # all of them, once it has finished
    seconds: float | None = None
    mark: str = ""

    @cached_property
    def colour(self) -> str:
        """The engine's colour, the same in every race."""
        known = list(engine_titles())
        return COLOURS[known.index(self.engine) % len(COLOURS)] if self.engine in known else "default"

    def over(self, t: float) -> bool:
        return self.seconds is not None and t >= self.seconds

    def at(self, t: float) -> Standing:
        elapsed = t if self.seconds is None else min(t, self.seconds)
        last, before = self.latest(elapsed), self.latest(elapsed - WINDOW)
        window = max(1e-9, min(WINDOW, elapsed))
        now = 0.0 if self.over(t) else (last.tokens - before.tokens) / window
        return Standing(last.tokens, last.finished, now, last.tokens / max(elapsed, 1e-9), elapsed)

    def latest(self, t: float) -> Moment:
        i = bisect_right(self.moments, t, key=lambda moment: moment.t)
        return self.moments[i - 1] if i else Moment(0.0, 0, 0)

    def finish(self, events: Sequence[Event], seconds: float) -> None:
        """Replace the moments that were reported on the way by those of all events."""
        self.moments, self.events, self.seconds = moments_of(events), events, seconds

    @property
    def first_token(self) -> float:
        """Mean over the requests, in seconds from the start."""
        times = {event["request"]: event["t"] for event in reversed(self.events) if event["type"] == "token"}
        return statistics.mean(times.values())


def moments_of(events: Sequence[Event]) -> list[Moment]:
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


def draw_lanes(lanes: Sequence[Lane], t: float, width: int) -> Table:
    """All lanes at time t. A lane without moments has not started; one marked "ghost" is drawn faintly."""
    tokens = max(len("tokens"), 2 * len(str(lanes[0].num_tokens)) + 1)
    done = max(len("done"), 2 * len(str(lanes[0].num_requests)) + 1)
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
        over, ghost, live = lane.over(t), lane.mark == "ghost", lane.mark == "live"
        bar = draw_bar(standing.tokens / lane.num_tokens, bar_width, lane.colour, ghost=ghost)
        figures = (
            f"{standing.tokens}/{lane.num_tokens}",
            "" if over else f"{standing.now:.0f}",
            f"{standing.mean:.0f}",
            f"{standing.finished}/{lane.num_requests}",
            f"{standing.seconds:.2f}",
        )
        style = "dim" if ghost else "bold" if over else ""
        table.add_row(
            Text(lane.mark, "bold green" if live else "dim"),
            Text(lane.title, f"dim {lane.colour}" if ghost else lane.colour),
            bar,
            *(Text(figure if lane.moments or live else "", style) for figure in figures),
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


def result_table(lanes: Sequence[Lane], title: str) -> Table:
    """The final table of lanes that have finished, fastest first, each against the slowest.

    Texts are compared with those of the first lane, request by request.
    """
    same = f"same text: the same tokens as {lanes[0].title}"
    table = Table(title=title, caption=same, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.title_justify = table.caption_justify = "left"
    table.title_style, table.caption_style = "bold", "dim"
    for heading in ("#", "engine", "seconds", "tokens/s", "1st token", "speed", "same text"):
        table.add_column(heading, justify="left" if heading == "engine" else "right", no_wrap=True)
    reference = tokens_of(lanes[0].events, lanes[0].num_requests)
    if any(tokens_of(lane.events, lane.num_requests) != reference for lane in lanes):
        table.caption = (
            f"{same}. In 16 bits, likely tokens often have the same logit, or nearly so. Rounding then decides, "
            "otherwise in another batch, and the rest of the text follows from that token."
        )
    in_order = sorted((lane.seconds or 0.0, i) for i, lane in enumerate(lanes))
    for place, (seconds, i) in enumerate(in_order, start=1):
        lane = lanes[i]
        texts = zip(tokens_of(lane.events, lane.num_requests), reference, strict=True)
        table.add_row(
            str(place),
            Text(lane.title, lane.colour),
            f"{seconds:.2f}",
            f"{lane.num_tokens / seconds:,.0f}",
            f"{lane.first_token:.2f} s",
            f"{in_order[-1][0] / seconds:.1f}×",
            f"{sum(mine == theirs for mine, theirs in texts)} of {len(reference)}",
        )
    return table


@dataclass(eq=False)
class Request:
    """What is known of one request from its events."""

    letter: str
    colour: str
    max_tokens: int
    cached: int = 0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    last_change: int = -1  # how many tokens there were in all when its text grew last


class EngineView:
    """The state of an engine, followed by its events alone, and a picture of it.

    `token` events carry their text (see `add_texts`). The requests are those of one `generate` call.
    Blocks are told of from stage 3 on; the first two stages have none to show.
    """

    def __init__(self, workload: Workload, num_blocks: int, started: float = 0.0) -> None:
        self.requests = [
            Request(LETTERS[i % len(LETTERS)], f"bold {COLOURS[i % len(COLOURS)]}", n)
            for i, n in enumerate(workload.max_tokens)
        ]
        self.num_blocks = num_blocks
        self.state = EngineState()
        self.keeps = False  # whether free blocks are found again; known by the first that was
        self.step = self.tokens_in_step = 0
        self.computed = self.generated = self.preemptions = 0
        self.replayed: list[tuple[int, int]] = []  # sequences and bucket of each step that was a replay
        self.started = self.now = started

    def on_event(self, event: Event) -> None:
        self.now = event["t"]
        request = self.requests[self.state.hear(event)]
        match event["type"]:
            case "admitted":
                request.cached = event["cached"]
            case "scheduled":
                # Not with other events: with asynchronous scheduling the tokens of a step come when the next one has
                # been planned already
                if event["step"] != self.step:
                    self.step, self.tokens_in_step = event["step"], 0
                self.tokens_in_step += event["tokens"]
                self.computed += event["tokens"]
            case "token":
                request.ids += event["ids"]
                request.text += event["text"]
                self.generated += len(event["ids"])
                request.last_change = self.generated
            case "preempted":
                self.preemptions += 1
            case "replayed":  # of stage 6, told by the demo
                self.replayed.append((event["rows"], event["bucket"]))
            case "blocks":
                self.keeps = self.keeps or bool(event["shared"])

    def block_map(self) -> Text:
        """A letter for each block: its owner, `*` if shared, `·` if free, `°` if it holds its last owner's text."""
        text = Text()
        for block in range(self.num_blocks):
            if block and block % BLOCKS_A_ROW == 0:
                text.append("\n")
            owners = self.state.owners.get(block, [])
            if len(owners) == 1:
                text.append(f"{self.requests[owners[0]].letter} ", self.requests[owners[0]].colour)
            elif owners:
                text.append("* ", "bold reverse")
            else:
                text.append("° " if self.keeps and block in self.state.writers else "· ", "dim")
        return text

    def queues(self) -> Table:
        table = Table.grid(padding=(0, 1))
        statuses = [*self.state.status, *["waiting"] * len(self.requests)]  # who has not been added yet waits, too
        for queue in ("running", "waiting", "finished"):
            letters = Text(overflow="fold")
            for request, status in zip(self.requests, statuses, strict=False):
                if status == queue:
                    letters.append(request.letter, request.colour)
            table.add_row(queue, letters)
        return table

    def counters(self) -> Table:
        seconds = max(self.now - self.started, 1e-9)
        table = Table.grid(padding=(0, 2))
        table.add_row("step", f"{self.step}, {self.tokens_in_step} tokens in it")
        table.add_row("tokens computed", f"{self.computed} for {self.generated} generated")
        table.add_row("tokens/s", f"{self.generated / seconds:.0f}")
        if self.replayed:
            rows, padding = sum(b for _, b in self.replayed), sum(b - n for n, b in self.replayed)
            table.add_row("steps replayed", f"{len(self.replayed)}, {padding} of {rows} rows padding")
        if self.num_blocks:
            in_tables = sum(map(len, self.state.tables.values()))
            table.add_row(
                "blocks in use", f"{len(self.state.owners)} of {self.num_blocks}, {in_tables} in block tables"
            )
            table.add_row("found in cache", f"{sum(request.cached for request in self.requests)} tokens")
            table.add_row("preemptions", str(self.preemptions))
        return table

    def texts(self, width: int, height: int) -> Table:
        """The ends of as many texts as there are lines: of those that grew last, in the order of the requests."""
        newest = sorted(self.requests, key=lambda request: request.last_change, reverse=True)[:height]
        table = Table.grid(padding=(0, 1))
        room = max(20, width - 14)
        for request in self.requests:
            if request in newest:
                shown = " ".join(request.text.split())
                table.add_row(
                    Text(request.letter, request.colour),
                    Text(f"{len(request.ids)}/{request.max_tokens}".rjust(7), "dim"),
                    Text(shown if len(shown) <= room else f"…{shown[1 - room :]}", no_wrap=True, overflow="crop"),
                )
        return table

    def render(self, heading: Text, width: int, height: int) -> RenderableType:
        """The picture in at most `height` lines, if there are some 20."""
        above = Table.grid(expand=True)
        above.add_column(ratio=1)
        above.add_column(width=COUNTERS)
        counters = self.counters()
        columns = max(1, width - COUNTERS - 4 - len("finished "))  # for the letters of a queue
        # Room for the three queues even when the letters of one need more lines
        rows = max(counters.row_count, 3 + (len(self.requests) - 1) // columns)
        panels = (("queues", self.queues()), ("counters", counters))
        above.add_row(*(Panel(content, title=title, height=rows + 2) for title, content in panels))
        blocks, legend = Text("it has no blocks", "dim"), "blocks"
        if self.num_blocks:
            blocks = self.block_map()
            legend += f": a letter owns it, * shared, · free{', ° free, contents kept' * self.keeps}"
        used = 1 + (heading.cell_len - 1) // width + rows + 2 + len(blocks.plain.splitlines()) + 2 + 2
        return Group(
            heading,
            above,
            Panel(blocks, title=legend),
            Panel(self.texts(width, max(1, height - used)), title="texts"),
        )
