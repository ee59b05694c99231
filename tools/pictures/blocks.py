"""Pictures of KV memory: which block holds what, what its slots hold, what is shared, what is reserved and unused."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

from stages.core import Event
from tools.pictures.colours import BLACK, BLUE, VERMILION
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
from tools.pictures.steps import draw_lanes, lane_legend
from tools.pictures.timeline import SlotUse, Timeline, held_tokens, read_events

COUNT_COLOURS = ("#F4F4F4", "#9ECAE9", "#3182BD", "#08306B")  # nobody, one, two, three and more
COUNT_WORDS = ("0: free", "1", "2: shared", "3 or more")
HIGH = 16  # blocks that may stand below each other in a picture of the pool
Beginning = tuple[tuple[int, ...], ...]  # of a prompt, in blocks


def block_map(
    events: Sequence[Event],
    num_blocks: int,
    *,
    names: Sequence[str] | None = None,
    title: str = "Which block holds what",
    remember: bool = False,
) -> Picture:
    """Which request holds which block in which step. Hatched: shared by two or more.

    remember=True also shows, pale, the free blocks that still hold what a request left in them (stage 4 and up).
    """
    timeline = read_events(events)
    labels = timeline.state.labels(names)
    picture, axes = new_picture(1.6 + 0.19 * num_blocks, title)
    some_shared = draw_block_map(axes, timeline, num_blocks, remember=remember)
    handles = [Patch(facecolor=colour_of(i), label=f"request {label}") for i, label in enumerate(labels)]
    if some_shared:
        handles.append(Patch(facecolor="#808080", hatch="////", edgecolor="white", label="shared by several"))
    if remember:
        handles.append(Patch(facecolor="#808080", alpha=0.25, label="free, contents kept"))
    legend_below(axes, handles, columns=3)
    return picture


def draw_block_map(axes: Axes, timeline: Timeline, num_blocks: int, *, remember: bool = False) -> bool:
    """Draw who holds which block in which step. Returns whether some block is shared in some step."""
    some_shared = False
    for column, blocks in enumerate(timeline.blocks):
        holders = blocks.holders
        box: dict[str, Any] = {"width": 1, "left": column, "height": 0.86, "linewidth": 0}
        for block, lives in holders.items():
            shared = len(lives) > 1
            some_shared |= shared
            style: dict[str, Any] = {"hatch": "////", "edgecolor": "white"} if shared else {"edgecolor": "none"}
            axes.barh(block, facecolor=colour_of(lives[0]), **box, **style)
        for block in blocks.writers.keys() - holders.keys() if remember else ():
            axes.barh(block, facecolor=colour_of(blocks.writers[block]), alpha=0.22, **box)
    number_blocks(axes, num_blocks, every=1 if num_blocks <= 10 else 2 if num_blocks <= 24 else 8)
    label_steps(axes, len(timeline.blocks))
    return some_shared


def lanes_and_blocks(events: Sequence[Event], num_blocks: int, *, title: str) -> Picture:
    """Who runs when, and below, on the same axis of steps, which of them holds which block."""
    timeline = read_events(events)
    lives = len(timeline.lives)
    picture, (lanes, blocks) = new_panels(1.5 + 0.26 * lives + 0.24 * num_blocks, title, 2, [lives, 0.9 * num_blocks])
    used = draw_lanes(lanes, timeline)
    draw_block_map(blocks, timeline, num_blocks)
    for i, label in enumerate(lanes.get_yticklabels()):
        label.set_bbox({"facecolor": "white", "edgecolor": colour_of(i), "linewidth": 3, "pad": 1.5})
    lanes.set_xlabel("")
    legend_below(lanes, lane_legend(used), columns=3)
    return picture


def number_blocks(axes: Axes, num_blocks: int, every: int) -> None:
    """An axis down of the blocks, with the number of every first, second or eighth."""
    axes.set(ylabel="block", ylim=(num_blocks - 0.4, -0.6), yticks=range(0, num_blocks, every))


def ref_counts(events: Sequence[Event], num_blocks: int) -> Picture:
    """The reference count of every block in every step: how many hold it."""
    timeline = read_events(events)
    picture, axes = new_picture(1.5 + 0.2 * num_blocks, "How many sequences own each block")
    for column, blocks in enumerate(timeline.blocks):
        holders = blocks.holders
        for block in range(num_blocks):
            count = len(holders.get(block, []))
            colour = COUNT_COLOURS[min(count, 3)]
            axes.barh(block, 1, left=column, height=1, facecolor=colour, edgecolor="white", linewidth=0.6)
            if count:
                ink = BLACK if count == 1 else "white"
                axes.text(column + 0.5, block, str(count), ha="center", va="center", fontsize=9, color=ink)
    number_blocks(axes, num_blocks, every=1 if num_blocks <= 10 else 2)
    axes.set_ylim(num_blocks - 0.5, -0.5)
    label_steps(axes, len(timeline.blocks))
    shades = zip(COUNT_COLOURS, COUNT_WORDS, strict=True)
    legend_below(axes, [Patch(facecolor=shade, edgecolor="#909090", label=word) for shade, word in shades], columns=4)
    return picture


@dataclass(frozen=True)
class Holding:
    """What a request holds while a step runs: its block table, and how many of its tokens are in the cache after it."""

    request: int
    table: list[int]
    length: int


def holdings(events: Sequence[Event], step: int) -> list[Holding]:
    """Every sequence that holds blocks while `step` runs, in the order in which they took their first."""
    timeline = read_events(events)
    blocks = next(blocks for blocks in timeline.blocks if blocks.step == step)
    return [Holding(timeline.lives[i].request, table, blocks.lengths[i]) for i, table in blocks.tables.items()]


def pool_slots(
    events: Sequence[Event], num_blocks: int, block_size: int, *, step: int, names: Sequence[str] | None = None
) -> Picture:
    """The pool while `step` runs: a row for each block, a box for each slot, and in it the position of its token.

    Filled: a key and value lie there. Hatched: the block is taken and the slot still empty. White: free. The number of
    the request stands to the right of its blocks. More than HIGH blocks stand in two columns, without positions.
    """
    columns = 1 if num_blocks <= HIGH else 2
    rows = -(-num_blocks // columns)
    picture, axes = new_picture(1.3 + 0.2 * rows, f"The pool in step {step}")
    corners = [(block // rows * (block_size + 3), block % rows) for block in range(num_blocks)]
    owners: dict[int, list[int]] = {}
    for block, (left, row) in enumerate(corners):
        axes.add_patch(Rectangle((left, row - 0.42), block_size, 0.84, facecolor="white", edgecolor="#B0B0B0"))
        axes.text(left - 0.3, row, str(block), va="center", ha="right", fontsize=9)
    for holding in holdings(events, step):
        for i, block in enumerate(holding.table):
            owners.setdefault(block, []).append(holding.request)
            if owners[block] == [holding.request]:
                draw_slots(axes, holding, i, block_size, corners[block], numbered=columns == 1)
    for block, requests in owners.items():
        left, row = corners[block]
        text = ", ".join(names[r] if names else str(r) for r in requests)
        axes.text(left + block_size + 0.2, row, text, va="center", fontsize=9, fontweight="bold")
    every = 1 if columns == 1 else 5
    offsets = [(left + n + 0.5, str(n)) for left, row in corners if row == 0 for n in range(0, block_size, every)]
    axes.set_xticks([x for x, _ in offsets], [offset for _, offset in offsets])
    axes.set(ylabel="block", ylim=(rows - 0.4, -0.6), yticks=[])
    within = "offset in the block" + "; in a slot: the position of its token in the text" * (columns == 1)
    axes.set(xlim=(-1.5, corners[-1][0] + block_size + 1), xlabel=within)
    filled = Patch(facecolor="#909090", label="holds a token (colour: request, named on the right)")
    empty = Patch(edgecolor="#707070", label="taken, still empty", **HATCHED)
    legend_below(axes, [filled, empty])
    return picture


def draw_slots(
    axes: Axes, holding: Holding, index: int, block_size: int, corner: tuple[int, int], *, numbered: bool
) -> None:
    """The slots of the `index`-th block of a sequence, from the corner (left, row) on."""
    left, row = corner
    colour = colour_of(holding.request)
    for offset in range(block_size):
        position = index * block_size + offset
        style: dict[str, Any] = {"edgecolor": colour, **HATCHED}
        if position < holding.length:
            style = {"facecolor": colour, "edgecolor": "white"}
            if numbered:
                middle = left + offset + 0.5
                axes.text(middle, row, str(position), ha="center", va="center", fontsize=8, bbox=PAPER)
        axes.add_patch(Rectangle((left + offset, row - 0.42), 1, 0.84, linewidth=0.6, **style))


def cache_growth(
    events: Sequence[Event], *, reserved: int, names: Sequence[str] | None = None, title: str = "What the cache holds"
) -> Picture:
    """Tokens with keys and values in the cache, step by step, stacked by request, below the slots set aside for them.

    reserved: the slots of stage 2's rectangle, rows x columns.
    """
    timeline = read_events(events)
    picture, axes = new_picture(3.3, title)
    held = [held_tokens(timeline, step) for step in timeline.steps]
    edges = list(range(len(timeline.steps) + 1))
    bottom = [0] * len(timeline.steps)
    for i, label in enumerate(timeline.state.labels(names)):
        top = [low + at.get(i, 0) for low, at in zip(bottom, held, strict=True)]
        axes.stairs(top, edges, baseline=bottom, fill=True, facecolor=colour_of(i), label=f"request {label}")
        bottom = top
    axes.stairs([reserved] * len(timeline.steps), edges, color=BLACK, linewidth=2, label="set aside")
    axes.set(ylabel="KV cache [tokens]", ylim=(0, None))
    label_steps(axes, len(timeline.steps))
    legend_below(axes, columns=4)
    return picture


def waste(runs: Mapping[str, Sequence[SlotUse]]) -> Picture:
    """For each run (label -> `slot_use(...)`), the share of the reserved slots that held a token, and the rest."""
    picture, axes = new_picture(1.5 + 0.5 * len(runs), "KV memory set aside, averaged over the run")
    for row, use in enumerate(runs.values()):
        used = 100 * sum(u.used for u in use) / sum(u.reserved for u in use)
        axes.barh(row, used, color=BLUE, height=0.6)
        axes.barh(row, 100 - used, left=used, height=0.6, edgecolor=VERMILION, **HATCHED)
        label: dict[str, Any] = {"va": "center", "ha": "center", "fontsize": 10, "fontweight": "bold"}
        axes.text(used / 2, row, f"{used:.0f} %", color="white", **label)
        if used < 88:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axes.text((100 + used) / 2, row, f"{100 - used:.0f} %", color=BLACK, bbox=box, **label)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="share of the slots set aside [%]")
    legend_below(axes, [Patch(color=BLUE, label="holds a token"), Patch(edgecolor=VERMILION, label="empty", **HATCHED)])
    return picture


def prefix_tree(
    prompts: Sequence[Sequence[int]],
    block_size: int,
    decode: Callable[[list[int]], str],
    names: Sequence[str],
    title: str = "Which beginnings are the same",
) -> Picture:
    """The prompts cut into blocks, equal beginnings drawn once. Only full blocks (solid frames) can be shared."""
    owners: dict[Beginning, list[int]] = {}  # prompts that begin so
    for i, prompt in enumerate(prompts):
        beginning: Beginning = ()
        for start in range(0, len(prompt), block_size):
            tokens = tuple(prompt[start : start + block_size])
            beginning += (tokens if len(tokens) == block_size else (*tokens, -1 - i),)  # partly filled: of one owner
            owners.setdefault(beginning, []).append(i)
    order = {beginning: i for i, beginning in enumerate(owners)}
    inner = {beginning[:-1] for beginning in owners}
    # Each beginning that goes no further has a row of its own, beside those with which it has most in common
    ends = sorted(owners.keys() - inner, key=lambda end: [order[end[:n]] for n in range(1, len(end) + 1)])
    rows: dict[Beginning, float] = {}
    for beginning in owners:
        mine = [row for row, end in enumerate(ends) if end[: len(beginning)] == beginning]
        rows[beginning] = (mine[0] + mine[-1]) / 2
    picture, axes = new_picture(0.5 + 0.95 * len(ends), title)
    for beginning, row in rows.items():
        if before := beginning[:-1]:
            x = len(before)
            axes.plot([x - 0.08, x], [rows[before], row], color="#707070", linewidth=1.5, zorder=0)
        block = [token for token in beginning[-1] if token >= 0]
        draw_block(axes, len(before), row, decode(block), len(block), block_size, [names[i] for i in owners[beginning]])
    axes.set(xlim=(-0.05, max(map(len, owners))), ylim=(len(ends) - 0.45, -0.6))
    axes.axis("off")
    return picture


def draw_block(
    axes: Axes, left: float, row: float, text: str, num_tokens: int, block_size: int, owners: Sequence[str]
) -> None:
    line: dict[str, Any] = {"edgecolor": BLACK} if num_tokens == block_size else {"edgecolor": "#707070", "ls": "--"}
    line |= {"facecolor": "#FFF3D6", "lw": 2.4} if len(owners) > 1 else {"facecolor": "white", "lw": 1.2}
    corners = "round,pad=0,rounding_size=0.04"
    axes.add_patch(FancyBboxPatch((left, row - 0.4), 0.92, 0.8, boxstyle=corners, **line))
    lines = textwrap.wrap(text.replace("\n", "¶ "), 18, max_lines=3, placeholder=" …")
    axes.text(left + 0.04, row - 0.31, "\n".join(lines), fontsize=9, va="top")
    label = f"{', '.join(owners)}: {num_tokens} tokens"
    axes.text(left + 0.04, row + 0.29, label, fontsize=9, va="center", fontweight="bold")
