"""How the pictures of the notebooks look.

Colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart; hatching and labels say
the same again. Figures are 7 inches wide with type of 10 points and more, so they are legible at half that width.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PINK = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
REQUEST_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, YELLOW)
STYLE = {
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.6,
    "figure.constrained_layout.h_pad": 0.07, "figure.constrained_layout.w_pad": 0.07,
}  # fmt: skip
WIDTH = 7.0  # inches
SHOWN_DPI, STORED_DPI = 90, 150  # stored finer than shown, so that text is sharp on fine screens and projectors
COLOURS = 64  # of a stored picture: enough for flat areas and edges of letters, at a third of the bytes


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
        axes = self.axes[-1]
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
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    return picture, axes


def new_panels(height: float, title: str, count: int) -> tuple[Picture, list[Axes]]:
    """An empty picture, `height` inches high, and the axes of `count` panels below each other, with one axis across."""
    with rc_context(STYLE):
        picture = Picture(figsize=(WIDTH, height), layout="constrained")
        panels: list[Axes] = list(picture.subplots(count, 1, sharex=True, squeeze=False)[:, 0])
    picture.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return picture, panels


def legend_below(axes: Axes, handles: Sequence[Any], columns: int = 2) -> None:
    if handles:
        axes.figure.legend(
            handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=10, handlelength=1.6
        )


def label_steps(axes: Axes, count: int) -> None:
    """Number the middle of the boxes: 1, 5, 10, ..."""
    every = next(n for n in (1, 5, 10, 20, 50, 100, 200, 500, 1000, count) if count / n <= 12)
    shown = [n for n in range(1, count + 1) if n == 1 or n % every == 0]
    axes.set_xticks([n - 0.5 for n in shown], [str(n) for n in shown])


def colour_of(index: int) -> str:
    return REQUEST_COLOURS[index % len(REQUEST_COLOURS)]
