"""The colours of the pictures, and the same pictures on dark paper. Plain Python.

They are those of Okabe and Ito, which people with any kind of colour vision can tell apart.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from functools import cache

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PINK = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
WHITE, GREY = "#FFFFFF", "#808080"
# By night paper and ink change places, and what was dark is light enough for ink that is dark now.
NIGHT = {
    WHITE: "#14181F", BLACK: "#E9E6DF", GREY: "#8A909A", ORANGE: "#E69F00", SKY: "#8ACBF2", GREEN: "#2DBE93",
    YELLOW: "#F0E442", BLUE: "#3F97DB", VERMILION: "#EE7C2E", PINK: "#DD92BC",
    "#FFF3D6": "#3F3A1C", "#08306B": "#D6E8F7", "#3182BD": "#5BA4DB", "#9ECAE9": "#2D5F86",
}  # fmt: skip
Colour = tuple[float, ...]  # red, green, blue, from 0 to 255
SIGNATURE = 8  # bytes of a PNG before its first chunk


def rgb(colour: str) -> Colour:
    return tuple(bytes.fromhex(colour[1:]))


DAY_AND_NIGHT = [(rgb(day), rgb(night)) for day, night in NIGHT.items()]
# Of each two colours of the day: the first, the way to the second, and its length squared; and what they are by night
PAIRS = [
    (a, tuple(y - x for x, y in zip(a, b, strict=True)), sum((y - x) ** 2 for x, y in zip(a, b, strict=True)), *nights)
    for (a, night_a), (b, night_b) in itertools.combinations(DAY_AND_NIGHT, 2)
    for nights in [(night_a, night_b)]
]


@cache
def night_of(colour: Colour) -> Colour:
    """The colour by night. At an edge a colour is a mixture of two, and stays the same mixture of what they become."""
    red, green, blue = colour
    least = math.inf
    for (r, g, b), (dr, dg, db), length, night_a, night_b in PAIRS:
        share = min(1.0, max(0.0, ((red - r) * dr + (green - g) * dg + (blue - b) * db) / length))
        error = (red - r - share * dr) ** 2 + (green - g - share * dg) ** 2 + (blue - b - share * db) ** 2
        if error < least:
            least = error
            found = tuple(x + share * (y - x) for x, y in zip(night_a, night_b, strict=True))
    return found


def at_night(png: bytes) -> bytes:
    """A picture of `Picture.png` with the colours of the night. Raises ValueError for a PNG without a palette."""
    position = SIGNATURE
    while position < len(png):
        (length,) = struct.unpack_from(">I", png, position)
        kind, start = png[position + 4 : position + 8], position + 8
        if kind == b"PLTE":
            colours = [night_of(tuple(png[i : i + 3])) for i in range(start, start + length, 3)]
            chunk = kind + bytes(round(part) for colour in colours for part in colour)
            return png[: start - 4] + chunk + struct.pack(">I", zlib.crc32(chunk)) + png[start + length + 4 :]
        position = start + length + 4
    raise ValueError("the picture has no palette, so its colours cannot be changed for the night")
