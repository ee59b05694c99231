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
