"""Curves, bars, the buckets of recorded steps, and what CPU and GPU do during one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from stages.core import Event
from tools.pictures.style import BLUE, GREEN, ORANGE, Picture, colour_of, legend_below, new_panels, new_picture
from tools.pictures.timeline import token_times

if TYPE_CHECKING:
    from tools.pictures.decode_profile import Operation

TRACKS = {  # track -> name of its row, what it shows, colour
    "cpu": ("CPU", "operations of torch", ORANGE),
    "launch": ("launch", "calls of the driver", BLUE),
    "gpu": ("GPU", "kernels and copies", GREEN),
}
WAITING = "#D0D0D0"


def lines(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    xlabel: str,
    ylabel: str,
    title: str,
    markers: bool = False,
) -> Picture:
    """Curves by label, each (xs, ys); both axes need a unit in their label, and y starts at 0."""
    picture, axes = new_picture(3.3, title)
    styles = ("-", "--", "-.", ":")
    for i, (label, (xs, ys)) in enumerate(curves.items()):
        marker = "o" if markers else None
        axes.plot(xs, ys, color=colour_of(i), linestyle=styles[i % 4], linewidth=2.2, marker=marker, label=label)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_ylim(0)
    axes.grid(alpha=0.25)
    if len(curves) > 1:
        legend_below(axes, axes.get_legend_handles_labels()[0])
    return picture


def time_per_token(runs: Mapping[str, Sequence[Event]], *, title: str = "Time for a new token") -> Picture:
    """The time per token against the length of the text, a curve for each run.

    runs: label -> events of requests whose prompts have different lengths."""
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for label, events in runs.items():
        points = token_times(events)
        curves[label] = ([float(length) for length, _ in points], [ms for _, ms in points])
    xlabel, ylabel = "length of the text [tokens]", "time per token [ms]"
    return lines(curves, xlabel=xlabel, ylabel=ylabel, title=title, markers=True)


def bars(
    groups: Mapping[str, Sequence[float]], labels: Sequence[object], *, xlabel: str, ylabel: str, title: str
) -> Picture:
    """A bar for each label in each group, with its height written on it."""
    picture, axes = new_picture(3.2, title)
    width = 0.8 / len(groups)
    for i, (group, heights) in enumerate(groups.items()):
        left = [n - 0.4 + (i + 0.5) * width for n in range(len(labels))]
        hatch = ("", "////", "....")[i % 3]
        drawn = axes.bar(left, heights, width, color=colour_of(i), hatch=hatch, edgecolor="white", label=group)
        axes.bar_label(drawn, fmt="%.0f", fontsize=9, padding=2)
    axes.set_xticks(range(len(labels)), [str(label) for label in labels])
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.margins(y=0.1)
    if len(groups) > 1:
        legend_below(axes, axes.get_legend_handles_labels()[0])
    return picture


def is_wait(name: str) -> bool:
    """Whether the CPU only waits for the GPU in a call of this name."""
    return "Synchronize" in name


def buckets(ladder: Sequence[int], *, title: str = "Which recording serves which batch") -> Picture:
    """How many rows each batch size computes: its sequences, and the padding up to its bucket."""
    picture, axes = new_picture(3.2, title)
    sizes = range(1, ladder[-1] + 1)
    padded = [next(bucket for bucket in ladder if bucket >= size) for size in sizes]
    padding = [bucket - size for bucket, size in zip(padded, sizes, strict=True)]
    axes.bar(sizes, sizes, width=0.9, color=BLUE)
    axes.bar(sizes, padding, bottom=sizes, width=0.9, facecolor="white", edgecolor=ORANGE, hatch="////", linewidth=0.6)
    axes.set_xlabel("sequences in the step")
    axes.set_ylabel("rows computed")
    axes.set_xticks(ladder)
    axes.set_yticks([n for n in ladder if n == 1 or n % 8 == 0 or n == ladder[-1]])
    axes.set_xlim(0.4, ladder[-1] + 0.6)
    hatched = Patch(facecolor="white", edgecolor=ORANGE, hatch="////", label="padding")
    legend_below(axes, [Patch(color=BLUE, label="sequences"), hatched])
    return picture


def timeline(
    runs: Mapping[str, Sequence[Operation]], *, title: str, first_us: float = 0.0, last_us: float | None = None
) -> Picture:
    """A panel for each run (label -> events of `decode_profile.trace`) on one time axis, a row for each track.

    `first_us` and `last_us` cut a piece out, in microseconds since the step began.
    """
    last_us = last_us or max(start + us for events in runs.values() for _, _, start, us in events)
    unit, factor = ("ms", 1e-3) if last_us - first_us > 2000 else ("µs", 1.0)
    picture, panels = new_panels(1.0 + 1.25 * len(runs), title, len(runs))
    present = [track for track in TRACKS if any(track == t for events in runs.values() for t, *_ in events)]
    for axes, (label, events) in zip(panels, runs.items(), strict=True):
        draw_tracks(axes, events, present, factor)
        axes.set_title(label, loc="left", fontsize=11)
        axes.set_xlim(first_us * factor, last_us * factor)
    panels[-1].set_xlabel(f"time since the step began [{unit}]")
    handles = [Patch(color=TRACKS[track][2], label=TRACKS[track][1]) for track in present]
    if any(is_wait(name) for events in runs.values() for _, name, *_ in events):
        handles.append(Patch(color=WAITING, label="waiting"))
    legend_below(panels[-1], handles, columns=len(handles))
    return picture


def draw_tracks(axes: Axes, events: Sequence[Operation], tracks: Sequence[str], factor: float) -> None:
    for row, track in enumerate(tracks):
        mine = [event for event in events if event[0] == track]
        for waits, colour in ((False, TRACKS[track][2]), (True, WAITING)):
            spans = [(start * factor, us * factor) for _, name, start, us in mine if is_wait(name) == waits]
            # Unsnapped: thousands of bars narrower than a pixel would else make stripes that are not there
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolor=colour, linewidth=0, snap=False)
    axes.set_ylim(len(tracks) - 0.5, -0.5)
    axes.set_yticks(range(len(tracks)), [TRACKS[track][0] for track in tracks])
