"""`kernels/hopper/` can be deleted: all the rest imports and works without it. It is used on Hopper GPUs only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from nanovllm.attention.triton_backend import HopperKernels, hopper_kernels
from nanovllm.kernels.launch import capability, is_hopper
from nanovllm.kernels.linear.choice import hopper_linear

ROOT = Path(__file__).parents[2]

WITHOUT = """
import sys, torch
from pathlib import Path

sys.modules["nanovllm.kernels.hopper"] = None  # an import of it fails
root = Path("nanovllm")
for path in sorted(root.rglob("*.py")):
    if not path.is_relative_to(root / "kernels" / "hopper"):
        __import__(".".join(path.with_suffix("").parts).removesuffix(".__init__"))

torch.cuda.get_device_capability = lambda device=None: (9, 0)  # so that a Hopper GPU seems to be there
from nanovllm.attention.triton_backend import HopperKernels, TritonBackend, hopper_kernels
from nanovllm.kernels.linear.choice import choose_linear, hopper_linear
import tests.kernels.interpreter
from tests.kernels.attention_cases import check, make_case

gpu = torch.device("cuda", 0)
assert hopper_kernels(gpu) == HopperKernels() and hopper_linear(gpu) is None
check(TritonBackend(4), make_case([(1, 20), (1, 300), (40, 73), (17, 17)]), 1e-5)

x, weight = torch.randn(20, 128).half(), torch.randn(128, 128).half() / 16
kernel = choose_linear(len(x), weight)
assert kernel.func.__name__ == "tiled_linear"
torch.testing.assert_close(kernel(x, weight), x @ weight.t(), atol=1e-2, rtol=1e-2)
assert not [name for name in sys.modules if name.startswith("nanovllm.kernels.hopper.")]
"""


def test_all_the_rest_imports_and_computes() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]


def forget() -> None:
    for known in (hopper_kernels, hopper_linear, is_hopper, capability):
        known.cache_clear()


def test_not_without_hopper_or_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {torch.device("cuda", 0): (9, 0), torch.device("cuda", 1): (8, 0), torch.device("cuda", 2): (10, 0)}
    devices = [*found, torch.device("cpu")]
    monkeypatch.setattr(torch.cuda, "get_device_capability", found.__getitem__)
    forget()
    attention, linear = [hopper_kernels(device) for device in devices], [hopper_linear(device) for device in devices]
    assert all(module is not None for module in attention[0]) and attention[1:] == [HopperKernels()] * 3
    assert linear[0] is not None and linear[1:] == [None] * 3
    package = sys.modules["nanovllm.kernels.hopper"]
    for name in ("ring_decode", "warp_specialized_prefill", "weight_prefetch_linear"):
        monkeypatch.delitem(sys.modules, f"nanovllm.kernels.hopper.{name}")
        monkeypatch.delattr(package, name)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)  # an import of it fails
    forget()
    assert [hopper_kernels(device) for device in devices] == [HopperKernels()] * 4
    assert [hopper_linear(device) for device in devices] == [None] * 4
    forget()
