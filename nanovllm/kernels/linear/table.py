"""The table of a card: which kernel computes which linear layer for how few tokens. A table is JSON.

`tables/9.0.json` was measured on an H200, and is what every card starts with. `make tune` measures the card that it
runs on, and writes that card's own table into the cache directory, where the engine finds it.

A layer is of one of three kinds. *plain*: x W^T + b. *gated*: the weight holds a gate above an up projection, and the
result is silu(gate) * up. *partial*: the result may come in parts, which the norm that follows sums. A layer is narrow
if the model's hidden size is at most `NARROW`. Within a kind the first row that fits is taken; where no row fits, the
library computes the layer.
"""

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

logger = logging.getLogger(__name__)

NARROW = 2048  # hidden size
KINDS = tuple(f"{kind}, {width}" for kind in ("plain", "gated", "partial") for width in ("narrow", "wide"))
KERNELS: dict[str, dict[str, type]] = {  # and what else a row says of its layout
    "library": {},
    "skinny_linear": {},
    "tiled_linear": {"columns": int, "inner": int, "num_stages": int, "swapped": bool},
    "weight_prefetch_linear": {"tile_tokens": int},
}
MEASURED = "9.0"
BORROWED_SHARED = 200 * 1024  # bytes of shared memory that the tiles of `tables/9.0.json` were chosen for


@dataclass(frozen=True)
class Row:
    """From `first` to `last` tokens and up to `max_bytes` of weights, all inclusive: which kernel."""

    first: int
    last: int
    max_bytes: int
    kernel: str  # of `KERNELS`
    layout: tuple[tuple[str, int], ...] = ()  # names and values, as in `KERNELS`


@dataclass(frozen=True)
class Table:
    """The rows by kind (`KINDS`), and where they were measured."""

    card: str
    capability: str  # "9.0"
    rows: Mapping[str, tuple[Row, ...]]

    @property
    def max_tokens(self) -> int:
        """With more tokens the library computes every layer."""
        return max((row.last for rows in self.rows.values() for row in rows), default=0)


def cache_directory() -> Path:
    """Where `make tune` leaves its table: NANOVLLM_CACHE, or ~/.cache/nanovllm."""
    return Path(os.environ.get("NANOVLLM_CACHE") or Path.home() / ".cache" / "nanovllm").expanduser()


def own_path(card: str) -> Path:
    """The file of a card's own table, by the card's name."""
    return cache_directory() / f"linear.{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}.json"


def write_table(table: Table, path: Path) -> None:
    """Write a table as `read_table` reads it, a row per line."""

    def line(row: Row) -> str:
        numbers = {f.name: getattr(row, f.name) for f in fields(row) if f.name != "layout"}
        return json.dumps(numbers | dict(row.layout))

    kinds = [
        f'    "{kind}": [' + ",".join(f"\n      {line(row)}" for row in rows) + ("\n    ]" if rows else "]")
        for kind, rows in table.rows.items()
    ]
    about = ",\n".join(f'  "{name}": {json.dumps(getattr(table, name))}' for name in ("card", "capability"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + about + ',\n  "rows": {\n' + ",\n".join(kinds) + "\n  }\n}\n")
