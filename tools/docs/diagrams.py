"""The diagrams of the site, as SVG in the page's own colours (light or dark), legible on a phone.

The states are drawn from what the code does (tools/pictures/state_diagrams.py). The others are docs/figures/*.svg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from tools import ROOT
from tools.pictures.state_diagrams import BLOCK_STATES, START, Arrow, block_arrows, sequence_arrows

Ends = tuple[str, str]  # the states that an arrow leaves and reaches
SPREAD = 7.0  # distance of each of two opposite arrows from the line between the boxes' middles
HEAD = (
    '<defs><marker id="{name}-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z"/></marker></defs>'
)


@dataclass(frozen=True)
class Box:
    """A box with a text. x, y: the upper left corner."""

    x: float
    y: float
    text: str
    width: float
    height: float = 38

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2

    def border(self, dx: float, dy: float) -> float:
        """The distance from the middle to just outside the border, in the direction (dx, dy), a vector of length 1."""
        across = (self.width / 2 + 2) / abs(dx) if dx else float("inf")
        return min(across, (self.height / 2 + 2) / abs(dy)) if dy else across


def draw_box(box: Box) -> str:
    x, y = box.middle
    rows = box.text.split("\n")
    svg = f'<rect class="box" x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="7"/>'
    for i, row in enumerate(rows):
        baseline = y + 4.5 + 14 * (i - (len(rows) - 1) / 2)
        svg += f'<text text-anchor="middle" x="{x}" y="{baseline}">{escape(row)}</text>'
    return svg


def draw_arrow(name: str, start: Box, end: Box, label: str, *, paired: bool, at: float) -> str:
    """An arrow between two boxes. paired: there is one back. at: where the label is, as a share of the way."""
    (x1, y1), (x2, y2) = start.middle, end.middle
    length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    first, last = start.border(dx, dy), length - end.border(dx, dy)
    aside = SPREAD if paired else 0.0  # to the left of its direction, so that there and back do not coincide
    x1, y1 = x1 + dy * aside, y1 - dx * aside
    a, b = (x1 + dx * first, y1 + dy * first), (x1 + dx * last, y1 + dy * last)
    x, y = a[0] + (b[0] - a[0]) * at, a[1] + (b[1] - a[1]) * at
    y += (-6 if dx > 0 else 14) if paired and abs(dy) < 0.1 else 4
    upright = abs(dx) < 0.1  # then the label stands beside it
    x += (7 if dy > 0 else -7) * upright
    anchor = ("start" if dy > 0 else "end") if upright else "middle"
    return (
        f'<path class="arrow" d="M{a[0]:.0f} {a[1]:.0f} {b[0]:.0f} {b[1]:.0f}" marker-end="url(#{name}-tip)"/>'
        f'<text class="label" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(label)}</text>'
    )


def state_diagram(
    what: str, boxes: Mapping[str, Box], arrows: set[Arrow], size: tuple[int, int], at: Mapping[Ends, float]
) -> str:
    """The states of "A sequence", say, as HTML without an empty line, which would end it inside a page of Markdown.

    The name is the last word of `what`. `at` moves the labels of some arrows, as in `draw_arrow`.
    """
    labels: dict[Ends, list[str]] = {}
    for start, end, label in sorted(arrows):
        if START not in (start, end):
            labels.setdefault((start, end), []).append(label.removeprefix("finished "))
    words = {ends: ", ".join(found) for ends, found in labels.items()}
    name, (width, height) = what.split()[-1], size
    svg = HEAD.format(name=name) + "".join(map(draw_box, boxes.values()))
    for (start, end), text in words.items():
        paired, share = (end, start) in words, at.get((start, end), 0.5)
        svg += draw_arrow(name, boxes[start], boxes[end], text, paired=paired, at=share)
    alt = f"{what}: " + "; ".join(f"{a} to {b} ({text})" for (a, b), text in words.items())
    shape = f'viewBox="0 0 {width} {height}" style="max-width:{1.45 * width:.0f}px"'
    return f'<figure class="diagram"><svg {shape} role="img" aria-label="{escape(alt)}">{svg}</svg></figure>\n'


def sequence_states() -> str:
    places = {"waiting": (4, 16), "running": (190, 16), "finished": (190, 110)}
    boxes = {name: Box(x, y, name, 96) for name, (x, y) in places.items()}
    return state_diagram("A sequence", boxes, sequence_arrows(), (400, 154), {})


def block_states() -> str:
    places = ((4, 14), (4, 142), (144, 14), (144, 142), (284, 142))
    named = zip(BLOCK_STATES, places, strict=True)
    boxes = {name: Box(x, y, name.replace(", ", ",\n"), 88) for name, (x, y) in named}
    crossing = {(BLOCK_STATES[1], BLOCK_STATES[2]): 0.28, (BLOCK_STATES[3], BLOCK_STATES[0]): 0.28}
    return state_diagram("A KV block", boxes, block_arrows(), (376, 190), crossing)


def drawing(name: str) -> str:
    """docs/figures/NAME.svg as HTML. Inside the page, the drawing takes the colours of the page."""
    svg = (ROOT / "docs" / "figures" / f"{name}.svg").read_text(encoding="utf-8")
    return f'<figure class="diagram">{svg.strip()}</figure>\n'


DIAGRAMS = {
    "life": lambda: drawing("life"),
    "overlap": lambda: drawing("overlap"),
    "sequence": sequence_states,
    "block": block_states,
}
