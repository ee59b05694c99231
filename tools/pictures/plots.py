"""Curves and bars, for figures that are not about the steps of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stages.core import Event
from tools.pictures.style import (
    Picture,
    colour_of,
    legend_below,
    new_picture,
)
from tools.pictures.timeline import token_times


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
