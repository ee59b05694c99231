"""The table of cards: which kernel and which layout a GPU gets. `cards.toml` says how its rows are read.

`make tune` writes rows for the card at hand into a file of the user's, and these come first: see `user_file`.
"""

import logging
import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanovllm.kernels.launch import capability

logger = logging.getLogger(__name__)

TABLE = Path(__file__).with_name("cards.toml")
LAYERS = ("plain", "gated", "partial")
CONDITIONS = {
    "linear": ("tokens", "kib", "hidden", "shared_kib"),
    "fp8": ("tokens", "kib"),
    "experts": ("tokens", "per_expert", "itemsize"),
    "decode": ("head_dim", "itemsize"),
    "prefill": ("head_dim", "itemsize", "block_size"),
}
# What a row gives: in `linear` by its kernel, else by the section. Those with a question mark may be left out
GIVES = {
    "library": "",
    "skinny": "",
    "tiled": "columns inner num_stages swapped",
    "weight_prefetch": "most handful? cuts? num_stages?",
    "fp8": "columns inner num_stages swapped programs",
    "experts": "pairs columns inner_bytes num_warps num_stages tma?",
    "decode": "tile_kib num_warps num_stages programs_per_sm",
    "prefill": "rows tile_kib num_warps num_stages tma? max_registers?",
}
SWITCHES = ("swapped", "tma", "handful", "cuts")
ANY_INTEGER = ("num_stages", "programs_per_sm", "max_registers")  # the others are powers of two


class Row(NamedTuple):
    """cards: compute capabilities, all if empty. layer: any if None. when: least and most of each condition."""

    cards: list[str]
    layer: str | None
    when: dict[str, tuple[float, float]]
    gives: dict[str, Any]


def choose(
    device: torch.device, section: str, layer: str | None = None, *, without: str | None = None, **numbers: float
) -> dict[str, Any]:
    """What the first row that fits gives.

    without: a kernel whose rows do not count. numbers: all conditions of the section. Where `device` is no GPU, only
    rows for every card count. Raises ValueError if the user's file is wrong.
    """
    return first_fit(rows_of(device)[section], layer, without=without, **numbers)


def first_fit(rows: list[Row], layer: str | None, *, without: str | None = None, **numbers: float) -> dict[str, Any]:
    return next(
        row.gives
        for row in rows
        if row.layer in (None, layer)
        and all(least <= numbers[name] <= most for name, (least, most) in row.when.items())
        and (without is None or row.gives.get("kernel") != without)
    )


@cache
def rows_of(device: torch.device) -> dict[str, list[Row]]:
    """The rows for a device by section, the user's first."""
    card = capability(device)
    own = {} if card is None else rows_for(card, user_file(card))
    return {section: own.get(section, []) + rows for section, rows in rows_for(card).items()}


def rows_for(card: tuple[int, int] | None, path: Path = TABLE) -> dict[str, list[Row]]:
    """The rows of a file for a compute capability; None: for what is no GPU."""
    names = set() if card is None else {f"{card[0]}", f"{card[0]}.{card[1]}"}
    return {
        section: [row for row in rows if not row.cards or names.intersection(row.cards)]
        for section, rows in read_rows(path).items()
    }


def user_file(card: tuple[int, int]) -> Path:
    """Where `make tune` writes the rows for cards of this compute capability, and where the engine looks for them."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches, "nanovllm", "tuning", f"{card[0]}.{card[1]}.toml")


def read_rows(path: Path) -> dict[str, list[Row]]:
    """Rows by section, none if there is no such file. Raises ValueError for a file that is no table."""
    try:
        sections = tomllib.loads(path.read_text("utf-8"))
        found = {section: parse_rows(section, rows) for section, rows in sections.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is no table of kernels: {error}; write it anew with `make tune`, or delete it"
        ) from None
    if path != TABLE:
        logger.info("the rows of %s come first where a kernel is chosen", path)
    return found


def parse_rows(section: str, rows: Any) -> list[Row]:
    if section not in CONDITIONS or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"it may have lists of rows called {', '.join(CONDITIONS)}, but has {section!r} with {rows!r}")
    return [parse_row(section, row) for row in rows]


def parse_row(section: str, row: dict[str, Any]) -> Row:
    """Raises ValueError for what is unknown, missing or of another kind."""
    kernel = row.get("kernel") if section == "linear" else section
    if kernel not in (*GIVES,) or (section == "linear" and kernel in CONDITIONS):
        raise ValueError(f"there is no kernel {kernel!r}, in {section} {row}")
    given = GIVES[kernel].split()
    conditions = "cards", "layer", "kernel", *CONDITIONS[section]
    needed, known = {n for n in given if "?" not in n}, {n.rstrip("?") for n in given}
    if wrong := (needed - row.keys()) | (row.keys() - known - set(conditions)):
        raise ValueError(f"{', '.join(sorted(wrong))} missing or unknown, in {section} {row}")
    for name, value in row.items():
        if not is_valid(name, value, is_condition=name in CONDITIONS[section]):
            raise ValueError(f"{name} cannot be {value!r}, in {section} {row}")
    when = {name: tuple(row[name]) for name in CONDITIONS[section] if name in row}
    return Row(
        row.get("cards", []), row.get("layer"), when, {k: v for k, v in row.items() if k in known or k == "kernel"}
    )


def is_valid(name: str, value: Any, *, is_condition: bool) -> bool:
    if is_condition:
        return isinstance(value, list) and len(value) == 2 and all(type(v) in (int, float) for v in value)
    if name == "cards":
        return isinstance(value, list) and all(isinstance(card, str) for card in value)
    if name in ("layer", "kernel"):
        return value in (LAYERS if name == "layer" else (*GIVES,))
    if name in SWITCHES:
        return isinstance(value, bool)
    is_number = type(value) is int and value >= (0 if name == "tile_kib" else 1)
    return is_number and (name in ANY_INTEGER or value & (value - 1) == 0)
