"""The load test: its arithmetic, and that it runs and finds nothing wrong. Times are never judged here."""

import json
from pathlib import Path

import pytest

from benchmarks.lib import report
from benchmarks.serving import load
from benchmarks.serving.load import Record


def test_percentiles() -> None:
    assert load.percentile([], 0.5) is None
    assert load.percentile([3.0], 0.99) == 3.0
    hundred = [float(i) for i in range(100, 0, -1)]
    assert [load.percentile(hundred, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]


def test_goodput_counts_what_is_finished_and_in_time() -> None:
    good = Record("served", 200, num_tokens=11, first_token=0.1, last_token=0.2, finished=True)
    late = Record("served", 200, num_tokens=11, first_token=2.0, last_token=2.1, finished=True)
    slow = Record("served", 200, num_tokens=11, first_token=0.1, last_token=9.1, finished=True)
    gone = Record("vanishes", 200, num_tokens=3, first_token=0.1, last_token=0.2)
    refused, bad = Record("served", 429), Record("malformed", 400)
    phase = load.summarize(2.0, 10.0, [good, late, slow, gone, refused, bad], slo=(1.0, 0.1))
    assert phase["goodput"] == 0.1 and phase["finished"] == 3 and phase["refused"] == 1
    assert phase["token_ms"]["p50"] == pytest.approx(10.0) and phase["first_token_ms"]["p99"] == pytest.approx(2000)
    assert phase["output_tokens_per_second"] == pytest.approx(33 / 10)
    assert load.row_of(phase) == "| 2 | 6 | 3 | 100 | 2,000 | 10.0 | 900 | 3.30 | 0.10 |"
    nothing = load.summarize(1.0, 1.0, [], slo=(1.0, 0.1))
    assert load.row_of(nothing) == "| 1 | 0 | 0 | – | – | – | – | 0.00 | 0.00 |"


def test_what_is_left_over_is_complained_about() -> None:
    fine, idle = {"memory_mib": 100.0, "threads": 5.0}, {load.KV_USAGE: 0.0}
    records = [Record("served", 200, finished=True), Record("malformed", 400), Record("served", 429)]
    assert load.complaints(records, fine, fine, idle) == []
    assert load.complaints(records, {}, {}, idle) == []  # no /proc
    more = {"memory_mib": 200.0, "threads": 70.0}
    records += [Record("malformed", 500), Record("served", 200)]
    found = load.complaints(records, fine, more, {load.KV_USAGE: 0.5})
    assert [complaint.split()[0] for complaint in found] == ["1", "1", "KV", "memory", "the"]


def test_the_table_has_a_row_for_each_rate_and_says_what_went_wrong(tmp_path: Path) -> None:
    assert report.table("serving", tmp_path) == ""
    recorded = json.loads((load.RESULTS / "serving.json").read_text())
    assert recorded["complaints"] == [] and not recorded["commit"]["modified"]
    nothing = load.summarize(32.0, 30.0, [], slo=(1.0, 0.1))
    result = recorded | {"phases": [*recorded["phases"], nothing], "complaints": ["KV blocks are not free"]}
    (tmp_path / "serving.h100.json").write_text(json.dumps(result))
    lines = report.table("serving.h100", tmp_path).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1 and len(rows) == 2 + len(result["phases"])
    assert float(rows[2][-1]) == pytest.approx(recorded["phases"][0]["goodput"], abs=0.01)
    assert rows[-1] == ["32", "0", "0", "–", "–", "–", "–", "0.00", "0.00"]
    assert any("went wrong: KV blocks are not free" in line for line in lines)


@pytest.mark.parametrize("arguments", [["--seconds", "1000"], ["--rates"]])
def test_a_run_is_bounded(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load.main(arguments)
    assert capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_run_finds_nothing_wrong(tmp_path: Path) -> None:
    out = tmp_path / "serving.json"
    assert load.main(["--quick", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["complaints"] == [] and len(result["phases"]) == 3
    assert all(phase["finished"] > 0 and phase["goodput"] >= 0 for phase in result["phases"])
