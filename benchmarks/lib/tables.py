"""How a result is put into words and tables, the same in the terminal, the README and the docs.

A result is what `harness.Comparison` has written. What was not measured yet has no table.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stages.manifest import load_stages

MOST_COLUMNS = 8
NO_UNITS = ("", "yes/no")  # of counts, and of what is true or false
LOSS = 0.97  # a gain below this is called a loss; closer to 1 it is noise

Result = dict[str, Any]


def load(name: str, directory: Path) -> Result:
    """A result. Raises ValueError if it was not measured yet."""
    path = directory / f"{name}.json"
    if not path.is_file():
        raise ValueError(f"a table asks for {name!r}, and there is no {name}.json: run the benchmark that writes it")
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    return result


def find(names: tuple[str, ...], card: str, directory: Path) -> dict[str, Result]:
    """By name, those of these results that exist. `card`: as in the names of the files, empty for a CPU."""
    files = {name: ".".join(filter(None, (name, card))) for name in names}
    return {name: load(file, directory) for name, file in files.items() if (directory / f"{file}.json").is_file()}


def gain(figure: dict[str, Any], contender: str, rival: str) -> float:
    """How many times better `contender` is than `rival` by their medians; below 1 it loses."""
    mine, other = figure["values"][contender]["median"], figure["values"][rival]["median"]
    ratio: float = mine / other if figure["better"] == "higher" else other / mine
    return ratio


def contenders(result: Result) -> list[str]:
    """Their names, in the order in which the first round had them."""
    return list(dict.fromkeys(record["contender"] for record in result["rounds"]))


def figures(result: Result) -> dict[str, Any]:
    """The figures of a result by key."""
    return {figure["key"]: figure for figure in result["figures"]}


def rivals(results: Iterable[Result]) -> list[str]:
    """The engines other than ours that took part, with their versions: ["vllm 0.25.1"]."""
    return sorted({e["engine"] for r in results for e in r.get("engines", {}).values()} - {"nanovllm"})


def num_rounds(result: Result) -> int:
    return len({record["round"] for record in result["rounds"]})


# --- words ------------------------------------------------------------------------------------------------------------


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
    return text if unit in NO_UNITS else f"{text}{'' if unit == '%' else ' '}{unit}"


def label(figure: dict[str, Any]) -> str:
    """What is measured and in which unit."""
    return figure["label"] + (f" ({figure['unit']})" if figure["unit"] not in NO_UNITS else "")


def contender_titles() -> dict[str, str]:
    """What the stages are called in tables and pictures: "stage 3" -> "stage 3: paged blocks"."""
    names = {}
    for stage in load_stages():
        title = stage.title if stage.title[:2].isupper() else stage.title[0].lower() + stage.title[1:]
        names[f"stage {stage.number}"] = f"stage {stage.number}: {title}"
    return names


def losses(result: Result) -> list[str]:
    """One sentence for each figure in which the contender is worse than its rival. Counts are no contest."""
    contender, rival = result["contender"], result["rival"]
    lines = []
    for figure in result["figures"]:
        measured_in_both = {contender, rival} <= figure["values"].keys()
        if measured_in_both and figure["unit"] not in NO_UNITS and (better := gain(figure, contender, rival)) < LOSS:
            lines.append(f"{contender} loses {100 * (1 - better):.0f}% against {rival} in: {figure['label']}")
    return lines


def same_tokens(result: Result) -> list[str]:
    """Whether greedy decoding gave everybody the same tokens, and who differs where; nothing if nobody looked."""
    if not any("tokens_digest" in m for record in result["rounds"] for m in record["scenarios"].values()):
        return []
    if not result["differing_tokens"]:
        return ["all contenders generated the same tokens"]
    return [f"other tokens than the rest in '{s}': {', '.join(who)}" for s, who in result["differing_tokens"].items()]


def clock(result: Result) -> str:
    """Which clock the times are from, and how much of a core there was."""
    if result["machine"]["clock"] == "wall":
        return "times are wall-clock times"
    measured = [m for record in result["rounds"] for m in record["scenarios"].values()]
    share = sum(m["seconds"] for m in measured) / sum(m["wall_seconds"] for m in measured)
    return f"times are CPU time of the one thread, which had a core for {100 * share:.0f}% of the wall-clock time"


def commit(result: Result) -> str:
    """Which code was measured."""
    return result["commit"]["hash"] + (" with changes" if result["commit"]["modified"] else "")


def commits(results: Iterable[Result]) -> str:
    names = list(dict.fromkeys(map(commit, results)))
    return f"commit{'s' if len(names) > 1 else ''} {', '.join(names)}"


def versions(result: Result, *names: str) -> str:
    facts = result["machine"]
    return ", ".join(f"{name} {facts[name]}" for name in names if name in facts)


def machine(result: Result) -> str:
    """Where and with what a showcase of the stages was measured."""
    facts = result["machine"]
    where = facts["device"] if facts["device"] != "cpu" else facts["processor"]
    threads = "1 thread" if facts["threads"] == 1 else f"{facts['threads']} threads"
    return (
        f"{where}, {threads}, {versions(result, 'torch', 'transformers')}, "
        f"{result['model']['name']}, median of {num_rounds(result)} rounds"
    )


def origin(results: dict[str, Result]) -> str:
    """Where, with what, from which code and in how many rounds the engine was measured."""
    first = next(iter(results.values()))
    facts = first["machine"]
    where = facts["device"] if facts["device"] != "cpu" else f"{facts['processor']}, {facts['threads']} thread"
    parts = [where, versions(first, "torch", "triton", "transformers"), *rivals(results.values())]
    rounds = ", ".join(f"{name} {num_rounds(result)}" for name, result in results.items())
    models = dict.fromkeys(r["model"]["name"] for r in results.values())
    weights = "random weights of this shape" if facts["device"] != "cpu" else "float32"
    return (
        f"Measured on {', '.join(parts)}; {', '.join(models)} ({weights}); "
        f"{commits(results.values())}. Medians, with the spread over all rounds "
        f"({rounds})."
    )


def remarks(result: Result) -> list[str]:
    """Below the table: the gain, where the contender loses, whose tokens differ, what was measured where and how."""
    figure = figures(result)[result["headline"]]
    contender, rival = result["contender"], result["rival"]
    lines = []
    if contender != rival and {contender, rival} <= figure["values"].keys():
        ratio = gain(figure, contender, rival)
        better = f"{number(ratio, 'times')} times" if ratio > 1 else "not"
        lines = [f"{figure['label']}: {contender} is {better} better than {rival}", *losses(result)]
    where = f"{machine(result)}, commit {commit(result)}"
    return [*lines, *same_tokens(result), *result["notes"], clock(result), where]


# --- tables -----------------------------------------------------------------------------------------------------------


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def head(*cells: str, left: int = 1) -> list[str]:
    """The first two lines of a table. The columns are aligned to the right, but for the first `left`."""
    return [row(*cells), "|" + "---|" * left + "--:|" * (len(cells) - left)]


def cell(figure: dict[str, Any], contender: str, spread: str = "{} ({} to {})") -> str:
    """The median, and the spread where there is one."""
    value = figure["values"].get(contender)
    if value is None:
        return "–"
    middle, low, high = (number(value[k], figure["unit"]) for k in ("median", "min", "max"))
    return middle if low == high else spread.format(middle, low, high)


def ratio(figure: dict[str, Any], contender: str, rival: str) -> str:
    if not {contender, rival} <= figure["values"].keys():
        return "–"
    return f"{number(gain(figure, contender, rival), 'times')}×"


def whole(result: Result) -> list[str]:
    """Every figure of every contender, and the workload: a row for each figure, or for each of many contenders."""
    names, figures = contenders(result), result["figures"]
    if len(names) > MOST_COLUMNS:
        lines = head(result["title"], *map(label, figures))
        lines += [row(name, *(cell(figure, name) for figure in figures)) for name in names]
    else:
        lines = head(result["title"], *names)
        lines += [row(label(figure), *(cell(figure, name) for name in names)) for figure in figures]
    return [*lines, "", f"Workload: {result['workload']}.", ""]


def of_engine(results: dict[str, Result]) -> list[str]:
    """All that one benchmark of the engine has measured."""
    [result] = results.values()
    return [*whole(result), origin(results)]
