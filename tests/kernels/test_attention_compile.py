"""The kernels compile for GPUs that this machine does not have, and their tiles fit into these GPUs' shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm.kernels.attention.paged_decode import decode_config

ROOT = Path(__file__).parents[2]
PROGRAM_LIMIT = {86: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}  # shared memory that a program may have
HOPPER_SM = 228 * 1024  # what the programs of one multiprocessor share


def compile_attention(*args: str) -> dict[str, dict[str, int]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_attention", *args]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_fit(found: dict[str, dict[str, int]]) -> None:
    for case, kernels in found.items():
        capability, dtype, head_dim = case.split(", ")[:3]
        for kernel, shared in kernels.items():
            assert shared <= PROGRAM_LIMIT[int(capability)], f"{kernel} for {case} needs {shared} bytes"
        programs = decode_config(int(head_dim), 4 if dtype == "fp32" else 2).programs_per_sm
        if capability == "90":  # each program then also has 1 KiB for the system
            assert programs * (kernels["decode"] + 1024) <= HOPPER_SM, f"decode for {case}"


def test_hopper() -> None:
    check_fit(compile_attention("90", "bf16", "128", "2", "256"))


def test_two_prefills_fit_on_a_hopper_multiprocessor() -> None:
    """A thread may spill a little: what it keeps for the end while tiles come by TMA, more for groups like 5."""
    for case, used in compile_attention("--prefill", "90", "bf16", "64,128", "2,5", "256").items():
        assert 2 * (used["shared"] + 1024) <= HOPPER_SM, f"{case}: {used}"
        assert 2 * 256 * used["registers"] <= 64 * 1024, f"{case}: {used}"
        assert used["stack"] <= 128, f"{case}: {used}"


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["86", "90", "120"])
def test_every_shape(capability: str) -> None:
    check_fit(compile_attention(capability, "bf16,fp32", "64,128,256", "3", "16"))
