"""How a result is put into words, the same in the terminal, the README and the docs."""

from __future__ import annotations

from typing import Any

from benchmarks.lib.harness import gain
from stages.manifest import load_stages

LOSS = 0.97  # a gain below this is called a loss; closer to 1 it is noise


def number(value: float, unit: str) -> str:
    """Two to three significant digits; yes and no for what is true or false."""
    if unit == "yes/no":
        return "yes" if value else "no"
    if unit == "" and value == int(value):
        return str(int(value))
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def with_unit(value: float, unit: str) -> str:
    text = number(value, unit)
    return text if unit in ("", "yes/no") else f"{text}{'' if unit == '%' else ' '}{unit}"


def label(figure: dict[str, Any]) -> str:
    """What is measured and in which unit."""
    return figure["label"] + (f" ({figure['unit']})" if figure["unit"] not in ("", "yes/no") else "")


def contender_titles() -> dict[str, str]:
    """What the stages are called in tables and pictures: "stage 3" -> "stage 3: paged blocks"."""
    names = {}
    for stage in load_stages():
        title = stage.title if stage.title[:2].isupper() else stage.title[0].lower() + stage.title[1:]
        names[f"stage {stage.number}"] = f"stage {stage.number}: {title}"
    return names


def contenders(result: dict[str, Any]) -> list[str]:
    """Their names, in the order in which the first round had them."""
    return list(dict.fromkeys(record["contender"] for record in result["rounds"]))


def losses(result: dict[str, Any]) -> list[str]:
    """One sentence for each figure in which the contender is worse than its rival. Counts are no contest."""
    contender, rival = result["contender"], result["rival"]
    lines = []
    for figure in result["figures"]:
        measured_in_both = {contender, rival} <= figure["values"].keys()
        if measured_in_both and figure["unit"] not in ("", "yes/no"):
            ratio = gain(figure, contender, rival)
            if ratio < LOSS:
                lines.append(f"{contender} loses {100 * (1 - ratio):.0f}% against {rival} in: {figure['label']}")
    return lines


def same_tokens(result: dict[str, Any]) -> list[str]:
    """Whether greedy decoding gave everybody the same tokens, and who differs where; nothing if nobody looked."""
    if not any("tokens_digest" in m for record in result["rounds"] for m in record["scenarios"].values()):
        return []
    if not result["differing_tokens"]:
        return ["all contenders generated the same tokens"]
    return [f"other tokens than the rest in '{s}': {', '.join(who)}" for s, who in result["differing_tokens"].items()]


def clock(result: dict[str, Any]) -> str:
    """Which clock the times are from, and how much of a core there was."""
    if result["machine"]["clock"] == "wall":
        return "times are wall-clock times"
    measured = [m for record in result["rounds"] for m in record["scenarios"].values()]
    share = sum(m["seconds"] for m in measured) / sum(m["wall_seconds"] for m in measured)
    return f"times are CPU time of the one thread, which had a core for {100 * share:.0f}% of the wall-clock time"


def commit(result: dict[str, Any]) -> str:
    """Which code was measured."""
    return result["commit"]["hash"] + (" with changes" if result["commit"]["modified"] else "")


def machine(result: dict[str, Any]) -> str:
    """Where and with what it was measured."""
    facts = result["machine"]
    where = facts["device"] if facts["device"] != "cpu" else facts["processor"]
    threads = "1 thread" if facts["threads"] == 1 else f"{facts['threads']} threads"
    rounds = len({record["round"] for record in result["rounds"]})
    return (
        f"{where}, {threads}, torch {facts['torch']}, transformers {facts['transformers']}, "
        f"{result['model']['name']}, median of {rounds} rounds"
    )
