"""Checkpoints of a shape in benchmarks/shapes with random weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.lib import workloads
from stages.checkpoint import load_model


def test_a_random_checkpoint_has_the_shape_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = json.loads((workloads.SHAPES / "Qwen3-0.6B" / "config.json").read_text(encoding="utf-8"))
    small = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 500}
    (tmp_path / "shapes" / "small").mkdir(parents=True)
    (tmp_path / "shapes" / "small" / "config.json").write_text(json.dumps(shape | small))
    monkeypatch.setattr(workloads, "SHAPES", tmp_path / "shapes")
    path = workloads.random_checkpoint("small", tmp_path)
    loaded = load_model(path)
    assert (loaded.config.num_hidden_layers, loaded.config.head_dim) == (1, 128)
    assert {tensor.dtype for tensor in load_file(path / "model.safetensors").values()} == {torch.bfloat16}
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert workloads.random_checkpoint("small", tmp_path) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before

    def rename(of_scratch: Path, target: Path) -> Path:
        shutil.copytree(of_scratch, target)  # another run was first
        return renamed(of_scratch, target)

    renamed, other = Path.rename, tmp_path / "other"
    monkeypatch.setattr(Path, "rename", rename)
    assert workloads.random_checkpoint("small", other) == other / "small-random" == next(other.iterdir())
    assert len(list(other.iterdir())) == 1
    with pytest.raises(ValueError, match=r"no shape 'large'.*there are small"):
        workloads.random_checkpoint("large", tmp_path)
