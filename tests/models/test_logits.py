"""Our logits are Hugging Face's, for every family, position and way of feeding the tokens (CASES N1, L3)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nanovllm.layers.norm import add_rms_norm, rms_norm
from nanovllm.layers.rope import RotaryEmbedding, apply_rope
from nanovllm.models.loader import LoadedModel, load_model
from tests.models.plain_attention import DictAttention
from tests.weights import lively_qwen3, random_llama, random_qwen2

Build = Callable[..., Path]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
CHECKPOINTS: list[tuple[Build, dict[str, Any]]] = [
    (lively_qwen3, {}),
    (lively_qwen3, {"tie_word_embeddings": True, "save_in_shards": True}),
    (lively_qwen3, {"attention_bias": True, "head_dim": 16}),
    (random_llama, {}),
    (random_llama, {"head_dim": None, "spelling": "old"}),
    (random_llama, {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    (random_llama, {"num_key_value_heads": 6, "rms_norm_eps": 1e-2}),
    (random_llama, {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
    (random_llama, {"rope_parameters": LLAMA3_ROPE}),
    (random_llama, {"rope_parameters": LLAMA3_ROPE, "spelling": "old"}),
    (random_qwen2, {}),
    (random_qwen2, {"tie_word_embeddings": True, "spelling": "old", "save_in_shards": True}),
]
NAMES = [f"{build.__name__} {' '.join(f'{k}={v}' for k, v in over.items())}"[:60] for build, over in CHECKPOINTS]


def tokens(n: int) -> Tensor:
    return torch.randint(0, 512, (n,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def our_logits(loaded: LoadedModel, ids: Tensor, positions: Tensor, attend: DictAttention | None = None) -> Tensor:
    hidden = loaded.model(ids, positions, attend or DictAttention())
    return loaded.model.logits(hidden).float()


@torch.inference_mode()
def hf_logits(path: Path, ids: Tensor, positions: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logits: Tensor = model(ids[None], position_ids=positions[None]).logits[0]
    return logits


def assert_close(ours: Tensor, truth: Tensor) -> None:
    assert (ours - truth).abs().max() <= 1e-4 * max(1.0, truth.abs().max().item())


@pytest.mark.parametrize(("build", "over"), CHECKPOINTS, ids=NAMES)
def test_logits_up_to_the_last_position(build: Build, over: dict[str, Any], checkpoints: Path) -> None:
    """N1: at the first positions, and at the last ones, up to 4095."""
    path = build(checkpoints, **over)
    loaded = load_model(path)
    ids = tokens(48)
    for start in (0, 4096 - 48):
        positions = torch.arange(start, start + 48)
        assert_close(our_logits(loaded, ids, positions), hf_logits(path, ids, positions))


@pytest.mark.parametrize("build", [lively_qwen3, random_llama, random_qwen2])
def test_decode_at_every_position_equals_the_full_forward(build: Build, checkpoints: Path) -> None:
    """One token at a time, and in chunks of 5, over the cached keys and values."""
    loaded = load_model(build(checkpoints))
    ids, positions = tokens(40), torch.arange(40)
    whole = our_logits(loaded, ids, positions)
    for size in (1, 5):
        attend = DictAttention()
        parts = zip(ids.split(size), positions.split(size), strict=True)
        assert_close(torch.cat([our_logits(loaded, i, p, attend) for i, p in parts]), whole)


def test_rotary_angles_stay_float32_in_a_half_precision_model(checkpoints: Path) -> None:
    """N1: the model is bf16, its table is not; at position 4095 a bf16 angle would be wrong by radians."""
    loaded = load_model(random_llama(checkpoints), dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    cos, sin = loaded.model.rotary(torch.tensor([4095]))
    angles = 4095 / 10000.0 ** (torch.arange(0, 16, 2).double() / 16)
    assert (cos[0, 0, :8] - angles.cos()).abs().max() < 1e-3
    assert (sin[0, 0, 8:] - angles.sin()).abs().max() < 1e-3


@torch.inference_mode()
def test_half_precision_is_as_close_to_the_truth_as_hugging_face(checkpoints: Path) -> None:
    """RMS error against float32 at most 1.5 times that of HF's own bf16, at high positions too."""
    path = lively_qwen3(checkpoints)
    for start in (0, 3840):
        ids, positions = tokens(256), torch.arange(start, start + 256)
        truth = hf_logits(path, ids, positions)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        theirs = model(ids[None], position_ids=positions[None]).logits[0].float()
        ours = our_logits(load_model(path, dtype=torch.bfloat16), ids, positions)
        assert (ours - truth).square().mean().sqrt() <= 1.5 * (theirs - truth).square().mean().sqrt()


def test_the_two_spellings_of_a_config_give_the_same_logits(checkpoints: Path) -> None:
    """L3, with a theta that is not the default."""
    rope = {"rope_type": "default", "rope_theta": 250.0}
    ids, positions = tokens(30), torch.arange(30)
    new, old = (
        load_model(lively_qwen3(checkpoints, rope_parameters=rope, spelling=spelling)) for spelling in ("new", "old")
    )
    default = load_model(lively_qwen3(checkpoints))
    assert torch.equal(our_logits(new, ids, positions), our_logits(old, ids, positions))
    assert not torch.allclose(our_logits(new, ids, positions), our_logits(default, ids, positions))


def test_a_position_beyond_the_table_is_an_error(checkpoints: Path) -> None:
    loaded = load_model(lively_qwen3(checkpoints), max_model_len=64)
    our_logits(loaded, tokens(1), torch.tensor([63]))
    with pytest.raises(IndexError):
        our_logits(loaded, tokens(1), torch.tensor([64]))


def test_rotation_rounds_once() -> None:
    """float32 inside, whatever the dtype of the heads."""
    x = torch.randn(50, 3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    cos, sin = RotaryEmbedding(32, 1e4, None, 50)(torch.arange(50))
    whole, half = x.double(), x.double().roll(16, -1)
    truth = whole * cos.double() + half * sin.double()
    scale = (whole * cos.double()).abs() + (half * sin.double()).abs()
    error = (apply_rope(x, cos, sin).double() - truth).abs()
    assert (error <= 0.51 * torch.finfo(torch.bfloat16).eps * truth.abs() + 1e-6 * scale).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norm_rounds_once(dtype: torch.dtype) -> None:
    """float32 inside: the true value, rounded to the dtype; also where squares overflow fp16."""
    x = (300 * torch.randn(50, 96, generator=torch.Generator().manual_seed(0))).to(dtype)
    weight = torch.linspace(-2, 2, 96).to(dtype)
    truth = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    tolerance = 0.51 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
    assert ((rms_norm(x, weight, 1e-6).double() - truth).abs() <= tolerance * truth.abs().clamp(min=1e-3)).all()
    normed, residual = add_rms_norm(x, x.flip(0), weight, 1e-6)
    assert torch.equal(residual, x + x.flip(0))
    assert torch.equal(normed, rms_norm(residual, weight, 1e-6))
