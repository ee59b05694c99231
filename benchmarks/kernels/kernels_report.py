"""The table of `benchmarks/kernels/kernels.py`: attention by our kernels and by flash-attn, beside what the card can
do."""

import json
from pathlib import Path
from typing import Any

from benchmarks.lib import wording

NAMES = {"triton": "ours", "flash_attn": "flash-attn"}


def table(card: str, directory: Path) -> list[str]:
    """A row for each problem; nothing without a record."""
    path = directory / f"kernels.{card}.json"
    if not path.is_file():
        return []
    result = json.loads(path.read_text(encoding="utf-8"))
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}  # by problem and size of a block, then by kernel
    for row in result["rows"]:
        if row["kernel"] in NAMES and "microseconds" in row:
            found.setdefault((row["problem"], row["block_size"]), {})[row["kernel"]] = row
    columns = [f"{name} {of}" for name in NAMES.values() for of in ("(us)", "of the limit")]
    lines = [f"| attention of a layer | blocks of | {' | '.join(columns)} |", "|---|" + "--:|" * (1 + len(columns))]
    for (problem, block_size), rows in found.items():
        cells = [text for kernel in NAMES for text in cells_of(rows.get(kernel))]
        lines.append(f"| {problem} | {block_size} | {' | '.join(cells)} |")
    limits, versions = result["limits"], ", ".join(f"{n} {result['versions'][n]}" for n in ("torch", "triton"))
    read, multiplied = limits["read"]["bytes_per_second"] / 1e9, limits["matmul"]["operations_per_second"] / 1e12
    return [
        *lines,
        "",
        f"16 query heads, 8 KV heads, head_dim 128, bf16. The limit is {read:,.0f} GB/s for decodes and "
        f"{multiplied:.0f} TFLOP/s for the others. Measured on {result['card']}, {versions}; commit "
        f"{wording.commit(result)}.",
    ]


def cells_of(row: dict[str, Any] | None) -> tuple[str, str]:
    if row is None:
        return "–", "–"
    decodes = row["problem"].startswith("decode")
    rate = f"{row['gb_per_second']:,.0f} GB/s" if decodes else f"{row['tflop_per_second']:.0f} TFLOP/s"
    return f"{row['microseconds']:.1f}", f"{rate}, {100 * row['share_of_limit']:.0f}%"
