"""The table of what was tried on a decode step."""

import json
from pathlib import Path

from benchmarks.lib import report


def test_ideas_are_shown_by_what_they_change(tmp_path: Path) -> None:
    def row(variant: str, batch: int, *milliseconds: float) -> dict[str, object]:
        return {"variant": variant, "batch": batch, "context": 384, "milliseconds": milliseconds}

    rows = [
        row("as it is", 8, 2, 1, 9),
        row("an idea", 8, 3, 3, 3),
        row("as it is", 32, 4, 4, 4),
        row("an idea", 32, 3, 3, 3),
    ]
    facts = {"machine": {"device": "a card", "torch": "2"}, "commit": {"hash": "abc", "modified": False}, "rows": rows}
    (tmp_path / "decode_step.h200.json").write_text(json.dumps(facts))
    lines = report.table("decode_step.h200", tmp_path).splitlines()
    assert lines[0] == "| idea | batch 8 at 384 | batch 32 at 384 |"
    assert lines[2:4] == ["| as it is | 2.000 ms | 4.000 ms |", "| an idea | +50.0% | -25.0% |"]
    assert "a card, torch 2; commit abc; medians of 3 rounds" in lines[-1]
    assert report.table("decode_step.h100", tmp_path) == ""
