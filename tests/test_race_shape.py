"""A checkpoint of another shape says what the story model within it says, and the rest of its weights is random."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.lib import workloads
from stages.checkpoint import load_model
from stages.stage_1_naive import attend_to_all
from tools.race import race
from tools.race.shape import recorded_name, story_checkpoint
from tools.race.workload import EMBEDDED_MODEL

SMALL = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 40, "hidden_size": 16, "head_dim": 8,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "hidden_act": "silu",
    "tie_word_embeddings": True, "max_position_embeddings": 64, "dtype": "bfloat16", "eos_token_id": 0,
}  # fmt: skip
LARGE = SMALL | {
    "vocab_size": 70, "hidden_size": 64, "head_dim": 16, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 12, "num_key_value_heads": 3,
    "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
}  # fmt: skip
IDS = torch.tensor([3, 39, 0, 7, 7, 21, 30, 2, 11])  # [T]
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """The checkpoint of a shape like LARGE but for some sizes, with a small story model within."""
    monkeypatch.setattr(workloads, "SHAPES", tmp_path / "shapes")
    monkeypatch.setattr(workloads, "CHECKPOINTS", tmp_path / "checkpoints")
    story, generator = tmp_path / "story", torch.Generator().manual_seed(0)

    def shape(name: str, **sizes: Any) -> Path:
        folder = tmp_path / "shapes" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(LARGE | sizes))
        return story_checkpoint(name, tmp_path / "checkpoints", story)

    def any_weight(old: Tensor) -> Tensor:
        noise = torch.randn(old.shape, generator=generator) * 0.3
        return (noise + 1 if old.dim() == 1 else noise).bfloat16()

    (tmp_path / "shapes" / "small").mkdir(parents=True)
    (tmp_path / "shapes" / "small" / "config.json").write_text(json.dumps(SMALL))
    workloads.random_checkpoint("small", tmp_path).rename(story)
    weights = load_file(story / "model.safetensors")
    save_file({name: any_weight(w) for name, w in weights.items()}, story / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(EMBEDDED_MODEL / name, story / name)
    return shape


def logits(checkpoint: Path) -> Tensor:
    """[T, V], in float32"""
    model = load_model(checkpoint).model
    with torch.inference_mode():
        return model.logits(model(IDS, torch.arange(len(IDS)), attend_to_all))


@pytest.mark.parametrize("tied", [True, False])
def test_the_logits_are_the_story_model_s(tied: bool, make: Make, tmp_path: Path) -> None:
    path = make("large", tie_word_embeddings=tied)
    wanted, found = logits(tmp_path / "story"), logits(path)
    assert wanted.abs().max() > 1
    torch.testing.assert_close(found[:, :40], wanted, rtol=0, atol=1e-5)
    assert not found[:, 40:].any()


def test_it_is_the_shape_and_most_of_it_is_random(make: Make) -> None:
    path = make("large")
    config = load_model(path).config
    assert all(getattr(config, name) == LARGE[name] for name in LARGE if name.startswith("num_") or "size" in name)
    assert config.rms_norm_eps == 1e-6 / 4, "a quarter of the columns are used"
    weights = load_file(path / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    read = [w for name, w in weights.items() if name.endswith(("k_proj.weight", "v_proj.weight", "gate_proj.weight"))]
    assert len(read) == 3 * 3 and all(w.count_nonzero() > 0.99 * w.numel() for w in read)


def test_it_is_made_once_and_called_by_what_it_is(make: Make, tmp_path: Path) -> None:
    path = make("large")
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert story_checkpoint("large", path.parent, tmp_path / "story") == path == race.find_model(Path("large"))
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    assert sorted(p.name for p in path.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert recorded_name(path) == "the story model in large's shape"
    assert recorded_name(tmp_path / "my-story") == "my-story"


def test_two_races_may_make_a_checkpoint_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(of_scratch: Path, target: Path) -> Path:
        shutil.copytree(of_scratch, target)  # the other race was first
        return renamed(of_scratch, target)

    renamed = Path.rename
    monkeypatch.setattr(Path, "rename", rename)
    path = make("large")
    assert sorted(p.name for p in path.parent.iterdir()) == ["large-random", "large-story"]


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"hidden_size": 8}, "hidden_size of large is 8; the story model needs at least 16"),
        ({"num_attention_heads": 3}, "heads_per_kv_head of large is 1; the story model needs at least 2"),
        ({"head_dim": 12}, "head_dim of large is 12, not a multiple of 8"),
        ({"model_type": "llama"}, "the story model is of type qwen3; large is of type llama"),
    ],
)
def test_a_shape_that_is_too_small_is_refused(sizes: dict[str, Any], complaint: str, make: Make) -> None:
    with pytest.raises(ValueError, match=complaint):
        make("large", **sizes)


def test_what_is_neither_directory_nor_shape_is_said_in_one_line(make: Make, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^--model Qwen: there is no such directory.* there are small$"):
        race.main(["--model", "Qwen"])
    with pytest.raises(SystemExit, match=r"there is no tokenizer\.json in it"):
        race.main(["--model", str(tmp_path / "nowhere")])
