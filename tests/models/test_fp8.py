"""Checkpoints in FP8: Hugging Face's logits of the same weights in float32, or a refusal by name.

Where weights stay in FP8 is a question of the device. Here that path runs on the CPU, by the layers' plain PyTorch.
"""

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.facts import checkpoint_facts
from nanovllm.kernels import FP8
from nanovllm.layers.fp8_linear import Fp8Linear, quantise, widen
from nanovllm.models import loader
from nanovllm.models.config import read_config
from nanovllm.models.loader import load_model
from nanovllm.models.quantization import parse_quantization
from nanovllm.models.transformer import Transformer
from nanovllm.runner.warm_up import shortened
from nanovllm.simulate.needs import read_architecture
from tests import oracle
from tests.fp8_checkpoints import (
    BLOCK,
    CHANNEL,
    Layout,
    in_fp8,
    wide_qwen2,
    wide_qwen3,
    wide_qwen3_moe,
)
from tests.models.plain_attention import DictAttention
from tests.stages.ranks import Threads
from tests.weights import lively_qwen3, lively_qwen3_moe, random_llama, random_mixtral, random_qwen2_moe

IDS = torch.arange(64) * 37 % 500
LAYOUTS: list[Layout] = ["block", "channel"]
Build = Callable[..., Path]


@torch.inference_mode()
def logits_of(path: Path, **options: Any) -> Tensor:
    model = load_model(path, **options).model
    return logits(model)


def logits(model: Transformer) -> Tensor:
    return model.logits(model(IDS, torch.arange(len(IDS)), DictAttention())).float()


def hf_logits(path: Path) -> Tensor:
    return oracle.truth(path).logits(IDS.tolist())


@pytest.fixture
def has_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for a device that reads FP8."""
    monkeypatch.setattr(loader, "has_fp8", lambda device: True)


def in_layers(model: Transformer) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)]


# --- widened ---

SLOW: list[tuple[Build, Layout]] = [
    (build, layout) for build in (random_llama, random_qwen2_moe, random_mixtral) for layout in LAYOUTS
]


@pytest.mark.parametrize(
    ("build", "layout"),
    [
        (wide_qwen3, "block"),
        pytest.param(wide_qwen3, "channel", marks=pytest.mark.slow),
        pytest.param(lively_qwen3_moe, "block", marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_widened_on_the_way_in(
    build: Build, layout: Layout, checkpoints: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = build(checkpoints)
    path, widened = in_fp8(source, layout)
    with caplog.at_level(logging.INFO, "nanovllm"):
        found = logits_of(path)
    assert "cpu cannot read weights in FP8: they are widened to torch.float32 on the way in" in caplog.text
    oracle.check_logits(found, hf_logits(widened))
    # The rounding to FP8 shows, and that of another model would be far larger
    lost = (found - hf_logits(source)).square().mean().sqrt() / hf_logits(source).std()
    assert 0.01 < lost < 1


@pytest.mark.slow
def test_in_bf16_a_weight_is_rounded_once(checkpoints: Path) -> None:
    path, widened = in_fp8(wide_qwen3(checkpoints), "block")
    ours, theirs = (load_model(p, dtype=torch.bfloat16).model.state_dict() for p in (path, widened))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_hugging_face_reads_the_same_weights(checkpoints: Path) -> None:
    """Its own reader of this layout, which widens as well."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    path, _ = in_fp8(wide_qwen3(checkpoints), "block")
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    with torch.inference_mode():
        theirs = model(IDS[None]).logits[0]
    oracle.check_logits(logits_of(path), theirs)


# --- kept ---


@pytest.mark.parametrize("layout", ["block", pytest.param("channel", marks=pytest.mark.slow)])
def test_kept_or_widened_is_the_same_model(has_fp8: None, checkpoints: Path, layout: Layout) -> None:
    path, widened = in_fp8(wide_qwen3(checkpoints), layout)
    with torch.inference_mode():
        model = load_model(path).model
        oracle.check_logits(logits(model), hf_logits(widened))
    assert len(in_layers(model)) == 4 * 3
    assert {p.dtype for n, p in model.named_parameters() if n.endswith("_proj.weight")} == {FP8}
    assert model.embed_tokens.weight.dtype == model.lm_head.weight.dtype == torch.float32


def test_layers_whose_sizes_do_not_fit_are_widened(
    has_fp8: None, checkpoints: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And those that the checkpoint has in floating point, in whole or in part, stay as they are."""
    path, widened = in_fp8(wide_qwen3(checkpoints, intermediate_size=192), "block", left=("0.self_attn.k_proj",))
    with torch.inference_mode(), caplog.at_level(logging.INFO, "nanovllm"):
        model = load_model(path).model
        oracle.check_logits(logits(model), hf_logits(widened))
    kept = in_layers(model)
    assert "layers.0.self_attn.qkv_proj" not in kept and "layers.1.self_attn.qkv_proj" in kept
    assert not any("down_proj" in name for name in kept)
    assert "8 of 12 linear layers stay in FP8, the others are in torch.float32" in caplog.text


@pytest.mark.parametrize(
    ("build", "layout", "size"),
    [
        (wide_qwen3, "block", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (wide_qwen2, "channel", 4),
                (wide_qwen3, "channel", 2),
                (wide_qwen2, "block", 2),
                (wide_qwen2, "block", 4),
                (lively_qwen3_moe, "block", 2),
            )
        ),
    ],
)
@pytest.mark.parametrize("kept", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["kept", "widened"])
def test_ranks_have_the_scales_of_their_share(
    build: Build, layout: Layout, size: int, kept: bool, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a share begins within a block: 192 of 384 neurons, 64 of 128 rows of keys. A layer stays in FP8 where
    a rank has 128 inputs of it, or a multiple."""
    monkeypatch.setattr(loader, "has_fp8", lambda device: kept)
    path, widened = in_fp8(build(checkpoints), layout)
    config = read_config(path)

    def task(group: Any) -> tuple[Tensor, int]:
        model = load_model(path, dtype=torch.float32, group=group).model
        return group.all_gather(logits(model)), len(in_layers(model))

    for shares, num_kept in Threads.run(size, task):
        found = torch.cat(list(shares), dim=-1)[:, : config.vocab_size]
        oracle.check_logits(found, hf_logits(widened))
        of_layer = {(wide_qwen3, 2): 3, (wide_qwen2, 2): 4, (wide_qwen2, 4): 3}.get((build, size), 0)
        assert num_kept == (3 * of_layer if kept else 0)


def test_a_layer_that_is_left_out_is_rehearsed_as_well(has_fp8: None, checkpoints: Path) -> None:
    """Its kernels are others, and a recording must not be the first to launch them."""
    path, _ = in_fp8(wide_qwen3(checkpoints), "block", left=("layers.2.mlp.down_proj",))
    model = load_model(path).model
    with shortened(model):
        assert len(model.layers) == 3
    path, _ = in_fp8(wide_qwen3(checkpoints), "block")
    model = load_model(path).model
    with shortened(model):
        assert len(model.layers) == 2
    assert len(model.layers) == 3
    path, _ = in_fp8(wide_qwen3(checkpoints, num_hidden_layers=6), "block", left=("layers.2.mlp.down_proj",))
    model = load_model(path).model
    in_order = list(model.layers)
    with shortened(model):  # the layer after it reads what it leaves
        assert [in_order.index(layer) for layer in model.layers] == [0, 1, 2, 3]


@pytest.mark.slow
def test_random_weights_of_a_checkpoint_in_fp8(has_fp8: None, checkpoints: Path) -> None:
    path, _ = in_fp8(wide_qwen3(checkpoints), "block")
    found = logits_of(path, load_format="dummy")
    assert found.isfinite().all() and found.std() > 0.05


# --- quantised here ---


@pytest.mark.parametrize("kept", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["kept", "widened"])
@pytest.mark.parametrize(
    ("build", "how"),
    [
        (wide_qwen3, {}),
        (wide_qwen3_moe, {"experts_apart": False}),
        pytest.param(wide_qwen3_moe, {}, marks=pytest.mark.slow),
    ],
    ids=["dense", "experts in one tensor", "experts"],
)
def test_quantised_while_it_is_loaded(
    kept: bool, build: Build, how: dict[str, Any], checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a checkpoint with a scale per channel would be, also on ranks that have some inputs of a channel, or whole
    experts."""
    monkeypatch.setattr(loader, "has_fp8", lambda device: kept)
    source = build(checkpoints, **how)
    _, widened = in_fp8(build(checkpoints), "channel")
    expected = hf_logits(widened)
    oracle.check_logits(logits_of(source, quantization="fp8"), expected)
    if build is wide_qwen3_moe:
        oracle.check_logits(logits_of_ranks(source, expert_parallel=True), expected)
    oracle.check_logits(logits_of_ranks(source), expected)


def logits_of_ranks(path: Path, **options: Any) -> Tensor:
    """The logits of two ranks that quantise."""

    def task(group: Any) -> Tensor:
        model = load_model(path, quantization="fp8", group=group, **options).model
        shares: Tensor = group.all_gather(logits(model))
        return torch.cat(list(shares), dim=-1)

    first, second = Threads.run(2, task)
    assert torch.equal(first, second)
    return first


@pytest.mark.slow
def test_what_is_in_fp8_already_is_not_quantised_again(checkpoints: Path) -> None:
    path, _ = in_fp8(wide_qwen3(checkpoints), "block")
    assert torch.equal(logits_of(path, quantization="fp8"), logits_of(path))


def test_quantise_and_widen() -> None:
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 6)[:, None]
    weight[2] = 0
    values, scale = quantise(weight)
    assert values.dtype == FP8 and scale.shape == (6, 1) and (scale > 0).all()
    error = (widen(values, scale) - weight).abs()
    # Four bits of precision; below the 2^-6 where subnormal numbers begin, steps of 2^-9
    assert (error <= torch.maximum(weight.abs() / 16, scale * 2**-10) * 1.001).all()
    assert torch.equal(widen(*quantise(widen(values, scale))), widen(values, scale))
    block = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    assert widen(torch.ones(4, 6).to(FP8), block)[[0, 1, 2], [0, 5, 2]].tolist() == [1.0, 2.0, 4.0]


def test_facts_and_simulations(checkpoints: Path) -> None:
    for layout, scales in ("block", "block of 128 x 128"), ("channel", "output channel"):
        path, _ = in_fp8(wide_qwen3(checkpoints), layout)  # type: ignore[arg-type]
        fact = "quantised weights", f"FP8, a scale per {scales}", "config.json: quantization_config"
        assert fact in checkpoint_facts(path)
        with pytest.raises(ValueError, match="quantization_config is not supported; choose the same model in 16 bits"):
            read_architecture(path)


# --- refused ---


def with_change(said: dict[str, Any], keys: str, value: Any) -> dict[str, Any]:
    said = copy.deepcopy(said)
    *way, last = keys.split("/")
    inner = said
    for key in way:
        inner = inner[key]
    inner[last] = value
    return said


GROUP = "config_groups/group_0"
REFUSED: list[tuple[Any, str]] = [
    ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq' is not supported; supported is 'fp8' and"),
    ({}, "quant_method=None is not supported"),
    ("fp8", "quantization_config must be an object; got 'fp8'"),
    (with_change(BLOCK, "weight_block_size", [64, 128]), r"weight_block_size=\[64, 128\] is not .* is \[128, 128\]"),
    (with_change(BLOCK, "weight_block_size", None), "weight_block_size=None"),
    (with_change(BLOCK, "activation_scheme", "static"), "activation_scheme='static' .* supported is 'dynamic'"),
    (with_change(BLOCK, "fmt", "e5m2"), "fmt='e5m2'"),
    (with_change(BLOCK, "kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme={'num_bits': 8}"),
    (with_change(CHANNEL, "format", "pack-quantized"), "format='pack-quantized' is not .* is 'float-quantized'"),
    (with_change(CHANNEL, "kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme={'num_bits': 8}"),
    (with_change(CHANNEL, "config_groups", None), "config_groups.group_0.targets=None"),
    (with_change(CHANNEL, f"{GROUP}/targets", ["re:.*q_proj"]), r"group_0.targets=\['re:"),
    (with_change(CHANNEL, f"{GROUP}/weights/strategy", "tensor"), "weights.strategy='tensor' .* is 'channel'"),
    (with_change(CHANNEL, f"{GROUP}/weights/num_bits", 4), "weights.num_bits=4"),
    (with_change(CHANNEL, f"{GROUP}/weights", "FP8"), "weights.num_bits=None"),
    (with_change(CHANNEL, f"{GROUP}/weights/symmetric", False), "weights.symmetric=False"),
    (with_change(CHANNEL, f"{GROUP}/input_activations/dynamic", False), "input_activations.dynamic=False"),
    (with_change(CHANNEL, f"{GROUP}/input_activations", None), "input_activations.num_bits=None"),
    (with_change(CHANNEL, f"{GROUP}/output_activations", {"num_bits": 8}), "output_activations={'num_bits': 8}"),
    (with_change(CHANNEL, "sparsity_config", {"format": "sparse-24-bitmask"}), "sparsity_config.format='sparse"),
    (
        with_change(CHANNEL, "sparsity_config", "dense"),
        "sparsity_config='dense' is not .* is an object",
    ),
    (with_change(CHANNEL, "transform_config", {"R1": {}}), "transform_config={'R1': {}}"),
]


@pytest.mark.parametrize(("said", "told"), REFUSED, ids=[told[:40] for _, told in REFUSED])
def test_what_is_not_understood_is_refused(said: Any, told: str, checkpoints: Path, tmp_path: Path) -> None:
    raw = json.loads((lively_qwen3(checkpoints) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": said}))
    with pytest.raises(ValueError, match=f"config.json: quantization_config.*{told}|{told}") as caught:
        read_config(tmp_path)
    assert isinstance(said, str) or "use an unquantised checkpoint" in str(caught.value)


KV_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False, "observer": None}


@pytest.mark.parametrize(("said", "scheme"), [(BLOCK, "static"), (CHANNEL, KV_CACHE)], ids=["block", "channel"])
def test_scales_of_a_kv_cache_are_not_refused(said: Any, scheme: Any) -> None:
    """They change nothing of the weights. A scale for each head or token would."""
    plain = parse_quantization({"quantization_config": said})
    assert parse_quantization({"quantization_config": said | {"kv_cache_scheme": scheme}}) == plain
    for wrong in KV_CACHE | {"strategy": "channel"}, KV_CACHE | {"dynamic": True}, "dynamic":
        with pytest.raises(ValueError, match=r"quantization_config\.kv_cache_scheme="):
            parse_quantization({"quantization_config": said | {"kv_cache_scheme": wrong}})


Q = "model.layers.1.self_attn.q_proj."
NORM = "model.norm.weight"
SPOILED: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
    (lambda t: t.pop(f"{Q}weight_scale_inv"), f"missing: {Q}weight_scale_inv, the scales of {Q}weight"),
    (lambda t: t.update({f"{Q}weight_scale_inv": torch.ones(4, 3)}), r"weight_scale_inv is \[4, 3\], not \[2, 1\]"),
    (
        lambda t: t.update({f"{Q}weight_scale_inv": torch.ones(2, 1, dtype=torch.int32)}),
        f"wrong dtype: {Q}weight_scale_inv is I32",
    ),
    (lambda t: t.update({f"{Q}input_scale": torch.ones(1)}), f"unexpected: {Q}input_scale"),
    (lambda t: t.update({f"{Q}q_scale": torch.ones(1)}), f"unexpected: {Q}q_scale"),
    (lambda t: t.update({f"{Q.replace('q', 'k')}k_scale": torch.zeros(1)}), "k_scale must be one positive number"),
    (lambda t: t.update({f"{Q}weight": t[f"{Q}weight"].float()}), f"unexpected: {Q}weight_scale_inv"),
    (lambda t: t.update({f"{Q}weight": t[f"{Q}weight"].view(torch.float8_e5m2)}), f"wrong dtype: {Q}weight is F8_E5M2"),
    (
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(FP8)}),
        "wrong dtype: model.norm.weight is F8_E4M3",
    ),
]


@pytest.mark.parametrize(("spoil", "told"), SPOILED, ids=[told[:40] for _, told in SPOILED])
def test_weights_that_do_not_fit_are_named(
    spoil: Callable[[dict[str, Tensor]], object], told: str, checkpoints: Path, edit: Callable[..., Path]
) -> None:
    path, _ = in_fp8(wide_qwen3(checkpoints), "block")
    with pytest.raises(ValueError, match=told):
        load_model(edit(path, spoil))


def test_fp8_without_a_word_in_the_config(checkpoints: Path, edit: Callable[..., Path]) -> None:
    path, _ = in_fp8(wide_qwen3(checkpoints), "block")
    with pytest.raises(ValueError, match=f"wrong dtype: .*{Q}weight is F8_E4M3"):
        load_model(edit(path, quantization_config=None))
