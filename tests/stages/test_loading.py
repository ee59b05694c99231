"""The loader: what it must understand, and what it must refuse by name. No engine."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.checkpoint import load_model, read_config, read_eos_token_ids
from stages.model import apply_rope, rope_tables
from stages.stage_1_naive import attend_to_all
from stages.stage_7_tensor_parallel import load_share
from tests import oracle
from tests.stages.ranks import Threads
from tests.weights import lively_qwen3, random_llama, random_qwen2

STORY_MODEL = Path(__file__).parents[2] / "assets" / "story_model"
TOKENS = [3, 141, 59, 26, 5, 358, 97, 9]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def logits(path: Path) -> Tensor:
    """Ours, at every position of TOKENS."""
    model = load_model(path).model
    with torch.inference_mode():
        return model.logits(model(torch.tensor(TOKENS), torch.arange(len(TOKENS)), attend_to_all))


@pytest.fixture
def changed(tmp_path: Path, checkpoints: Path) -> Callable[..., Path]:
    """changed(edit of the tensors, config keys) -> a copy of a lively Qwen3 with these changes. None drops a key."""

    def change(edit: Callable[[dict[str, Tensor]], Any] = lambda tensors: None, **config: Any) -> Path:
        path = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        shutil.copytree(lively_qwen3(checkpoints), path)
        tensors = load_file(path / "model.safetensors")
        edit(tensors)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        raw = json.loads((path / "config.json").read_text()) | config
        (path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
        return path

    return change


@pytest.mark.parametrize("build", [lively_qwen3, random_llama, random_qwen2])
def test_logits_are_hf_s(checkpoints: Path, build: Callable[..., Path]) -> None:
    path = build(checkpoints)
    oracle.check_logits(logits(path), oracle.truth(path).logits(TOKENS))


@pytest.mark.parametrize("build", [lively_qwen3, random_llama])
def test_epsilon_is_used(checkpoints: Path, build: Callable[..., Path]) -> None:
    """Large enough to matter beside activations of about one."""
    path = build(checkpoints, rms_norm_eps=0.1)
    oracle.check_logits(logits(path), oracle.truth(path).logits(TOKENS))


def test_loading_l1_tied_embeddings(changed: Callable[..., Path]) -> None:
    """Tied with the embedding as head in the file, without a head, and with a head alone: the same, also for ranks.
    Untied without one of the two: an error.

    K3: tied with another head in the file is not tied, as in Hugging Face.
    """
    absent = changed(lambda t: t.pop(HEAD), tie_word_embeddings=True)
    present = changed(lambda t: t.update({HEAD: t[EMBEDDING].clone()}), tie_word_embeddings=True)
    alone = changed(lambda t: t.update({HEAD: t.pop(EMBEDDING)}), tie_word_embeddings=True)
    assert torch.equal(logits(absent), logits(present)) and torch.equal(logits(absent), logits(alone))

    def share(group: Any) -> Tensor:
        return load_share(alone, read_config(alone), group).embed_tokens.weight

    parts = Threads.run(2, share)
    assert torch.equal(torch.cat(parts), load_model(alone, dtype=parts[0].dtype).model.embed_tokens.weight)
    oracle.check_logits(logits(absent), oracle.truth(absent).logits(TOKENS))
    other = changed(tie_word_embeddings=True)
    assert not torch.equal(logits(other), logits(absent))
    oracle.check_logits(logits(other), oracle.truth(other).logits(TOKENS))
    with pytest.raises(ValueError, match=r"missing \['lm_head.weight'\]"):
        load_model(changed(lambda t: t.pop(HEAD)))
    with pytest.raises(ValueError, match=r"missing \['embed_tokens.weight'\]"):
        load_model(changed(lambda t: t.pop(EMBEDDING)))


def test_loading_l2_missing_unknown_and_misshapen_tensors_are_all_named(changed: Callable[..., Path]) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
        tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(160, 96)

    with pytest.raises(ValueError) as error:
        load_model(changed(spoil))
    message = str(error.value)
    missing, unexpected = message.split("missing ")[1].split(", unexpected ")
    unexpected, misshapen = unexpected.split(", wrong shape ")
    assert "layers.1.mlp.up_proj.weight" in missing and "norm.weight" in missing and "down_proj" not in missing
    assert "layers.9.mlp.up_proj.weight" in unexpected and "q_proj.bias" in unexpected
    assert "layers.2.mlp.down_proj.weight is (160, 96)" in misshapen and "(96, 160)" in misshapen


def test_loading_l2_shards_and_their_index(tmp_path: Path) -> None:
    """The index decides: strays beside it are not read; a file that it names must be there; a tensor too."""
    path = lively_qwen3(tmp_path, save_in_shards=True)
    expected = logits(path)
    oracle.check_logits(expected, oracle.truth(path).logits(TOKENS))
    save_file({EMBEDDING: torch.zeros(512, 96), "stray": torch.zeros(1)}, path / "model-00000-of-00001.safetensors")
    assert torch.equal(logits(path), expected)
    index_file = path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    del index["weight_map"][EMBEDDING]
    index_file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"missing .*embed_tokens\.weight"):
        load_model(path)
    holder = index["weight_map"][HEAD]
    (path / holder).unlink()
    with pytest.raises(ValueError, match=holder):
        load_model(path)


def test_loading_l2_strays_beside_a_single_file(changed: Callable[..., Path]) -> None:
    path = changed()
    expected = logits(path)
    save_file({EMBEDDING: torch.zeros(512, 96)}, path / "zz_original.safetensors")
    assert torch.equal(logits(path), expected)


def test_loading_l2_not_a_checkpoint(tmp_path: Path, changed: Callable[..., Path]) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty.*config\.json"):
        load_model(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"nowhere.*neither a directory nor a hub id"):
        load_model(tmp_path / "nowhere")
    weightless, cut, garbled = changed(), changed(), changed()
    (weightless / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        load_model(weightless)
    whole = (cut / "model.safetensors").read_bytes()
    for length in (len(whole) - 1000, 100, 3):
        (cut / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="damaged or cut short"):
            load_model(cut)
    (garbled / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_model(garbled)


def test_loading_l2_biases_and_no_head_dim(checkpoints: Path) -> None:
    llama = random_llama(checkpoints, head_dim=None, attention_bias=True, mlp_bias=True)
    assert "head_dim" not in json.loads((llama / "config.json").read_text()) and read_config(llama).head_dim == 16
    for path in (llama, random_qwen2(checkpoints), lively_qwen3(checkpoints, attention_bias=True)):
        oracle.check_logits(logits(path), oracle.truth(path).logits(TOKENS))
        assert any(name.endswith("bias") for name, _ in load_model(path).model.named_parameters())


def test_loading_l3_old_and_new_spelling(checkpoints: Path) -> None:
    """rope_theta + torch_dtype and rope_parameters + dtype are one model; its theta is not the default."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    new, old = (lively_qwen3(checkpoints, rope_parameters=rope, spelling=s) for s in ("new", "old"))
    assert read_config(new) == read_config(old) and read_config(new).rope_theta == 1e6
    assert torch.equal(logits(new), logits(old))
    oracle.check_logits(logits(new), oracle.truth(new).logits(TOKENS))
    assert not torch.equal(logits(new), logits(lively_qwen3(checkpoints)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "scaling 'linear'"),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1e4},
            "scaling 'yarn'",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "scaling 'yarn'"),  # by hand, beside rope_parameters
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}}, "scaling 'llama3'"),
        ({"model_type": "gpt2"}, "'gpt2'.*qwen3"),
        ({"model_type": None}, "None.*qwen3"),
        ({"hidden_size": None, "vocab_size": None}, "lacks vocab_size, hidden_size"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4.*num_key_value_heads 3"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding-window"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"dtype": "float8_e4m3fn"}, "'float8_e4m3fn'"),
    ],
)
def test_loading_l3_what_is_not_supported_is_refused(
    changed: Callable[..., Path], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(changed(**config))


def test_eos_is_the_union_of_generation_config_and_tokenizer(tmp_path: Path) -> None:
    """K1, K2: a generation_config.json without EOS is not corrected by config.json; a tokenizer may add one."""

    def write(name: str, **content: Any) -> None:
        (tmp_path / name).write_text(json.dumps(content))

    write("config.json", eos_token_id=5, model_type="mistral")  # whose class, in each transformers, adds no EOS
    assert read_eos_token_ids(tmp_path) == {5}
    write("generation_config.json", transformers_version="5")
    assert read_eos_token_ids(tmp_path) == set()
    write("generation_config.json", eos_token_id=[2, 3])
    assert read_eos_token_ids(tmp_path) == {2, 3}
    shutil.copy(STORY_MODEL / "tokenizer.json", tmp_path)
    assert read_eos_token_ids(tmp_path) == {2, 3}
    for eos_token, expected in (({"content": "<|endoftext|>", "__type": "AddedToken"}, 0), ("!", 1), (None, None)):
        write("tokenizer_config.json", eos_token=eos_token)
        assert read_eos_token_ids(tmp_path) == {2, 3, expected} - {None}


def test_dtype_is_the_checkpoint_s_on_a_gpu_and_fp32_on_a_cpu(checkpoints: Path) -> None:
    path = lively_qwen3(checkpoints, dtype="bfloat16")
    assert {p.dtype for p in load_model(path).model.parameters()} == {torch.float32}
    assert {p.dtype for p in load_model(path, dtype=torch.bfloat16).model.parameters()} == {torch.bfloat16}


def test_numerics_n1_rope_phases_are_exact_in_a_bf16_model(checkpoints: Path) -> None:
    """At position 4095 a phase in bf16 is wrong by radians: the rotation is compared with one in float64."""
    positions = torch.tensor([0, 1, 255, 257, 4095])
    cos, sin = rope_tables(positions, 64, 1e6)
    angles = positions.double()[:, None] * 1e6 ** -(torch.arange(0, 64, 2).double() / 64)
    torch.testing.assert_close(cos[:, 0].double(), angles.cos(), atol=5e-4, rtol=0)
    torch.testing.assert_close(sin[:, 0].double(), angles.sin(), atol=5e-4, rtol=0)
    seen: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(lively_qwen3(checkpoints, max_position_embeddings=8192), dtype=dtype).model

        def keep(layer: int, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            seen.setdefault(dtype, (q, k))
            return q

        with torch.inference_mode():
            model(torch.tensor([7] * 5), positions, keep)
    for exact, half in zip(seen[torch.float32], seen[torch.bfloat16], strict=True):
        assert (half.float() - exact).abs().max() < 0.03 * exact.abs().max()  # bf16 rounding, not another angle
    x = torch.randn(5, 2, 64, dtype=torch.bfloat16)
    turned = apply_rope(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.float().norm(dim=-1), x.float().norm(dim=-1), rtol=0.01, atol=0)
