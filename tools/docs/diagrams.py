"""The diagrams of the site: boxes and arrows as SVG, in the page's own colours (light or dark), legible on a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tools import ROOT
from tools.pictures.state_diagrams import BLOCK_STATES, START, Arrow, block_arrows, sequence_arrows

SPREAD = 7.0  # distance of each of two opposite arrows from the line between the boxes' middles
HEAD = (
    '<defs><marker id="{name}-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z"/></marker></defs>'
)


@dataclass(frozen=True)
class Box:
    """A box with a text. x, y: the upper left corner. link: where a click leads, relative to the diagram's page."""

    x: float
    y: float
    text: str
    link: str = ""
    width: float = 112
    height: float = 38
    kind: str = "box"  # or a "band" behind others, with its text in its upper left corner, `indent` away from the side
    indent: float = 9

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


@dataclass(frozen=True)
class Line:
    """An arrow between two boxes. at: where the label is, as a share of the arrow's length."""

    start: str
    end: str
    label: str = ""
    at: float = 0.5


def border(box: Box, dx: float, dy: float) -> float:
    """The distance from a box's middle to its border in the direction (dx, dy), a vector of length 1."""
    return min(
        (box.width / 2 + 2) / abs(dx) if dx else float("inf"), (box.height / 2 + 2) / abs(dy) if dy else float("inf")
    )


def draw_line(name: str, boxes: Mapping[str, Box], line: Line, paired: bool) -> str:
    start, end = boxes[line.start], boxes[line.end]
    (x1, y1), (x2, y2) = start.middle, end.middle
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    first, last = border(start, dx, dy), length - border(end, dx, dy)
    aside = SPREAD if paired else 0.0  # to the left of its direction, so that there and back do not coincide
    x1, y1 = x1 + dy * aside, y1 - dx * aside
    a, b = (x1 + dx * first, y1 + dy * first), (x1 + dx * last, y1 + dy * last)
    svg = f'<path class="arrow" d="M{a[0]:.0f} {a[1]:.0f} {b[0]:.0f} {b[1]:.0f}" marker-end="url(#{name}-tip)"/>'
    if line.label:
        x, y = a[0] + (b[0] - a[0]) * line.at, a[1] + (b[1] - a[1]) * line.at
        y += (-6 if dx > 0 else 14) if paired and abs(dy) < 0.1 else 4
        upright = abs(dx) < 0.1  # then the label stands beside it
        x += (7 if dy > 0 else -7) * upright
        anchor = ("start" if dy > 0 else "end") if upright else "middle"
        svg += f'<text class="label" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(line.label)}</text>'
    return svg


def draw_box(box: Box) -> str:
    x, y = box.middle
    rows = box.text.split("\n")
    shape = f'<rect class="{box.kind}" x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="7"/>'
    if box.kind == "band":
        return shape + f'<text class="note" x="{box.x + box.indent}" y="{box.y + 16}">{escape(box.text)}</text>'
    for i, row in enumerate(rows):
        shape += (
            f'<text text-anchor="middle" x="{x}" y="{y + 4.5 + 14 * (i - (len(rows) - 1) / 2)}">{escape(row)}</text>'
        )
    return f'<a href="{escape(box.link)}">{shape}</a>' if box.link else shape


def diagram(name: str, alt: str, boxes: Mapping[str, Box], lines: Sequence[Line], size: tuple[int, int]) -> str:
    """The diagram as HTML. It has no empty line, which would end it inside a page of Markdown."""
    pairs = {(line.start, line.end) for line in lines}
    parts = [draw_box(box) for box in boxes.values()]
    parts += [draw_line(name, boxes, line, (line.end, line.start) in pairs) for line in lines]
    width, height = size
    shape = f'viewBox="0 0 {width} {height}" style="max-width:{1.45 * width:.0f}px"'
    return (
        f'<figure class="diagram"><svg {shape} role="img" '
        f'aria-label="{escape(alt)}">{HEAD.format(name=name)}{"".join(parts)}</svg></figure>\n'
    )


def life_of_a_request() -> str:
    def source(path: str) -> str:
        return f"source/nanovllm/{path}.html"

    boxes = {
        "asked": Box(15, 8, "LLM, AsyncLLM", source("llm")),
        "answered": Box(275, 8, "RequestOutput", source("outputs")),
        "control": Box(4, 66, "control plane: plain Python, no tensors", kind="band", width=392, height=172, indent=88),
        "engine": Box(15, 96, "engine", source("engine/engine")),
        "text": Box(275, 96, "detokenizer", source("text/detokenizer")),
        "waiting": Box(15, 184, "waiting queue", source("engine/waiting_queue")),
        "scheduler": Box(145, 184, "scheduler", source("engine/scheduler")),
        "blocks": Box(275, 184, "block manager", source("engine/block_manager")),
        "data": Box(4, 288, "data plane: only tensors", kind="band", width=392, height=232),
        "executor": Box(145, 318, "executor", source("workers/executor")),
        "batch": Box(15, 390, "batch", source("runner/batch")),
        "runner": Box(145, 390, "model runner", source("runner/model_runner")),
        "sampler": Box(275, 390, "sampler", source("sampling/sampler")),
        "model": Box(145, 466, "transformer", source("models/transformer")),
        "attention": Box(275, 466, "attention,\nKV cache", source("attention/interface")),
    }
    lines = [
        Line("asked", "engine"), Line("engine", "waiting"), Line("waiting", "scheduler"),
        Line("scheduler", "blocks"), Line("blocks", "scheduler"), Line("text", "answered"),
        Line("scheduler", "text"), Line("scheduler", "executor", "StepPlan", 0.45),
        Line("executor", "scheduler", "StepResult", 0.55), Line("executor", "runner"), Line("runner", "batch"),
        Line("runner", "sampler"), Line("runner", "model"), Line("model", "attention"), Line("attention", "model"),
    ]  # fmt: skip
    alt = (
        "A request goes from LLM or AsyncLLM to the engine, the waiting queue and the scheduler, which asks the block "
        "manager for blocks and sends a StepPlan to the executor. The model runner makes a batch, runs transformer and "
        "attention, and samples. The StepResult goes back to the scheduler and by the detokenizer into a RequestOutput."
    )
    return diagram("life", alt, boxes, lines, (400, 524))


def overlap() -> str:
    """Synchronous and asynchronous scheduling as bars. Inside the page, the drawing takes the colours of the page."""
    drawing = (ROOT / "docs" / "figures" / "overlap.svg").read_text(encoding="utf-8")
    return f'<figure class="diagram">{drawing.strip()}</figure>\n'


def labelled(arrows: set[Arrow]) -> dict[tuple[str, str], list[str]]:
    labels: dict[tuple[str, str], list[str]] = {}
    for start, end, label in sorted(arrows):
        if START not in (start, end):
            labels.setdefault((start, end), []).append(label)
    return labels


def sequence_states() -> str:
    places = {"waiting": (4, 16), "running": (190, 16), "finished": (190, 110)}
    boxes = {name: Box(x, y, name, width=96) for name, (x, y) in places.items()}
    words = {
        ends: ", ".join(label.removeprefix("finished ") for label in labels)
        for ends, labels in labelled(sequence_arrows()).items()
    }
    lines = [Line(*ends, label=text) for ends, text in words.items()]
    return diagram("sequence", told("A sequence", words), boxes, lines, (400, 154))


def block_states() -> str:
    places = ((4, 14), (4, 142), (144, 14), (144, 142), (284, 142))
    boxes = {
        name: Box(x, y, name.replace(", ", ",\n"), width=88) for name, (x, y) in zip(BLOCK_STATES, places, strict=True)
    }
    words = {ends: ", ".join(labels) for ends, labels in labelled(block_arrows()).items()}
    crossing = {(BLOCK_STATES[1], BLOCK_STATES[2]): 0.28, (BLOCK_STATES[3], BLOCK_STATES[0]): 0.28}
    lines = [Line(*ends, label=text, at=crossing.get(ends, 0.5)) for ends, text in words.items()]
    return diagram("block", told("A KV block", words), boxes, lines, (376, 190))


def told(what: str, words: Mapping[tuple[str, str], str]) -> str:
    return f"{what}: " + "; ".join(f"{a} to {b} ({label})" for (a, b), label in words.items())


DIAGRAMS = {
    "life": life_of_a_request,
    "overlap": overlap,
    "sequence": sequence_states,
    "block": block_states,
}
