"""The table of the kernels' benchmark says what its record says."""

import json
from pathlib import Path
from typing import Any

from benchmarks.lib import report


def row(kernel: str, problem: str, **measured: Any) -> dict[str, Any]:
    return {"kernel": kernel, "problem": problem, "block_size": 256, **measured}


def test_kernels_beside_what_the_card_can_do(tmp_path: Path) -> None:
    assert report.table("kernels.h100", tmp_path) == ""
    rates = {"gb_per_second": 2000.4, "tflop_per_second": 350.4}
    result = {
        "card": "A card",
        "versions": {"torch": "2", "triton": "3", "cuda": "13"},
        "commit": {"hash": "0123456789ab", "modified": False},
        "limits": {"read": {"bytes_per_second": 4e12}, "matmul": {"operations_per_second": 7e14}},
        "rows": [
            row("triton", "decode 8", microseconds=10.04, share_of_limit=0.5001, **rates),
            row("decode", "decode 8", layout=[64, 4, 3, 3], microseconds=9.0, share_of_limit=0.6, **rates),
            row("triton", "chunks", microseconds=300.0, share_of_limit=0.5006, **rates),
            row("flash_attn", "chunks", microseconds=310.0, share_of_limit=0.48, **rates),
            row("flash_attn", "whole prompts", error="there is none"),
        ],
    }
    (tmp_path / "kernels.h100.json").write_text(json.dumps(result))
    lines = report.table("kernels.h100", tmp_path).splitlines()
    assert lines[2:4] == [
        "| decode 8 | 256 | 10.0 | 2,000 GB/s, 50% | – | – |",
        "| chunks | 256 | 300.0 | 350 TFLOP/s, 50% | 310.0 | 350 TFLOP/s, 48% |",
    ]
    assert not lines[4] and "4,000 GB/s" in lines[5] and "700 TFLOP/s" in lines[5] and "A card" in lines[5]


def test_linears_beside_the_library(tmp_path: Path) -> None:
    measured = {
        1: {"library": 9.0, "any GPU": 8.0, "chosen": 7.0, "early 32 x 128 / 2, 4 stages": 6.5},
        16: {"library": 9.0, "any GPU": 8.0, "chosen": 7.0},
        256: {"library": 20.0},  # where the engine takes the library's
    }
    rows = [
        {"shape": "8B", "layer": "o_proj", "tokens": tokens, "layout": layout, "bytes": 1, "microseconds": time}
        for tokens, by_layout in measured.items()
        for layout, time in by_layout.items()
    ]
    result = {"machine": {"device": "A card", "torch": "2"}, "commit": {"hash": "0123456789ab", "modified": False}}
    (tmp_path / "linears.h100.json").write_text(json.dumps({**result, "rows": rows}))
    lines = report.table("linears.h100", tmp_path).splitlines()
    columns = "9.0 / 8.0 / 6.5 | 9.0 / 8.0 / 7.0 | – | – | – | 20.0 / – / –"
    assert lines[2] == f"| 8B: `o_proj` | {columns} |"
