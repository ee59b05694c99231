"""The site's pictures by night: what is drawn on white once more for a dark page.

Dimming a white picture leaves a grey box, and inverting it turns light blue into dark, of which the text speaks. So
only what has no colour changes places, white for the page and black for ink; strong colours stay, a little lighter; and
pale ones, which stood for little on white, stand for little on black.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

PAGE, INK = np.array([0x12, 0x12, 0x12]) / 255, np.array([0xE6, 0xE9, 0xEF]) / 255  # of the theme
FULL = 0.5  # chroma from which on a colour is a strong one
PALE = 1.9  # how much sooner than on white a pale colour fades
LIGHTER = 0.2
COLOURS = 64
IMAGE = re.compile(r'<img\b[^>]*\bsrc="([^"]*_images/[^"]+)\.png"[^>]*>')


def by_night(rgb: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """rgb [height, width, 3] from 0 to 1, drawn on white -> the same for a dark page."""
    high, low = rgb.max(-1, keepdims=True), rgb.min(-1, keepdims=True)  # [height, width, 1]
    plain = PAGE + (INK - PAGE) * (1 - (high + low) / 2)
    share = np.clip((high - low) / FULL, 0, 1)  # of colour, the rest is white
    colour = np.clip((rgb - (1 - share)) / np.maximum(share, 1e-3), 0, 1)
    weight = share**PALE
    return plain * (1 - weight) + (colour * (1 - LIGHTER) + LIGHTER) * weight


def write_night(path: Path, target: Path) -> None:
    with Image.open(path) as image:
        rgb = np.asarray(image.convert("RGB"), dtype=np.float64) / 255
    night = Image.fromarray((by_night(rgb).clip(0, 1) * 255).round().astype(np.uint8))
    night.quantize(COLOURS, dither=Image.Dither.NONE).save(target, optimize=True)


def with_class(tag: str, name: str) -> str:
    if found := re.search(r'\bclass="', tag):
        return f"{tag[: found.end()]}{name} {tag[found.end() :]}"
    return tag.replace("<img", f'<img class="{name}"', 1)


def add_nights(html: Path) -> None:
    """For each picture of the built site another one, and both on every page that shows it: the theme hides one."""
    for path in sorted((html / "_images").glob("*.png")):
        write_night(path, path.with_suffix(".night.png"))
    for page in html.rglob("*.html"):
        if "_static" in page.parts:
            continue
        text = page.read_text(encoding="utf-8")
        both = IMAGE.sub(
            lambda m: (
                with_class(m[0], "only-light")
                + with_class(m[0].replace(f"{m[1]}.png", f"{m[1]}.night.png"), "only-dark")
            ),
            text,
        )
        if both != text:
            page.write_text(both, encoding="utf-8")
