"""The record of the GPU tests, from a report as pytest writes it."""

import json
from pathlib import Path

import pytest

from benchmarks.engine import gpu_tests
from benchmarks.lib import report

REPORT = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" tests="5">
<testcase classname="tests.kernels.test_fused" name="test_norm[bf16-1024]" time="0.5" />
<testcase classname="tests.kernels.test_fused" name="test_norm[float32-1024]" time="0.25"><failure/></testcase>
<testcase classname="tests.kernels.test_flash" name="test_fa[fp16]"><skipped message="no flash-attn"/></testcase>
<testcase classname="tests.engine.test_graphs" name="test_agrees[sync-cuda]" time="1" />
<testcase classname="tests.engine.test_graphs" name="test_plain" time="1"><error/></testcase>
</testsuite></testsuites>"""


def test_precisions_outcomes_and_reasons_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests.xml").write_text(REPORT)
    machine = {"device": "NVIDIA H100 80GB HBM3", "python": "3.12.1", "torch": "2.11.0", "transformers": "5.17.0"}
    monkeypatch.setattr(gpu_tests, "facts", lambda _: machine)
    monkeypatch.setenv("NANOVLLM_COMMIT", "0123456789ab")
    assert gpu_tests.main([str(tmp_path / "tests.xml"), "--out", str(tmp_path)]) == 1
    record = json.loads((tmp_path / "gpu_tests.h100.json").read_text())
    assert record["files"] == {
        "test_fused": {"bf16": {"passed": 1}, "fp32": {"failed": 1}},
        "test_flash": {"fp16": {"skipped": 1}},
        "test_graphs": {"not named": {"passed": 1, "failed": 1}},
    }
    assert record["failed"] == ["test_fused::test_norm[float32-1024]", "test_graphs::test_plain"]
    assert (record["skipped"], record["seconds"]) == ({"no flash-attn": 1}, 2.8)

    table = report.table("gpu_tests.h100", tmp_path)
    assert (
        "| `test_graphs` | – | – | – | 1, 1 failed |\n" in table
        and "| `test_fused` | 1 | – | 0, 1 failed | – |" in table
    )
    assert "2 passed, 2 failed, 1 skipped." in table and "Skipped 1: no flash-attn." in table
    assert "NVIDIA H100 80GB HBM3" in table and "commit 0123456789ab" in table


@pytest.mark.parametrize(("text", "complaint"), [("no xml", "no JUnit report"), ("<testsuites/>", "reports no tests")])
def test_what_is_no_report_is_refused(
    tmp_path: Path, text: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests.xml").write_text(text)
    assert gpu_tests.main([str(tmp_path / "tests.xml"), "--out", str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err and not list(tmp_path.glob("*.json"))
