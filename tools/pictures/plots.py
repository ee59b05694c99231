"""The pictures that are not about one run step by step: memory wasted, curves, the tree of shared beginnings."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Patch

from stages.core import Event
from tools.pictures.style import BLACK, BLUE, VERMILION, Picture, colour_of, legend_below, new_picture
from tools.pictures.timeline import SlotUse, token_times


def waste(
    runs: Mapping[str, Sequence[SlotUse]], *, title: str = "KV memory set aside, averaged over the run"
) -> Picture:
    """For each run (label -> `slot_use(...)`), the share of the reserved slots that held a token, and the rest."""
    picture, axes = new_picture(1.5 + 0.5 * len(runs), title)
    for row, use in enumerate(runs.values()):
        used = 100 * sum(u.used for u in use) / sum(u.reserved for u in use)
        axes.barh(row, used, color=BLUE, height=0.6)
        axes.barh(row, 100 - used, left=used, height=0.6, facecolor="white", edgecolor=VERMILION, hatch="////")
        label: dict[str, Any] = {"va": "center", "ha": "center", "fontsize": 10, "fontweight": "bold"}
        axes.text(used / 2, row, f"{used:.0f} %", color="white", **label)
        if used < 88:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axes.text((100 + used) / 2, row, f"{100 - used:.0f} %", color=BLACK, bbox=box, **label)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the slots set aside [%]")
    empty = Patch(facecolor="white", edgecolor=VERMILION, hatch="////", label="empty")
    legend_below(axes, [Patch(color=BLUE, label="holds a token"), empty])
    return picture


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
    """For each run (label -> events of requests with prompts of different lengths) the time of a token, by length."""
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for label, events in runs.items():
        points = token_times(events)
        curves[label] = ([float(length) for length, _ in points], [ms for _, ms in points])
    xlabel, ylabel = "length of the text [tokens]", "time per token [ms]"
    return lines(curves, xlabel=xlabel, ylabel=ylabel, title=title, markers=True)


@dataclass
class Node:
    """A block's worth of tokens after a certain beginning."""

    tokens: tuple[int, ...]
    owners: list[int] = field(default_factory=list)  # prompts that pass through it
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    depth: int = 0
    row: float = 0.0


def prefix_tree(
    prompts: Sequence[Sequence[int]],
    block_size: int,
    decode: Callable[[list[int]], str],
    *,
    names: Sequence[str] | None = None,
    title: str = "Which beginnings are the same",
) -> Picture:
    """The prompts cut into blocks, equal beginnings drawn once. Only full blocks (solid frames) can be shared."""
    root = Node(())
    for i, prompt in enumerate(prompts):
        node = root
        for start in range(0, len(prompt), block_size):
            tokens = tuple(prompt[start : start + block_size])
            key = tokens if len(tokens) == block_size else (*tokens, -1 - i)  # a partly filled block has one owner
            node = node.children.setdefault(key, Node(tokens, depth=start // block_size))
            node.owners.append(i)
    num_rows = place(root, 0)
    nodes = list(descendants(root))
    picture, axes = new_picture(0.5 + 0.95 * num_rows, title)
    for node in nodes:
        for child in node.children.values():
            axes.plot([node.depth + 0.92, child.depth], [node.row, child.row], color="#707070", linewidth=1.5, zorder=0)
        draw_block(axes, node, block_size, decode, [names[i] if names else str(i) for i in node.owners])
    axes.set_xlim(-0.05, 1 + max(node.depth for node in nodes))
    axes.set_ylim(num_rows - 0.45, -0.6)
    axes.axis("off")
    return picture


def place(node: Node, row: int) -> int:
    """Give every leaf a row of its own, and a parent the middle of its children; returns the next free row."""
    first = row
    for child in node.children.values():
        row = place(child, row)
    row = max(row, first + 1)
    node.row = (first + row - 1) / 2
    return row


def descendants(node: Node) -> Iterator[Node]:
    for child in node.children.values():
        yield child
        yield from descendants(child)


def draw_block(
    axes: Axes, node: Node, block_size: int, decode: Callable[[list[int]], str], owners: Sequence[str]
) -> None:
    full, shared = len(node.tokens) == block_size, len(owners) > 1
    axes.add_patch(
        FancyBboxPatch(
            (node.depth, node.row - 0.4),
            0.92,
            0.8,
            boxstyle="round,pad=0,rounding_size=0.04",
            facecolor="#FFF3D6" if shared else "white",
            edgecolor=BLACK if full else "#707070",
            linewidth=2.4 if shared else 1.2,
            linestyle="-" if full else "--",
        )
    )
    text = textwrap.wrap(decode(list(node.tokens)).replace("\n", "¶ "), 18, max_lines=3, placeholder=" …")
    axes.text(node.depth + 0.04, node.row - 0.31, "\n".join(text), fontsize=9, va="top")
    label = f"{', '.join(owners)}: {len(node.tokens)} tokens"
    axes.text(node.depth + 0.04, node.row + 0.29, label, fontsize=9, va="center", fontweight="bold")
