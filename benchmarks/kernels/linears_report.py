"""The table of `benchmarks/kernels/linears.py`: microseconds of a linear layer, by who computes it."""

import json
from pathlib import Path

from benchmarks.lib import wording

TOKENS = (1, 16, 32, 64, 128, 256)


def table(card: str, directory: Path) -> list[str]:
    """A row for each layer, a column for some numbers of tokens: the library, the best of our kernels that run on any
    GPU ("–": none was asked), and the best of what was then chosen and of other layouts for Hopper. Nothing
    without a record."""
    path = directory / f"linears.{card}.json"
    if not path.is_file():
        return []
    result = json.loads(path.read_text(encoding="utf-8"))
    times: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for row in result["rows"]:
        if "microseconds" in row:
            by_tokens = times.setdefault((row["shape"], row["layer"]), {})
            by_tokens.setdefault(row["tokens"], {})[row["layout"]] = row["microseconds"]
    lines = [f"| layer, by tokens | {' | '.join(map(str, TOKENS))} |"]
    lines.append("|---|" + "--:|" * len(TOKENS))
    for (shape, layer), by_tokens in times.items():
        cells = [cell(by_tokens[n]) if n in by_tokens else "–" for n in TOKENS]
        lines.append(f"| {shape}: `{layer}` | {' | '.join(cells)} |")
    machine = result["machine"]
    where = f"{machine['device']}, torch {machine['torch']}; commit {wording.commit(result)}"
    told = (
        "Microseconds: the library / ours for any GPU / the best of what was then chosen and of the kernel for Hopper"
    )
    return [*lines, "", f"{told}; sums of parts included. Measured on {where}."]


def cell(by_layout: dict[str, float]) -> str:
    of_any = by_layout.get("any GPU")
    best = min(time for layout, time in by_layout.items() if layout.startswith("early ") or layout == "chosen")
    shown = [by_layout["library"], None if of_any == by_layout["library"] else of_any, best]
    return " / ".join("–" if time is None else f"{time:.1f}" for time in shown)
