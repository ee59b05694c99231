"""Pictures of a run step by step: who runs when, what a step computes, who sits in which seat of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from stages.core import Event
from tools.pictures.colours import BLACK, BLUE, SKY, VERMILION
from tools.pictures.plots import (
    HATCHED,
    PAPER,
    Picture,
    colour_of,
    label_steps,
    legend_below,
    new_panels,
    new_picture,
)
from tools.pictures.timeline import Life, Span, Timeline, read_events

PREEMPTED: dict[str, Any] = {"marker": "X", "color": BLACK, "markersize": 9}

PHASE_STYLE: dict[str, tuple[str, dict[str, Any]]] = {
    "prefill": ("prefill: the prompt, for the first time", {"facecolor": BLUE}),
    "decode": ("decode: behind the prompt", {"facecolor": SKY}),
    "again": ("computed again", {"facecolor": VERMILION, "hatch": "////", "edgecolor": "white"}),
    "idle": ("has a seat, computes nothing", {"facecolor": "#E0E0E0", "hatch": "....", "edgecolor": "#909090"}),
    "waiting": ("waiting", {"facecolor": "#C8C8C8"}),
}


def swimlane(
    events: Sequence[Event],
    *,
    names: Sequence[str] | None = None,
    title: str = "Who runs when",
    by: Literal["step", "tokens"] = "step",
    until: float | None = None,
) -> Picture:
    """Who runs when: a row for each request, a box for each step it has a share in.

    by="step" gives every step the same width; by="tokens" makes it as wide as the tokens that it computes, which is
    close to the time it takes. `until` fixes the right end of the axis, so that two pictures can be compared.
    """
    timeline = read_events(events)
    picture, axes = new_picture(1.75 + 0.48 * len(timeline.lives), title)
    used = draw_lanes(axes, timeline, names=names, by=by, until=until)
    legend_below(axes, lane_legend(used))
    return picture


def swimlanes(runs: Mapping[str, Sequence[Event]], title: str) -> Picture:
    """Who runs when in several runs (label -> events): a panel for each, on one axis of computed tokens."""
    timelines = {label: read_events(events) for label, events in runs.items()}
    lives = sum(len(timeline.lives) for timeline in timelines.values())
    picture, panels = new_panels(1.3 + 0.3 * len(runs) + 0.28 * lives, title, len(runs))
    longest = max(sum(timeline.tokens_in_step.values()) for timeline in timelines.values())
    used: set[str] = set()
    for axes, (label, timeline) in zip(panels, timelines.items(), strict=True):
        used |= draw_lanes(axes, timeline, by="tokens", until=longest)
        axes.set_title(label, loc="left", fontsize=11)
        axes.label_outer()
    legend_below(panels[-1], lane_legend(used))
    return picture


def draw_lanes(
    axes: Axes,
    timeline: Timeline,
    *,
    names: Sequence[str] | None = None,
    by: Literal["step", "tokens"] = "step",
    until: float | None = None,
) -> set[str]:
    """Draw who runs when, as `swimlane` describes it. Returns the phases that occur, and "preempted"."""
    left: dict[int, float] = {}
    width: dict[int, float] = {}
    position = 0.0
    for step in timeline.steps:
        left[step], width[step] = position, 1.0 if by == "step" else float(timeline.tokens_in_step[step])
        position += width[step]
    scale = until or position
    used: set[str] = set()
    for row, life in enumerate(timeline.lives):
        for span in life.spans:
            used.add(span.phase)
            share = width[span.step] / scale
            style: dict[str, Any] = {"height": 0.68, "edgecolor": "white", "linewidth": 0.5 if share > 0.004 else 0}
            style |= PHASE_STYLE[span.phase][1]
            if span.phase == "waiting":
                style |= {"height": 0.12, "linewidth": 0}
            axes.barh(row, width[span.step], left=left[span.step], **style)
            if span.tokens:
                write_tokens(axes, span, left[span.step], width[span.step], row, scale)
        mark_ends(axes, life, row, left, width)
        used |= {"preempted"} if life.preempted else set()
    axes.set_yticks(range(len(timeline.lives)), timeline.state.labels(names))
    axes.set(ylabel="request", ylim=(len(timeline.lives) - 0.4, -0.6), xlabel="tokens sent through the model so far")
    if by == "step":
        label_steps(axes, len(timeline.steps))
    axes.set_xlim(0, scale * 1.01)
    return used


def lane_legend(used: set[str]) -> list[Any]:
    """What the boxes of these phases mean, the cross of whoever is preempted, and the line at the end of a lane."""
    handles: list[Any] = [Patch(label=text, **style) for phase, (text, style) in PHASE_STYLE.items() if phase in used]
    finished: dict[str, Any] = {"marker": "|", "markersize": 13, "markeredgewidth": 2.5, "linestyle": ""}
    crosses = [Line2D([], [], linestyle="", label="preempted", **PREEMPTED)] if "preempted" in used else []
    return [*handles, *crosses, Line2D([], [], color=BLACK, label="finished", **finished)]


def write_tokens(axes: Axes, span: Span, left: float, width: float, row: int, scale: float) -> None:
    """Write into the box how many tokens it stands for, where there is room, and above it the hits in the cache."""
    fits = width / scale > (0.05 if span.phase == "again" else 0.015 * max(2, len(str(span.tokens))))
    if span.tokens > 1 and (fits or (span.phase == "prefill" and width / scale > 0.012)):
        rotation = 0 if fits else 90
        middle = left + width / 2
        axes.text(middle, row, str(span.tokens), rotation=rotation, ha="center", va="center", color="white", fontsize=9)
    if span.hit:
        at, side = (left, "left") if left / scale < 0.8 else (left + width, "right")
        axes.text(at, row - 0.36, f"+{span.hit} from the cache", va="bottom", ha=side, fontsize=9)


def mark_ends(axes: Axes, life: Life, row: int, left: dict[int, float], width: dict[int, float]) -> None:
    for step in life.preempted:
        axes.plot(left[step], row, **PREEMPTED, clip_on=False)
    if life.finished is not None:
        end = left[life.finished] + width[life.finished]
        axes.plot([end, end], [row - 0.42, row + 0.42], color=BLACK, linewidth=2.5, clip_on=False)


def work_map(events: Sequence[Event], request: int, title: str = "What each step computes") -> Picture:
    """One request: a row for each of its steps, and in it the positions of the text that the step computes or reads."""
    life = next(life for life in read_events(events).lives if life.request == request)
    spans = [span for span in life.spans if span.tokens]
    picture, axes = new_picture(1.5 + 0.1 * max(12, len(spans)), title)
    computed = 0
    used: dict[str, dict[str, Any]] = {}
    for row, span in enumerate(spans, start=1):
        end = span.cached + span.tokens
        old = max(span.cached, min(computed, end))
        new = "prefill" if span.cached < life.prompt_tokens and computed < life.prompt_tokens else "decode"
        for phase, first, last in (("read", 0, span.cached), ("again", span.cached, old), (new, old, end)):
            if last > first:
                style = used[phase] = {"facecolor": "#D8D8D8"} if phase == "read" else PHASE_STYLE[phase][1]
                axes.barh(row, last - first, left=first, height=0.9, **({"linewidth": 0} | style))
        computed = max(computed, end)
    axes.axvline(life.prompt_tokens, color=BLACK, linewidth=1, linestyle=":")
    axes.text(life.prompt_tokens, 0.2, " the prompt ends here", fontsize=9, va="bottom")
    numbered = [n for n in range(1, len(spans) + 1) if n == 1 or n % 5 == 0]
    axes.set(ylabel="step of this request", ylim=(len(spans) + 0.6, 0.4), yticks=numbered)
    axes.set(xlabel="position in the text [tokens]", xlim=(0, computed))
    words = {phase: text for phase, (text, _) in PHASE_STYLE.items()} | {"read": "read from the cache"}
    legend_below(axes, [Patch(label=words[phase], **style) for phase, style in used.items()])
    return picture


def seats(runs: Mapping[str, Sequence[Event]], num_seats: int) -> Picture:
    """Who sits in which seat in which step: a panel for each run (label -> events), on one axis of steps.

    The number in a box is the request's. Hatched: an empty seat, until the run is over.
    """
    height = 1.0 + (0.45 + 0.22 * num_seats) * len(runs)
    picture, panels = new_panels(height, "Who sits in which seat of the batch", len(runs))
    taken = {label: taken_seats(events) for label, events in runs.items()}
    longest = max(map(len, taken.values()))
    for axes, (label, steps) in zip(panels, taken.items(), strict=True):
        for seat in range(num_seats):
            draw_seat(axes, seat, [step.get(seat) for step in steps], longest)
        axes.set_title(f"{label}: {len(steps)} steps", loc="left", fontsize=11)
        axes.set(ylabel="seat", ylim=(num_seats - 0.5, -0.5), yticks=range(num_seats))
    label_steps(panels[-1], longest)
    empty = Patch(edgecolor="#909090", label="empty seat", **HATCHED)
    idle = Patch(facecolor="#707070", alpha=0.35, label="taken, computes nothing in this step")
    legend_below(panels[-1], [empty, idle])
    return picture


def taken_seats(events: Sequence[Event]) -> list[dict[int, tuple[int, bool]]]:
    """For each step: seat -> (life, whether it computes in this step).

    A sequence that is admitted takes the lowest free seat, and leaves it when it is finished or preempted.
    """
    timeline = read_events(events)
    seats: dict[int, int] = {}
    steps = []
    for step in timeline.steps:
        busy = {i: s.tokens > 0 for i, life in enumerate(timeline.lives) for s in life.spans
                if s.step == step and s.phase != "waiting"}  # fmt: skip
        seats = {seat: i for seat, i in seats.items() if i in busy}
        for i in sorted(busy.keys() - set(seats.values())):
            seats[next(n for n in range(len(timeline.lives)) if n not in seats)] = i
        steps.append({seat: (i, busy[i]) for seat, i in seats.items()})
    return steps


def draw_seat(axes: Axes, seat: int, sitting: Sequence[tuple[int, bool] | None], longest: int) -> None:
    """Draw one seat: a box for each stretch of steps in which nothing changes."""
    start, named = 0, None
    for now, stretch in groupby(sitting):
        end = start + len(list(stretch))
        style: dict[str, Any] = {"edgecolor": "#909090", **HATCHED}
        if now is not None:
            style = {"facecolor": colour_of(now[0]), "edgecolor": "white", "alpha": 1.0 if now[1] else 0.35}
        axes.barh(seat, end - start, left=start, align="center", height=0.8, linewidth=0.6, **style)
        if now is not None and now[1] and now[0] != named and (end - start) / longest > 0.012:
            named = now[0]
            middle, box = (start + end) / 2, PAPER | {"pad": 0.8}
            axes.text(middle, seat, str(named), ha="center", va="center", fontsize=9, bbox=box)
        start = end
