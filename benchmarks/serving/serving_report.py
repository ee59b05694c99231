"""The table of the load test, from its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.lib import wording

COLUMNS = ("requests/s", "sent", "finished", "first token (ms)", "p99", "a token (ms)", "p99", "tokens/s", "goodput/s")


def table(card: str, directory: Path) -> list[str]:
    """A row for each rate: medians and 99th percentiles. `card` is empty for the result of a CPU."""
    path = directory / f"{'.'.join(filter(None, ['serving', card]))}.json"
    if not path.is_file():
        return []
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "--:|" * len(COLUMNS)]
    for phase in result["phases"]:
        times = [phase[name][share] for name in ("first_token_ms", "token_ms") for share in ("p50", "p99")]
        shown = ["–" if time is None else wording.number(time, "ms") for time in times]
        rates = [wording.number(phase[name], "1/s") for name in ("output_tokens_per_second", "goodput")]
        counts = [f"{phase['rate']:g}", str(phase["requests"]), str(phase["finished"])]
        lines.append(f"| {' | '.join([*counts, *shown, *rates])} |")
    facts, slo, memory = result["machine"], result["slo"], result["memory_mib"]
    lines += ["", f"Workload: {result['workload']}; each rate for {result['seconds']:g} s, the last one twice."]
    lines.append(
        f"Times are medians and 99th percentiles. Goodput is what finished with its first token within "
        f"{slo['first_token_s']:g} s and {slo['token_s']:g} s a token."
    )
    if memory["before"] is not None:
        grown = memory["after"] - memory["before"]
        lines.append(f"The last round left the server's memory at {memory['after']:.0f} MiB ({grown:+.1f}).")
    lines += [f"It went wrong: {complaint}." for complaint in result["complaints"]]
    where = facts["processor"] if facts["device"] == "cpu" else facts["device"]
    threads = f"{facts['threads']} thread{'s' if facts['threads'] > 1 else ''}"
    measured = [where, threads, f"torch {facts['torch']}; {result['model']['name']}"]
    return [*lines, "", f"Measured on {', '.join(measured)}; commit {wording.commit(result)}."]
