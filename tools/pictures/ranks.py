"""Pictures of notebook 7: what each rank holds, what a layer does on every rank, what crosses the wire in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from stages.core import Event, SamplingParams
from stages.model import ModelConfig, Transformer
from stages.stage_7_tensor_parallel import cut, share_of
from tools.pictures.colours import BLACK, BLUE, ORANGE, VERMILION
from tools.pictures.plots import Picture, colour_of, legend_below, new_picture

HATCHES = ("", "////", "....", "\\\\\\\\")  # of the ranks, so that no picture needs colours
GAP = 150  # between two matrices, in rows and columns


def matrices(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """The matrices of one layer: name -> outputs, inputs."""
    with torch.device("meta"):  # shapes, without memory
        layer = Transformer(c).layers[0]
    return {name.split(".")[-2]: (p.shape[0], p.shape[1]) for name, p in layer.named_parameters() if p.dim() == 2}


def held_by(name: str, c: ModelConfig, rank: int, ranks: int) -> tuple[range, range]:
    """Which rows and columns of a layer's matrix the stage gives to a rank."""
    rows, columns = matrices(c)[name]
    numbers = torch.arange(rows * columns).view(rows, columns)
    part = cut(f"layers.0.{name}.weight", numbers, c, rank, ranks)
    first, last = int(part[0, 0]), int(part[-1, -1])
    return range(first // columns, last // columns + 1), range(first % columns, last % columns + 1)


def held(c: ModelConfig, ranks: int) -> Picture:
    """The seven matrices of a layer to scale, and the part of each that a rank holds: inputs across, outputs down."""
    picture, axes = new_picture(2.8, f"One layer on {ranks} ranks")
    x = 0
    for name in matrices(c):
        x = draw_matrix(axes, name, c, ranks, x, GAP) + GAP
    axes.set(xlim=(-10, x), ylim=(GAP + max(rows for rows, _ in matrices(c).values()) + 10, 0))
    axes.set_aspect("equal", anchor="W")
    axes.set_axis_off()
    legend_below(axes, [Patch(label=f"rank {rank}", **look(rank)) for rank in range(ranks)], columns=ranks)
    return picture


def look(rank: int) -> dict[str, Any]:
    return {"facecolor": colour_of(rank), "hatch": HATCHES[rank % 4], "edgecolor": "white"}


def draw_matrix(axes: Axes, name: str, c: ModelConfig, ranks: int, x: int, y: int) -> int:
    """Draw the matrix and, below it, copies of what several ranks hold. Returns where they end."""
    rows, columns = matrices(c)[name]
    parts = [held_by(name, c, rank, ranks) for rank in range(ranks)]
    copies = [parts[:rank].count(part) for rank, part in enumerate(parts)]  # 0 for who is the first to hold a part
    for copy in range(max(copies) + 1):
        top = y + copy * (rows + GAP)
        holders = [rank for rank in range(ranks) if copies[rank] == copy]
        for rank in holders:
            down, across = parts[rank]
            axes.add_patch(Rectangle((x + across.start, top + down.start), len(across), len(down), **look(rank)))
        line = "--" if copy else "-"
        axes.add_patch(Rectangle((x, top), columns, rows, fill=False, edgecolor=BLACK, linewidth=1, linestyle=line))
        text = f"copy: {', '.join(map(str, holders))}" if copy else f"{name}\n{rows}×{columns}"
        axes.text(x, top - 12, text, fontsize=10, va="bottom")
    return x + columns


def layer_flow(c: ModelConfig, ranks: int) -> Picture:
    """One token on its way through a layer: what every rank computes, with its sizes, and where they add up."""
    share = share_of(c, ranks)
    q, kv = share.num_attention_heads * c.head_dim, share.num_key_value_heads * c.head_dim
    boxes = {
        "norm": f"{c.hidden_size}",
        "q, k, v": f"{q},\n{kv}, {kv}",
        "attention": f"{share.num_attention_heads} of {c.num_attention_heads}\nheads",
        "o": f"{q}\n→{c.hidden_size}",
        "sum": "",
        "norm ": f"{c.hidden_size}",
        "gate, up": f"{share.intermediate_size},\n{share.intermediate_size}",
        "down": f"{share.intermediate_size}\n→{c.hidden_size}",
        "sum ": "",
    }
    picture, axes = new_picture(1.5 + 0.75 * ranks, "One token in one layer, on every rank")
    for x, (name, sizes) in enumerate(boxes.items()):
        axes.text(x + 0.5, -0.12, name.strip(), ha="center", va="bottom", fontsize=10)
        middle: dict[str, Any] = {"x": x + 0.5, "ha": "center", "va": "center", "fontsize": 9}
        if not sizes:
            axes.add_patch(Rectangle((x + 0.25, 0), 0.5, ranks - 0.1, facecolor=VERMILION, edgecolor=BLACK))
            text = f"{c.hidden_size} numbers"
            axes.text(y=ranks / 2, s=text, rotation=90, color="white", fontweight="bold", **middle)
            continue
        for rank in range(ranks):
            box = Rectangle((x + 0.05, rank + 0.05), 0.9, 0.8, facecolor=colour_of(rank), alpha=0.25, edgecolor=BLACK)
            axes.add_patch(box)
            axes.text(y=rank + 0.45, s=sizes, **middle)
    axes.set(xlim=(0, len(boxes)), ylim=(ranks, -0.5), xticks=[])
    axes.set_yticks([rank + 0.45 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return picture


@dataclass(frozen=True)
class Crossing:
    """One collective: what every rank put in, and how long the leader was in the call, waiting included."""

    kind: str  # all_reduce or all_gather
    shape: tuple[int, ...]
    num_bytes: int
    seconds: float


def listen_in(engine: Any) -> list[Crossing]:
    """A list that grows with every collective of `engine` (of stage 7) from now on."""
    crossings: list[Crossing] = []

    def noted(kind: str, collective: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        start = perf_counter()
        result = collective(x)
        if x.numel():  # nothing is sent of nothing
            crossings.append(Crossing(kind, tuple(x.shape), x.nbytes, perf_counter() - start))
        return result

    group = engine.team.group
    for kind in ("all_reduce", "all_gather"):
        setattr(group, kind, partial(noted, kind, getattr(group, kind)))
    return crossings


def decode_ms(engine: Any, prompt: list[int], num_tokens: int = 24) -> tuple[float, float]:
    """What the leader spends in a decode step of one sequence: median milliseconds outside and inside collectives."""
    crossings = listen_in(engine)
    ends: list[tuple[float, float]] = []  # of steps: the time, and the time spent in collectives until then

    def on_event(event: Event) -> None:
        if event["type"] == "token":
            ends.append((perf_counter(), sum(crossing.seconds for crossing in crossings)))

    engine.trace.on_event = on_event
    engine.generate([prompt], SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
    engine.trace.on_event = None
    steps = [(1000 * (t2 - t1), 1000 * (m2 - m1)) for (t1, m1), (t2, m2) in pairwise(ends)]
    met = median(inside for _, inside in steps)
    return median(whole for whole, _ in steps) - met, met


def wire(crossings: Sequence[Crossing], *, title: str) -> Picture:
    """The collectives of a step in order; the height is what each rank puts in."""
    picture, axes = new_picture(3.0, title)
    looks = {"all_reduce": (BLUE, "", "sum over the ranks"), "all_gather": (ORANGE, "////", "best tokens side by side")}
    for place, crossing in enumerate(crossings, start=1):
        colour, hatch, _ = looks[crossing.kind]
        axes.bar(place, crossing.num_bytes, color=colour, hatch=hatch, edgecolor="white")
    most = max(crossing.num_bytes for crossing in crossings)
    axes.set(ylabel="sent by each rank [bytes]", yscale="log", ylim=(4, 4 * most))
    numbered = [n for n in range(1, len(crossings) + 1) if n == 1 or n % 5 == 0 or n == len(crossings)]
    axes.set(xlabel="collective, in the order of the step", xticks=numbered)
    kinds = {crossing.kind for crossing in crossings}
    shown = [words for kind, words in looks.items() if kind in kinds]
    legend_below(axes, [Patch(facecolor=c, hatch=hatch, edgecolor="white", label=text) for c, hatch, text in shown])
    return picture
