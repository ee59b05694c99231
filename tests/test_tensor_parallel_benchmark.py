"""The benchmark of several ranks: its arithmetic and tables, and a quick run on a CPU. Times are never judged here."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine import LARGE_SHAPE as SHAPE
from benchmarks.engine import tensor_parallel
from benchmarks.engine.__main__ import parse
from benchmarks.engine.tensor_parallel import FULL, name_of, of_steps
from benchmarks.lib import harness, report
from nanovllm.simulate.needs import read_architecture
from tests.stages.ranks import Threads

STEPS = {("nanovllm", 1): 5.0, ("nanovllm", 2): 3.0, ("vLLM", 1): 6.0, ("vLLM", 2): 4.0}  # ms at batch 1
RATE = 3e12  # bytes a second


def table_of(ranks: int) -> dict[str, Any]:
    rows = [{"bytes": size, "NCCL": 10.0 + size / 2**12, "one-shot": 5.0} for size in tensor_parallel.SIZES]
    return {"ranks": ranks, "rows": rows, "bytes_per_second": RATE, "failures": {}, "one_shot_bytes": 8192}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """As if it had been measured on a GPU."""
    options = parse("tensor_parallel --quick --device cpu --out unused --vllm-path somewhere".split())
    options.model = SHAPE
    facts = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.11.0", "transformers": "5.17.0", "threads": 1}
    comparison = harness.Comparison(of_steps(options, [1, 2], FULL, [table_of(2)]), options)
    comparison.machine = facts
    for (package, ranks), ms in STEPS.items():
        scenarios = {f"batch {b}": {"ms_per_token": ms + 0.01 * b, "first_token_ms": 9.0} for b in FULL["batches"]}
        record = {"round": 0, "contender": name_of(package, ranks), "pid": 1, "scenarios": scenarios}
        comparison.records.append(record)
    return comparison.result()


def test_everybody_is_compared_and_vllm_is_the_rival(result: dict[str, Any]) -> None:
    names = {name_of(package, ranks) for package, ranks in STEPS}
    assert (
        names
        == set(result["figures"][0]["values"])
        == {"nanovllm, 1 rank", "nanovllm, 2 ranks", "vLLM, 1 rank", "vLLM, 2 ranks"}
    )
    assert (result["contender"], result["rival"]) == ("nanovllm, 2 ranks", "vLLM, 2 ranks")
    assert harness.headline_gain(result) == pytest.approx(4.01 / 3.01)


def test_where_a_step_goes_adds_up(result: dict[str, Any]) -> None:
    """The 8B shape by hand: 36 layers of 192.9M numbers and a head of 622.3M, in bfloat16; 16 key/value heads' worth of
    keys and values in a layer; 73 all-reduces of 8 KiB for each sequence."""
    assert read_architecture(SHAPE)[0].num_all_reduces == 73
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288
    weights_ms = 1e3 * 2 * (36 * layer + 4096 * 151936) / RATE
    keys_ms = 1e3 * (128 + 257 / 2) * 36 * 2 * 8 * 128 * 2 / RATE
    found = {(where["ranks"], where["batch"]): where for where in result["where"]}
    assert found.keys() == {(1, 1), (2, 1), (1, 32), (2, 32)}
    for (ranks, batch), where in found.items():
        assert where["weights"] == pytest.approx(weights_ms / ranks, rel=1e-3)
        assert where["keys"] == pytest.approx(batch * keys_ms / ranks)
        assert sum(where.get(part, 0) for part in ("weights", "keys", "all-reduces", "rest")) == pytest.approx(
            where["step"]
        )
    assert "all-reduces" not in found[1, 1]
    assert found[2, 1]["all-reduces"] == pytest.approx(73 * 5e-3)  # 8 KiB: one-shot in this run
    assert found[2, 32]["all-reduces"] == pytest.approx(73 * 74e-3)


def test_the_tables_say_what_was_measured(result: dict[str, Any], tmp_path: Path) -> None:
    assert report.table("tensor_parallel.h100", tmp_path) == ""
    harness.write_result(result, tmp_path)
    lines = report.table("tensor_parallel.h100", tmp_path).splitlines()
    assert "| 2 | 1 | 3.01 | 4.01 | 0.75 | 1.66× |" in lines
    assert "| all-reduce of (KiB) | NCCL, 2 ranks (us) | one-shot, 2 ranks (us) |" in lines
    assert "| 8 | 12.0 | 5.00 |" in lines
    assert any(line.startswith("| 2 | 32 | 3.32 |") for line in lines) and "Measured on NVIDIA H100" in lines[-1]


def test_a_wrong_sum_is_no_measurement() -> None:
    """Each way is checked before it is timed."""

    class Deaf(Threads):
        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            self.all_gather(x)
            return x

    part = partial(tensor_parallel.measure_rows, "gloo", [64])
    [[row], _] = Threads.run(2, part)
    assert row["bytes"] == 64 and row["gloo"] > 0
    with pytest.raises(RuntimeError, match="gloo gave a wrong sum of 64 bytes"):
        Deaf.run(2, part)


@pytest.mark.slow
def test_a_quick_run_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, *"-m benchmarks.engine tensor_parallel --quick --device cpu --repeats 1".split()]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=harness.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = json.loads((tmp_path / "tensor_parallel.json").read_text())
    assert {"nanovllm, 1 rank", "nanovllm, 2 ranks"} <= measured["figures"][0]["values"].keys()
    [latencies] = measured["all_reduce"]
    assert latencies["ranks"] == 2 and all(row["gloo"] > 0 for row in latencies["rows"]) and not latencies["failures"]
    assert measured["where"] == [] and str(harness.ROOT) not in json.dumps(measured)
    assert "| 2 | 1 |" in report.table("tensor_parallel", tmp_path)
