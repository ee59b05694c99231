"""Pictures of notebooks 3 to 5: the slots of the pool, reference counts, seats in the batch; and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from stages.core import Event
from tools.pictures.style import BLACK, STYLE, WIDTH, Picture, colour_of, label_steps, legend_below, new_picture
from tools.pictures.timeline import read_events

COUNT_COLOURS = ("#F4F4F4", "#9ECAE9", "#3182BD", "#08306B")  # nobody, one, two, three and more
COUNT_WORDS = ("0: free", "1", "2: shared", "3 or more")


@dataclass(frozen=True)
class Holding:
    """What a request holds while a step runs: its block table, and how many of its tokens are in the cache after it."""

    request: int
    table: list[int]
    length: int


def holdings(events: Sequence[Event], step: int) -> list[Holding]:
    """Everybody who holds blocks while `step` runs, in the order in which they took them."""
    timeline = read_events(events)
    blocks = next(blocks for blocks in timeline.blocks if blocks.step == step)
    return [Holding(timeline.lives[i].request, table, blocks.lengths[i]) for i, table in blocks.tables.items()]


def pool_slots(
    events: Sequence[Event],
    num_blocks: int,
    block_size: int,
    *,
    step: int,
    names: Sequence[str] | None = None,
    title: str | None = None,
) -> Picture:
    """The pool while `step` runs: a row for each block, a box for each slot, and in it the position of its token.

    Filled: a key and value lie there. Hatched: the block is taken and the slot still empty. White: free. The number of
    the request stands to the right of its blocks.
    """
    picture, axes = new_picture(1.3 + 0.2 * num_blocks, title or f"The pool in step {step}")
    held = holdings(events, step)
    owners: dict[int, list[int]] = {}
    for block in range(num_blocks):
        axes.add_patch(Rectangle((0, block - 0.42), block_size, 0.84, facecolor="white", edgecolor="#B0B0B0"))
    for holding in held:
        for i, block in enumerate(holding.table):
            owners.setdefault(block, []).append(holding.request)
            if owners[block] == [holding.request]:
                draw_slots(axes, holding, i, block_size)
    for block, requests in owners.items():
        text = ", ".join(names[r] if names else str(r) for r in requests)
        axes.text(block_size + 0.2, block, text, va="center", fontsize=9, fontweight="bold")
    axes.set_xlim(0, block_size + 1)
    axes.set_ylim(num_blocks - 0.4, -0.6)
    axes.set_xticks([offset + 0.5 for offset in range(block_size)], [str(offset) for offset in range(block_size)])
    axes.set_yticks(range(0, num_blocks, 1 if num_blocks <= 16 else 2))
    axes.tick_params(labelsize=9)
    axes.set_xlabel("offset in the block; in a slot: the position of its token in the text")
    axes.set_ylabel("block")
    filled = Patch(facecolor="#909090", label="holds a token (colour: request, named on the right)")
    empty = Patch(facecolor="white", edgecolor="#707070", hatch="////", label="taken, still empty")
    legend_below(axes, [filled, empty])
    return picture


def draw_slots(axes: Axes, holding: Holding, index: int, block_size: int) -> None:
    """The slots of the `index`-th block of a sequence."""
    block, colour = holding.table[index], colour_of(holding.request)
    for offset in range(block_size):
        position = index * block_size + offset
        style: dict[str, Any] = {"facecolor": colour, "edgecolor": "white"}
        if position >= holding.length:
            style = {"facecolor": "white", "edgecolor": colour, "hatch": "////"}
        axes.add_patch(Rectangle((offset, block - 0.42), 1, 0.84, linewidth=0.6, **style))
        if position < holding.length:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
            axes.text(offset + 0.5, block, str(position), ha="center", va="center", fontsize=8, bbox=box)


def ref_counts(
    events: Sequence[Event], num_blocks: int, *, title: str = "How many sequences own each block"
) -> Picture:
    """The reference count of every block in every step: how many hold it."""
    timeline = read_events(events)
    picture, axes = new_picture(1.5 + 0.2 * num_blocks, title)
    for column, blocks in enumerate(timeline.blocks):
        holders = blocks.holders
        for block in range(num_blocks):
            count = len(holders.get(block, []))
            colour = COUNT_COLOURS[min(count, 3)]
            axes.barh(block, 1, left=column, height=1, facecolor=colour, edgecolor="white", linewidth=0.6)
            if count:
                ink = BLACK if count == 1 else "white"
                axes.text(column + 0.5, block, str(count), ha="center", va="center", fontsize=9, color=ink)
    axes.set_xlim(0, len(timeline.blocks))
    axes.set_ylim(num_blocks - 0.5, -0.5)
    axes.set_yticks(range(0, num_blocks, 1 if num_blocks <= 10 else 2))
    axes.set_xlabel("step")
    axes.set_ylabel("block")
    label_steps(axes, len(timeline.blocks))
    shades = zip(COUNT_COLOURS, COUNT_WORDS, strict=True)
    legend_below(axes, [Patch(facecolor=shade, edgecolor="#909090", label=word) for shade, word in shades], columns=4)
    return picture


def bars(
    groups: Mapping[str, Sequence[float]], labels: Sequence[object], *, xlabel: str, ylabel: str, title: str
) -> Picture:
    """A bar for each label in each group; the height stands on it. For figures along an axis without a scale."""
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


def taken_seats(events: Sequence[Event]) -> list[dict[int, tuple[int, bool]]]:
    """For each step: seat -> (life, whether it computes in this step). Whoever is admitted takes the lowest free seat
    and leaves it when finished or preempted."""
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


def seats(
    runs: Mapping[str, Sequence[Event]], num_seats: int, *, title: str = "Who sits in which seat of the batch"
) -> Picture:
    """Who sits in which seat in which step: a panel for each run (label -> events), on one axis of steps.

    The number in a box is the request's. Hatched: an empty seat, until the run is over.
    """
    with rc_context(STYLE):
        picture = Picture(figsize=(WIDTH, 1.1 + (0.7 + 0.3 * num_seats) * len(runs)), layout="constrained")
        panels = picture.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    picture.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    taken = {label: taken_seats(events) for label, events in runs.items()}
    longest = max(map(len, taken.values()))
    for axes, (label, steps) in zip(panels, taken.items(), strict=True):
        for seat in range(num_seats):
            draw_seat(axes, seat, [step.get(seat) for step in steps], longest)
        axes.set_title(f"{label}: {len(steps)} steps", loc="left", fontsize=11)
        axes.set_ylim(num_seats - 0.5, -0.5)
        axes.set_yticks(range(num_seats))
        axes.set_ylabel("seat")
    panels[-1].set_xlim(0, longest)
    panels[-1].set_xlabel("step")
    label_steps(panels[-1], longest)
    empty = Patch(facecolor="white", edgecolor="#909090", hatch="////", label="empty seat")
    idle = Patch(facecolor="#707070", alpha=0.35, label="taken, computes nothing in this step")
    legend_below(panels[-1], [empty, idle])
    return picture


def draw_seat(axes: Axes, seat: int, sitting: Sequence[tuple[int, bool] | None], longest: int) -> None:
    """One row, in pieces in which nothing changes."""
    start = 0
    named = None
    for end in range(1, len(sitting) + 1):
        if end < len(sitting) and sitting[end] == sitting[start]:
            continue
        now = sitting[start]
        style: dict[str, Any] = {"facecolor": "white", "edgecolor": "#909090", "hatch": "////"}
        if now is not None:
            style = {"facecolor": colour_of(now[0]), "edgecolor": "white", "alpha": 1.0 if now[1] else 0.35}
        axes.barh(seat, end - start, left=start, align="center", height=0.8, linewidth=0.6, **style)
        if now is not None and now[1] and now[0] != named and (end - start) / longest > 0.012:
            named = now[0]
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
            axes.text((start + end) / 2, seat, str(named), ha="center", va="center", fontsize=9, bbox=box)
        start = end
