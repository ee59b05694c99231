"""Where our kernels in Gluon can run."""

import sys

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from nanovllm.kernels.launch import gluon_kernel, is_hopper


def forget() -> None:
    for known in (gluon_kernel, is_hopper):
        known.cache_clear()


@pytest.mark.parametrize("name", ["early_linear", "ring_decode", "warp_prefill"])
def test_not_without_hopper_or_gluon(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {torch.device("cuda", 0): (9, 0), torch.device("cuda", 1): (8, 0), torch.device("cuda", 2): (10, 0)}
    devices = [*found, torch.device("cpu")]
    monkeypatch.setattr(torch.cuda, "get_device_capability", found.__getitem__)
    forget()
    kernels = [gluon_kernel(name, device) for device in devices]
    assert kernels[0] is not None and kernels[0].__name__ == name and kernels[1:] == [None] * 3
    monkeypatch.delitem(sys.modules, f"nanovllm.kernels.hopper.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)  # an import of it fails
    forget()
    assert [gluon_kernel(name, device) for device in devices] == [None] * 4
    forget()
