"""The table of `benchmarks/prefill_gluon.py`: TFLOP/s of prefill attention, by variant and problem."""

import json
from pathlib import Path
from statistics import median

from benchmarks import wording


def table(card: str, directory: Path) -> list[str]:
    """A row for each variant, a column for each problem that several of them solved; nothing without a record."""
    path = directory / f"prefill_gluon.{card}.json"
    if not path.is_file():
        return []
    result = json.loads(path.read_text(encoding="utf-8"))
    rates: dict[tuple[str, int], dict[str, float]] = {}  # of each problem, by variant
    rounds = 0
    for row in result["rows"]:
        if "tflop_per_second" in row:
            rates.setdefault((row["problem"], row["block_size"]), {})[row["variant"]] = median(row["tflop_per_second"])
            rounds = len(row["tflop_per_second"])
    compared = {f"{name}, blocks of {size}": found for (name, size), found in rates.items() if len(found) > 2}
    names = list(dict.fromkeys(name for found in compared.values() for name in found))
    lines = [f"| TFLOP/s | {' | '.join(compared)} |", "|---|" + "--:|" * len(compared)]
    for name in names:
        cells = [f"{found[name]:.0f}" if name in found else "–" for found in compared.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    versions = ", ".join(f"{n} {result['versions'][n]}" for n in ("torch", "triton"))
    where = f"{result['card']}, {versions}; commit {wording.commit(result)}; medians of {rounds} rounds"
    return [*lines, "", f"16 query heads, 8 KV heads, head_dim 128, bf16. Measured on {where}."]
