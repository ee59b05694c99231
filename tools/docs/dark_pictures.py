"""Draw the site's pictures once more for readers who see it in dark mode.

The pictures are drawn on white. Dimming a white picture leaves a grey box. Inverting it turns light blue into dark,
and the text speaks of light blue. So only what has no colour is inverted: white becomes the page, black becomes ink.
Strong colours stay, a little lighter. Pale colours stand out as little from the dark page as they did from white.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

PAGE, INK = np.array([0x12, 0x12, 0x12]) / 255, np.array([0xE6, 0xE9, 0xEF]) / 255  # of the theme
FULL = 0.5  # a colour with at least this chroma is a strong one
PALE = 1.9  # exponent: the larger, the weaker pale colours become
LIGHTER = 0.2  # share of white that is added to a strong colour
COLOURS = 64  # of the palette of a dark picture
IMAGE = re.compile(r'<img\b[^>]*\bsrc="([^"]*_images/[^"]+)\.png"[^>]*>')


def darkened(rgb: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A picture for a dark page: rgb [height, width, 3] from 0 to 1, drawn on white -> the same shape."""
    high, low = rgb.max(-1, keepdims=True), rgb.min(-1, keepdims=True)  # [height, width, 1]
    plain = PAGE + (INK - PAGE) * (1 - (high + low) / 2)
    share = np.clip((high - low) / FULL, 0, 1)  # of colour; the rest of the pixel is white
    colour = np.clip((rgb - (1 - share)) / np.maximum(share, 1e-3), 0, 1)
    weight = share**PALE
    return plain * (1 - weight) + (colour * (1 - LIGHTER) + LIGHTER) * weight


def write_darkened(path: Path, target: Path) -> None:
    with Image.open(path) as image:
        rgb = np.asarray(image.convert("RGB"), dtype=np.float64) / 255
    dark = Image.fromarray((darkened(rgb).clip(0, 1) * 255).round().astype(np.uint8))
    dark.quantize(COLOURS, dither=Image.Dither.NONE).save(target, optimize=True)


def with_class(tag: str, name: str) -> str:
    if found := re.search(r'\bclass="', tag):
        return f"{tag[: found.end()]}{name} {tag[found.end() :]}"
    return tag.replace("<img", f'<img class="{name}"', 1)


def add_dark_pictures(html: Path) -> None:
    """Write a dark picture beside each one of the built site, and put both on every page: the theme hides one."""
    for path in sorted((html / "_images").glob("*.png")):
        write_darkened(path, path.with_suffix(".dark.png"))
    for page in html.rglob("*.html"):
        if "_static" in page.parts:
            continue
        text = page.read_text(encoding="utf-8")
        both = IMAGE.sub(
            lambda m: (
                with_class(m[0], "only-light")
                + with_class(m[0].replace(f"{m[1]}.png", f"{m[1]}.dark.png"), "only-dark")
            ),
            text,
        )
        if both != text:
            page.write_text(both, encoding="utf-8")
