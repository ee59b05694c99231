"""Pictures of notebook 6: which recorded batch size serves which batch, and what CPU and GPU do during one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from tools.pictures.decode_profile import Event
from tools.pictures.style import BLUE, GREEN, ORANGE, STYLE, WIDTH, Picture, legend_below, new_picture

TRACKS = {  # track -> name of its row, what it shows, colour
    "cpu": ("CPU", "operations of torch", ORANGE),
    "launch": ("launch", "calls of the driver", BLUE),
    "gpu": ("GPU", "kernels and copies", GREEN),
}


WAITING = "#D0D0D0"


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
    runs: Mapping[str, Sequence[Event]], *, title: str, first_us: float = 0.0, last_us: float | None = None
) -> Picture:
    """A panel for each run (label -> events of `decode_profile.trace`) on one time axis, a row for each track.

    `first_us` and `last_us` cut a piece out, in microseconds since the step began.
    """
    last_us = last_us or max(start + us for events in runs.values() for _, _, start, us in events)
    unit, factor = ("ms", 1e-3) if last_us - first_us > 2000 else ("µs", 1.0)
    with rc_context(STYLE):
        picture = Picture(figsize=(WIDTH, 1.0 + 1.25 * len(runs)), layout="constrained")
        panels = picture.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    picture.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
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


def draw_tracks(axes: Axes, events: Sequence[Event], tracks: Sequence[str], factor: float) -> None:
    for row, track in enumerate(tracks):
        mine = [event for event in events if event[0] == track]
        for waits, colour in ((False, TRACKS[track][2]), (True, WAITING)):
            spans = [(start * factor, us * factor) for _, name, start, us in mine if is_wait(name) == waits]
            # Unsnapped: thousands of bars narrower than a pixel would else make stripes that are not there
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolor=colour, linewidth=0, snap=False)
    axes.set_ylim(len(tracks) - 0.5, -0.5)
    axes.set_yticks(range(len(tracks)), [TRACKS[track][0] for track in tracks])
