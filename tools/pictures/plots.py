"""How the pictures of the notebooks look; curves, bars, buckets, and what CPU and GPU do during one step.

Hatching and labels say the same as colours.
Figures are 7 inches wide with type of 10 points and more, so they are legible at half that width.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from stages.core import Event
from tools.pictures.colours import BLUE, GREEN, ORANGE, PINK, SKY, VERMILION, YELLOW
from tools.pictures.timeline import token_times

if TYPE_CHECKING:
    from tools.pictures.decode_profile import Operation

REQUEST_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, YELLOW)
STYLE = {
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.6,
    "figure.constrained_layout.h_pad": 0.07, "figure.constrained_layout.w_pad": 0.07,
}  # fmt: skip
WIDTH = 7.0  # inches
SHOWN_DPI, STORED_DPI = 90, 150  # stored finer than shown, so that text is sharp on fine screens and projectors
COLOURS = 64  # of a stored picture: enough for flat areas and edges of letters, at a third of the bytes
TITLE: dict[str, Any] = {"fontsize": 12, "fontweight": "bold"}
# Behind a text that lies on colours
PAPER: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
HATCHED: dict[str, Any] = {"facecolor": "white", "hatch": "////"}  # what is empty
TRACKS = {  # track -> name of its row, what it shows, colour
    "cpu": ("CPU", "operations of torch", ORANGE),
    "launch": ("launch", "calls of the driver", BLUE),
    "gpu": ("GPU", "kernels and copies", GREEN),
}
WAITING = "#D0D0D0"


class Picture(Figure):
    """A figure that a notebook shows without further calls; the same picture gives the same bytes."""

    def png(self) -> bytes:
        from PIL import Image

        drawn, stored = io.BytesIO(), io.BytesIO()
        self.savefig(drawn, format="png", dpi=STORED_DPI)
        image = Image.open(drawn).convert("RGB")
        # Not by median cut, which would melt two rare colours into one
        few = image.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(stored, format="png", optimize=True)
        return stored.getvalue()

    def alt(self) -> str:
        """The picture in words, for readers who cannot see it: its title and its axes."""
        titled = [axes for axes in self.axes if axes.get_title(loc="left")]  # a colour bar has no title
        axes = (titled or self.axes)[-1]
        title = self.get_suptitle() or axes.get_title(loc="left")
        across, down = axes.get_xlabel(), axes.get_ylabel()
        return title + (f" (across: {across}; upright: {down})" if across and down else "")

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        return self.png(), {"width": round(self.get_figwidth() * SHOWN_DPI), "alt": self.alt()}


def new_picture(height: float, title: str) -> tuple[Picture, Axes]:
    """An empty picture, `height` inches high, and its axes."""
    with rc_context(STYLE):
        picture = Picture(figsize=(WIDTH, height), layout="constrained")
        axes: Axes = picture.subplots()
        axes.set_title(title, loc="left", **TITLE)
    return picture, axes


def new_panels(
    height: float, title: str, count: int, heights: Sequence[float] | None = None
) -> tuple[Picture, list[Axes]]:
    """An empty picture, `height` inches high, and the axes of `count` panels below each other, with one axis across.

    heights: how the panels share the height; without it all are equal."""
    with rc_context(STYLE):
        picture = Picture(figsize=(WIDTH, height), layout="constrained")
        drawn = picture.subplots(count, 1, sharex=True, squeeze=False, height_ratios=heights)
        panels: list[Axes] = list(drawn[:, 0])
    picture.suptitle(title, x=0.01, ha="left", **TITLE)
    return picture, panels


def legend_below(axes: Axes, handles: Sequence[Any] | None = None, columns: int = 2) -> None:
    """Without handles: those of what has been drawn with a label."""
    if handles := axes.get_legend_handles_labels()[0] if handles is None else handles:
        axes.figure.legend(
            handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=10, handlelength=1.6
        )


def label_steps(axes: Axes, count: int) -> None:
    """An axis across of `count` boxes, one for each step; the middle of some is numbered: 1, 5, 10, ..."""
    every = next(n for n in (1, 5, 10, 20, 50, 100, 200, 500, 1000, count) if count / n <= 12)
    shown = [n for n in range(1, count + 1) if n == 1 or n % every == 0]
    axes.set_xticks([n - 0.5 for n in shown], [str(n) for n in shown])
    axes.set(xlim=(0, count), xlabel="step")


def colour_of(index: int) -> str:
    return REQUEST_COLOURS[index % len(REQUEST_COLOURS)]


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
    axes.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, None))
    axes.grid(alpha=0.25)
    if len(curves) > 1:
        legend_below(axes)
    return picture


def time_per_token(runs: Mapping[str, Sequence[Event]]) -> Picture:
    """The time per token against the length of the text, a curve for each run.

    runs: label -> events of requests whose prompts have different lengths."""
    points = {label: token_times(events) for label, events in runs.items()}
    curves = {label: ([length for length, _ in found], [ms for _, ms in found]) for label, found in points.items()}
    xlabel, ylabel = "length of the text [tokens]", "time per token [ms]"
    return lines(curves, xlabel=xlabel, ylabel=ylabel, title="Time for a new token", markers=True)


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
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.margins(y=0.1)
    if len(groups) > 1:
        legend_below(axes)
    return picture


def is_wait(name: str) -> bool:
    """Whether the CPU only waits for the GPU in a call of this name."""
    return "Synchronize" in name


def buckets(ladder: Sequence[int]) -> Picture:
    """How many rows each batch size computes: its sequences, and the padding up to its bucket."""
    picture, axes = new_picture(3.2, "Which recording serves which batch")
    sizes = range(1, ladder[-1] + 1)
    padded = [next(bucket for bucket in ladder if bucket >= size) for size in sizes]
    padding = [bucket - size for bucket, size in zip(padded, sizes, strict=True)]
    axes.bar(sizes, sizes, width=0.9, color=BLUE)
    axes.bar(sizes, padding, bottom=sizes, width=0.9, edgecolor=ORANGE, linewidth=0.6, **HATCHED)
    rows = [n for n in ladder if n == 1 or n % 8 == 0 or n == ladder[-1]]
    axes.set(xlabel="sequences in the step", xticks=ladder, xlim=(0.4, ladder[-1] + 0.6))
    axes.set(ylabel="rows computed", yticks=rows)
    legend_below(axes, [Patch(color=BLUE, label="sequences"), Patch(edgecolor=ORANGE, label="padding", **HATCHED)])
    return picture


def timeline(
    runs: Mapping[str, Sequence[Operation]], *, title: str, first_us: float = 0.0, last_us: float | None = None
) -> Picture:
    """A panel for each run (label -> events of `decode_profile.trace`) on one time axis, a row for each track.

    `first_us` and `last_us` cut a piece out, in microseconds since the step began.
    """
    last_us = last_us or max(start + us for events in runs.values() for _, _, start, us in events)
    unit, factor = ("ms", 1e-3) if last_us - first_us > 2000 else ("µs", 1.0)
    picture, panels = new_panels(1.0 + 0.9 * len(runs), title, len(runs))
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
    axes.set(ylim=(len(tracks) - 0.5, -0.5))
    axes.set_yticks(range(len(tracks)), [TRACKS[track][0] for track in tracks])
