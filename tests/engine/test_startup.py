"""What a start logs, and imports without collections of garbage."""

import gc
import logging
import re
import sys
from contextlib import nullcontext

import pytest
import torch

from nanovllm import LLM
from nanovllm.distributed.group import Group
from nanovllm.runner import warm_up
from nanovllm.startup import large_imports, part_of_start


def test_a_start_logs_its_parts(caplog: pytest.LogCaptureFixture) -> None:
    """Each once, in order. What has to do with kernels is logged on a GPU alone."""
    caplog.set_level(logging.DEBUG, "nanovllm.startup")
    with LLM(device="cpu", num_kv_blocks=10, skip_tokenizer_init=True):
        pass
    told = [record.getMessage() for record in caplog.records if record.name == "nanovllm.startup"]
    parts = [re.fullmatch(r"start: (.+) took \d+\.\d\d s", line) for line in told]
    assert [part and part[1] for part in parts] == ["weights", "measuring memory", "recording"]


def test_a_part_that_fails_is_no_part(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "nanovllm.startup")
    with pytest.raises(ZeroDivisionError), part_of_start("nothing"):
        _ = 1 / 0
    assert not caplog.records


def test_large_imports_collect_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there afterwards is left alone, unless the import fails; what a user has chosen stays."""
    monkeypatch.delitem(sys.modules, "torch")
    frozen = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), large_imports():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() and gc.get_freeze_count() == frozen
        with large_imports():
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > frozen + 1000
    finally:
        if not frozen:
            gc.unfreeze()
    gc.disable()
    try:
        with large_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_imports_of_what_is_there_are_no_large_ones() -> None:
    assert "torch" in sys.modules
    with large_imports():
        assert gc.isenabled()


@pytest.mark.parametrize("others", [1, 8])
def test_ranks_rehearse_as_often_as_each_other(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal has collectives. So a rank with many cores does without the first where another has a single core."""
    precompile = pytest.importorskip("nanovllm.kernels.precompile")
    group, rehearsals = Group(0, 2, torch.device("cpu")), list[int]()
    monkeypatch.setattr(group, "smallest", lambda value: min(value, others))
    monkeypatch.setattr(warm_up, "why_no_kernels", lambda device: None)
    monkeypatch.setattr(precompile, "num_processes", lambda num_ranks: 16 // num_ranks)
    monkeypatch.setattr(precompile, "compiled_together", lambda *how: nullcontext(set()))
    warm_up.rehearse(lambda: (None, None), lambda: rehearsals.append(1), [], group)
    assert len(rehearsals) == (1 if others == 1 else 2)
