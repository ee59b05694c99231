"""The benchmark of the server at full speed: what it asks for, and a small run of all of it."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import speed
from nanovllm.llm import EMBEDDED_MODEL


def test_lengths_have_the_mean_that_they_are_said_to_have() -> None:
    draw = random.Random(0)
    lengths = [speed.length(draw, speed.MEAN_OUTPUT, 10**6) for _ in range(20_000)]
    assert abs(sum(lengths) / len(lengths) / speed.MEAN_OUTPUT - 1) < 0.02
    assert max(speed.length(draw, 1000, 50) for _ in range(100)) == 50


def measured(*rows: tuple[str, float, float], device: str = "cpu", commit: str = "a") -> dict[str, Any]:
    common = {"machine": {"device": device}, "workload": "some"}
    gaps = {"gap_ms": {"p50": 1.0, "p99": 2.0}}
    return common | {
        "rows": [{"server": s, "rate": r, "tokens_per_second": t, "commit": commit, **gaps} for s, r, t in rows]
    }


def test_parts_that_were_measured_apart_become_one_result(tmp_path: Path) -> None:
    file = tmp_path / "before.json"
    before = ("vLLM, 1 API", 8, 1.0), ("nanovllm, 1 API", 16, 4.0), ("nanovllm, 1 API", 8, 2.0)
    file.write_text(json.dumps(measured(*before)))
    again = speed.with_others(measured(("nanovllm, 1 API", 8, 3.0)), file)["rows"]
    assert [(row["server"], row["rate"], row["tokens_per_second"]) for row in again] == [
        ("nanovllm, 1 API", 8, 3.0),
        ("nanovllm, 1 API", 16, 4.0),
        ("vLLM, 1 API", 8, 1.0),
    ]
    other = measured(("nanovllm, 1 API", 8, 3.0), device="H200")
    assert len(speed.with_others(other, file)["rows"]) == 1, "of another card"
    assert len(speed.with_others(other, tmp_path / "none.json")["rows"]) == 1


def test_the_readme_has_the_rival_at_its_best() -> None:
    rate = speed.README_RATE
    rows = [("vLLM, 1 API", rate, 100.0), ("vLLM, 4 API", rate, 80.0), ("vLLM, 4 API", rate + 1, 900.0)]
    ours = [("nanovllm, 1 API", rate, 150.0), ("nanovllm, 4 API", rate, 400.0)]
    assert speed.short_row(measured(*rows, *ours))[1:] == ["150", "100", "1.50×"]
    assert speed.short_row(measured(*ours)) == [] == speed.short_row(measured(*rows))
    apart = measured(*rows)
    apart["rows"] += measured(*ours, commit="b")["rows"]
    assert speed.short_row(apart) == [], "a ratio is of one call"


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    result = measured(("vLLM, 1 API", 8, 1.0), ("nanovllm, 4 API", 16, 4.0), ("nanovllm, 4 API", 8, 2.0))
    for name in "first.png", "again.png":
        speed.draw(result, tmp_path / name)
    drawn = (tmp_path / "first.png").read_bytes()
    assert drawn.startswith(b"\x89PNG") and drawn == (tmp_path / "again.png").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="several API processes")
def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every request gets its whole answer, and the table says what was measured."""
    monkeypatch.setattr(speed, "CLIENTS", 2)
    monkeypatch.setattr(speed, "MEAN_PROMPT", 8)
    monkeypatch.setattr(speed, "MEAN_OUTPUT", 10)
    arguments = ["--model", str(EMBEDDED_MODEL), "--device", "cpu", "--rates", "3", "--seconds", "2", "--api-servers"]
    speed.main([*arguments, "2", "--out", str(tmp_path)])
    result: dict[str, Any] = json.loads((tmp_path / "serving_speed.json").read_text())
    [row] = result["rows"]
    assert row["server"] == "nanovllm, 2 API" and 0 < row["finished"] == row["requests"]
    assert 0 < row["first_token_ms"]["p50"] <= row["first_token_ms"]["p99"] and row["tokens_per_second"] > 1
    shown = "\n".join(speed.table({"serving_speed": result}))
    assert f"{row['tokens_per_second']:,.0f}" in shown and "0 requests got no whole answer" in shown
