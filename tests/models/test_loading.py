"""Weights: what the loader must refuse, and what it must put up with (CASES L1, L2)."""

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm.models import loader
from nanovllm.models.loader import load_model
from nanovllm.models.transformer import Transformer
from tests.models.plain_attention import DictAttention
from tests.weights import lively_qwen3, lively_qwen3_moe, random_llama, random_qwen2

IDS = torch.tensor([5, 99, 300, 7])
INDEX = "model.safetensors.index.json"


@torch.inference_mode()
def logits(path: Path, **options: Any) -> Tensor:
    model = load_model(path, **options).model
    return model.logits(model(IDS, torch.arange(4), DictAttention())).float()


@pytest.fixture
def sharded(checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(lively_qwen3(checkpoints, save_in_shards=True), tmp_path / "sharded"))


def test_tied_with_and_without_a_head_in_the_file(checkpoints: Path, edit: Callable[..., Path]) -> None:
    """L1: the same answer, and the head is the embedding."""
    absent = lively_qwen3(checkpoints, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(absent / "model.safetensors")
    present = edit(absent, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(absent), logits(present)) and load_model(present).config.tie_word_embeddings
    untied = edit(absent, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    untied_config = json.loads((untied / "config.json").read_text()) | {"tie_word_embeddings": False}
    (untied / "config.json").write_text(json.dumps(untied_config))
    assert torch.allclose(logits(untied), logits(absent))


def test_untied_without_a_head_is_an_error(checkpoints: Path, edit: Callable[..., Path]) -> None:
    path = edit(lively_qwen3(checkpoints), lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        load_model(path)


def without_prefix(tensors: dict[str, Tensor]) -> None:
    """As `Qwen3Model` saves itself, where `Qwen3ForCausalLM` would put "model." before the names."""
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_a_model_without_its_head(tied: bool, checkpoints: Path, edit: Callable[..., Path]) -> None:
    """The names have no prefix. A head that the file has all the same is used; one that is needed is missed by name."""
    whole = lively_qwen3(checkpoints, tie_word_embeddings=tied)
    assert torch.equal(logits(edit(whole, without_prefix)), logits(whole))
    if not tied:
        path = edit(edit(whole, without_prefix), lambda t: t.pop("lm_head.weight"))
        with pytest.raises(ValueError, match=r"missing: lm_head\.weight; save the model with its head .*ForCausalLM"):
            load_model(path)


def test_two_spellings_of_names_in_one_file_are_unexpected(checkpoints: Path, edit: Callable[..., Path]) -> None:
    path = edit(lively_qwen3(checkpoints), lambda t: t.update({"norm.weight": t["model.norm.weight"].clone()}))
    with pytest.raises(ValueError, match=r"unexpected: norm\.weight"):
        load_model(path)


def test_everything_that_does_not_fit_is_in_one_error(checkpoints: Path, edit: Callable[..., Path]) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.sinks"] = torch.zeros(4)
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(160, 96)
        tensors["model.layers.0.mlp.down_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"].T.contiguous()
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(32, dtype=torch.int8)

    with pytest.raises(ValueError, match="do not fit") as caught:
        load_model(edit(lively_qwen3(checkpoints), spoil))
    message = str(caught.value)
    assert "missing: model.layers.1.self_attn.k_proj.weight, model.norm.weight;" in message
    assert "unexpected: model.layers.0.self_attn.sinks, model.layers.9.mlp.up_proj.weight;" in message
    assert "wrong shape: model.layers.0.mlp.down_proj.weight is [160, 96], not [96, 160];" in message
    assert "wrong dtype: model.layers.0.self_attn.q_norm.weight is I8" in message


def test_of_thousands_that_are_missing_the_first_are_named(checkpoints: Path, edit: Callable[..., Path]) -> None:
    def without_experts(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]

    with pytest.raises(ValueError, match=r"missing: model\.layers\.0\.mlp\.experts\.0.* and 44 more$") as caught:
        load_model(edit(lively_qwen3_moe(checkpoints, num_hidden_layers=6), without_experts))
    assert str(caught.value).count(".experts.") == 100


@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_biases_of_qwen2_are_used_and_needed(part: str, checkpoints: Path, edit: Callable[..., Path]) -> None:
    name, whole = f"model.layers.0.self_attn.{part}_proj.bias", random_qwen2(checkpoints)
    with pytest.raises(ValueError, match=f"missing: {name}"):
        load_model(edit(whole, lambda t: t.pop(name)))
    # A bias on k alone shifts all scores of a query alike but for RoPE, so the change is small; it must be there.
    assert not torch.equal(logits(edit(whole, lambda t: t[name].zero_())), logits(whole))


def test_biases_that_the_config_does_not_mention_are_unexpected(checkpoints: Path, edit: Callable[..., Path]) -> None:
    path = edit(random_llama(checkpoints, attention_bias=True), attention_bias=False)
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.0\.self_attn\.k_proj\.bias"):
        load_model(path)


def test_rotary_buffers_of_old_checkpoints_are_tolerated(checkpoints: Path, edit: Callable[..., Path]) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    path = edit(random_llama(checkpoints), lambda t: t.update({name: torch.ones(8)}))
    assert torch.equal(logits(path), logits(random_llama(checkpoints)))


def test_shards_give_the_same_model(checkpoints: Path, sharded: Path) -> None:
    assert torch.equal(logits(sharded), logits(lively_qwen3(checkpoints)))


def test_files_and_tensors_beside_the_index_are_ignored(checkpoints: Path, sharded: Path) -> None:
    """Another model's file, a broken one, a tensor that the index gives to another shard, and one that it lacks."""
    shutil.copy(lively_qwen3(checkpoints, seed=7) / "model.safetensors", sharded / "consolidated.safetensors")
    (sharded / "half.safetensors").write_bytes(b"\x00" * 5)
    shards = sorted(sharded.glob("model-*.safetensors"))
    for here, there in ((0, -1), (-1, 0)):
        tensors, others = load_file(shards[here]), load_file(shards[there])
        strangers = {name: torch.zeros_like(tensor) for name, tensor in others.items() if name not in tensors}
        unknown = {"model.unknown": torch.zeros(3)}
        save_file(strangers | unknown | tensors, shards[here], metadata={"format": "pt"})
    assert torch.equal(logits(sharded), logits(lively_qwen3(checkpoints)))


def test_missing_shards_are_named(sharded: Path) -> None:
    gone = sorted(sharded.glob("model-*.safetensors"))[1:3]
    for shard in gone:
        shard.unlink()
    with pytest.raises(ValueError, match=f"{gone[0].name}, {gone[1].name}, named by .* is missing"):
        load_model(sharded)


def test_a_tensor_that_the_index_promises_and_the_shard_lacks_is_missing(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[0]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"missing: {name}"):
        load_model(sharded)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{}", "weight_map"),
        ('{"weight_map": {"model.norm.weight": "../other.safetensors"}}', "outside"),
        ('{"weight_map":', "JSON"),
        ("[]", "JSON object"),
    ],
)
def test_an_index_that_makes_no_sense(sharded: Path, index: str, message: str) -> None:
    (sharded / INDEX).write_text(index)
    with pytest.raises(ValueError, match=message):
        load_model(sharded)


@pytest.mark.parametrize("keep", [0, 4, 200, 100_000])
def test_a_truncated_file_is_named(keep: int, checkpoints: Path, edit: Callable[..., Path]) -> None:
    path = edit(lively_qwen3(checkpoints))
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short"):
        load_model(path)


def test_dtype_is_the_one_asked_for_and_float32_on_a_cpu(checkpoints: Path, edit: Callable[..., Path]) -> None:
    half = edit(
        lively_qwen3(checkpoints), lambda t: t.update({k: v.bfloat16() for k, v in t.items()}), dtype="bfloat16"
    )
    assert load_model(half).config.dtype == torch.float32
    loaded = load_model(half, dtype=torch.float16)
    assert loaded.config.dtype == torch.float16
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float16}
    assert torch.equal(logits(half), logits(edit(half, dtype="float16")))  # the files' dtype counts, not the config's


def test_dummy_weights_need_no_files_and_are_always_the_same(checkpoints: Path, edit: Callable[..., Path]) -> None:
    path = edit(lively_qwen3(checkpoints))
    (path / "model.safetensors").unlink()
    first, second = logits(path, load_format="dummy"), logits(path, load_format="dummy")
    assert torch.equal(first, second)
    assert first.isfinite().all() and first.std() > 0


def test_loading_never_holds_a_second_copy_of_the_checkpoint(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor that is read is gone before the next but one is: its memory belongs to no parameter."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    class Spy:
        def __init__(self, reader: Any) -> None:
            self.reader = reader

        def __getattr__(self, name: str) -> Any:
            return getattr(self.reader, name)

        def get_tensor(self, name: str) -> Tensor:
            nonlocal most
            tensor: Tensor = self.reader.get_tensor(name)
            alive.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in alive))
            return tensor

    class Opened:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.inner = safe_open(*args, **options)

        def __enter__(self) -> Spy:
            return Spy(self.inner.__enter__())

        def __exit__(self, *exception: Any) -> None:
            self.inner.__exit__(*exception)

    monkeypatch.setattr(loader, "safe_open", Opened)
    model = load_model(lively_qwen3(checkpoints)).model
    assert isinstance(model, Transformer) and len(alive) > 30
    assert most <= 2
