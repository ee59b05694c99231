"""How the pictures of the notebooks look.

Colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart; hatching and labels say
the same once more. Figures are 7 inches wide with type of 10 points and more: legible at half the width of a page.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PINK = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
REQUEST_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, VERMILION, YELLOW)
STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.6}
WIDTH = 7.0  # inches


class Picture(Figure):
    """A figure that notebooks show by themselves; the same picture gives the same bytes."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=90, metadata={"Software": None})
        return buffer.getvalue()


def new_picture(height: float, title: str) -> tuple[Picture, Axes]:
    """An empty picture, `height` inches high, and its axes."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        picture = Picture(figsize=(WIDTH, height), layout="constrained")
        axes: Axes = picture.subplots()
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    return picture, axes


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
