"""The table of `benchmarks/engine/decode_step.py`: what was tried on a recorded decode step, and what it changed."""

import json
from pathlib import Path
from statistics import median

from benchmarks.lib import wording


def table(card: str, directory: Path, name: str = "decode_step") -> list[str]:
    """A row for each idea, a column for each batch: milliseconds of the engine as it is, then the change that an idea
    makes; nothing without a record."""
    path = directory / f"{name}.{card}.json"
    if not path.is_file():
        return []
    result = json.loads(path.read_text(encoding="utf-8"))
    times = {(r["variant"], r["batch"], r["context"]): median(r["milliseconds"]) for r in result["rows"]}
    names = list(dict.fromkeys(name for name, _, _ in times))
    sizes = list(dict.fromkeys((batch, context) for _, batch, context in times))
    lines = [f"| idea | {' | '.join(f'batch {batch} at {context}' for batch, context in sizes)} |"]
    lines.append("|---|" + "--:|" * len(sizes))
    usual = [times[names[0], *size] for size in sizes]
    lines.append(f"| {names[0]} | {' | '.join(f'{ms:.3f} ms' for ms in usual)} |")
    for name in names[1:]:
        changes = [f"{100 * (times[name, *size] / ms - 1):+.1f}%" for size, ms in zip(sizes, usual, strict=True)]
        lines.append(f"| {name} | {' | '.join(changes)} |")
    machine, rounds = result["machine"], len(result["rows"][0]["milliseconds"])
    versions = ", ".join(f"{n} {machine[n]}" for n in ("torch", "triton") if n in machine)
    where = f"{machine['device']}, {versions}; commit {wording.commit(result)}; medians of {rounds} rounds"
    return [*lines, "", f"A step of the shape of Qwen3-0.6B, by batch and context. Measured on {where}."]
