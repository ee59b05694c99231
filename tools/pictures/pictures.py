"""Every picture of the notebooks, drawn from the events of an engine (`on_event`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from stages.core import Event
from tools.pictures.plots import lines, prefix_tree, time_per_token, waste
from tools.pictures.style import BLACK, BLUE, SKY, VERMILION, Picture, colour_of, label_steps, legend_below, new_picture
from tools.pictures.timeline import Life, Span, held_tokens, read_events, slot_use, token_times

__all__ = [
    "block_map",
    "cache_growth",
    "lines",
    "prefix_tree",
    "slot_use",
    "swimlane",
    "time_per_token",
    "token_times",
    "waste",
    "work_map",
]

PHASE_STYLE: dict[str, tuple[str, dict[str, Any]]] = {
    "prefill": ("prefill: the prompt, for the first time", {"facecolor": BLUE}),
    "decode": ("decode: one new token", {"facecolor": SKY}),
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
    left: dict[int, float] = {}
    width: dict[int, float] = {}
    position = 0.0
    for step in timeline.steps:
        left[step], width[step] = position, 1.0 if by == "step" else float(timeline.tokens_in_step[step])
        position += width[step]
    scale = until or position
    used = set()
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
        mark_ends(axes, life, row, left, width, scale)
    axes.set_yticks(range(len(timeline.lives)), timeline.state.labels(names))
    axes.set_ylim(len(timeline.lives) - 0.4, -0.6)
    axes.set_xlim(0, scale * 1.01)
    axes.set_ylabel("request")
    axes.set_xlabel("step" if by == "step" else "tokens sent through the model so far")
    if by == "step":
        label_steps(axes, len(timeline.steps))
    handles: list[Any] = [Patch(label=text, **style) for phase, (text, style) in PHASE_STYLE.items() if phase in used]
    end = Line2D([], [], color=BLACK, marker="|", markersize=13, markeredgewidth=2.5, linestyle="", label="finished")
    legend_below(axes, [*handles, end])
    return picture


def write_tokens(axes: Axes, span: Span, left: float, width: float, row: int, scale: float) -> None:
    """How many tokens the box stands for, where there is room; a prompt's box always says it. Above: cache hits."""
    fits = width / scale > (0.05 if span.phase == "again" else 0.015 * max(2, len(str(span.tokens))))
    if span.tokens > 1 and (fits or (span.phase == "prefill" and width / scale > 0.012)):
        rotation = 0 if fits else 90
        middle = left + width / 2
        axes.text(middle, row, str(span.tokens), rotation=rotation, ha="center", va="center", color="white", fontsize=9)
    if span.hit:
        at, side = (left, "left") if left / scale < 0.8 else (left + width, "right")
        axes.text(at, row - 0.36, f"+{span.hit} from the cache", va="bottom", ha=side, fontsize=9)


def mark_ends(axes: Axes, life: Life, row: int, left: dict[int, float], width: dict[int, float], scale: float) -> None:
    for step in life.preempted:
        axes.plot(left[step], row, marker="X", color=BLACK, markersize=9, clip_on=False)
        # Below the line, since what the cache had is written above it, and legible on the boxes that may follow soon
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
        axes.text(left[step] + 0.016 * scale, row + 0.24, "preempted", fontsize=9, va="center", bbox=box)
    if life.finished is not None:
        end = left[life.finished] + width[life.finished]
        axes.plot([end, end], [row - 0.42, row + 0.42], color=BLACK, linewidth=2.5, clip_on=False)


def work_map(
    events: Sequence[Event], request: int = 0, *, until: int | None = None, title: str = "What each step computes"
) -> Picture:
    """One request: a row for each of its steps, and in it the positions of the text that the step computes or reads.

    `until` fixes the right end of the axis, so that two pictures can be compared.
    """
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
    axes.set_ylim(len(spans) + 0.6, 0.4)
    axes.set_yticks([n for n in range(1, len(spans) + 1) if n == 1 or n % 5 == 0])
    axes.set_xlim(0, until or computed)
    axes.set_xlabel("position in the text [tokens]")
    axes.set_ylabel("step of this request")
    words = {phase: text for phase, (text, _) in PHASE_STYLE.items()} | {"read": "read from the cache"}
    legend_below(axes, [Patch(label=words[phase], **style) for phase, style in used.items()])
    return picture


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
    some_shared = False
    for column, blocks in enumerate(timeline.blocks):
        holders = blocks.holders
        for block, lives in holders.items():
            shared = len(lives) > 1
            some_shared |= shared
            style: dict[str, Any] = {"hatch": "////", "edgecolor": "white"} if shared else {"edgecolor": "none"}
            owner = lives[0]
            axes.barh(block, 1, left=column, height=0.86, facecolor=colour_of(owner), linewidth=0, **style)
        if remember:
            for block in blocks.writers.keys() - holders.keys():
                life = blocks.writers[block]
                axes.barh(block, 1, left=column, height=0.86, facecolor=colour_of(life), alpha=0.22, linewidth=0)
    axes.set_ylim(num_blocks - 0.4, -0.6)
    axes.set_xlim(0, len(timeline.blocks))
    axes.set_yticks(range(0, num_blocks, 1 if num_blocks <= 10 else 2 if num_blocks <= 24 else 8))
    axes.set_ylabel("block")
    axes.set_xlabel("step")
    label_steps(axes, len(timeline.blocks))
    handles = [Patch(facecolor=colour_of(i), label=f"request {label}") for i, label in enumerate(labels)]
    if some_shared:
        handles.append(Patch(facecolor="#808080", hatch="////", edgecolor="white", label="shared by several"))
    if remember:
        handles.append(Patch(facecolor="#808080", alpha=0.25, label="free, contents kept"))
    legend_below(axes, handles, columns=3)
    return picture


def cache_growth(
    events: Sequence[Event],
    *,
    block_size: int | None = None,
    reserved: int | None = None,
    names: Sequence[str] | None = None,
    title: str = "What the cache holds",
) -> Picture:
    """Tokens with keys and values in the cache, step by step, stacked by request.

    With `block_size` (stages 3 and up), or `reserved` slots (stage 2's rectangle), also what was set aside for them.
    """
    timeline = read_events(events)
    picture, axes = new_picture(3.3, title)
    held = [held_tokens(timeline, step, block_size) for step in timeline.steps]
    edges = list(range(len(timeline.steps) + 1))
    bottom = [0] * len(timeline.steps)
    for i, label in enumerate(timeline.state.labels(names)):
        top = [low + at.get(i, 0) for low, at in zip(bottom, held, strict=True)]
        axes.stairs(top, edges, baseline=bottom, fill=True, facecolor=colour_of(i), label=f"request {label}")
        bottom = top
    if block_size is not None or reserved is not None:
        use = slot_use(events, block_size=block_size, reserved=reserved)
        axes.stairs([u.reserved for u in use], edges, color=BLACK, linewidth=2, label="set aside")
    axes.set_xlim(0, len(timeline.steps))
    axes.set_ylim(0)
    axes.set_xlabel("step")
    axes.set_ylabel("KV cache [tokens]")
    label_steps(axes, len(timeline.steps))
    legend_below(axes, axes.get_legend_handles_labels()[0], columns=4)
    return picture
