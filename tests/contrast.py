"""How well one colour can be read on another, as WCAG 2 measures it."""

from collections.abc import Sequence


def luminance(colour: Sequence[float]) -> float:
    """From red, green and blue, each from 0 to 255."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """From 1, the same, to 21, black on white. Text wants 4.5."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
