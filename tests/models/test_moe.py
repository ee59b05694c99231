"""Mixtures of experts: Hugging Face's logits for every family and layout, or a refusal by name (CASES L1, L3)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nanovllm.facts import checkpoint_facts
from nanovllm.graphs.sizes import prompt_sizes
from nanovllm.layers import experts as experts_module
from nanovllm.layers.experts import Experts, Routing, grouped_mlp, route
from nanovllm.llm import EngineConfig, resolve
from nanovllm.models.config import parse_config, read_config
from nanovllm.models.loader import load_model
from nanovllm.models.mlp import MLP, MoE
from nanovllm.models.transformer import Transformer
from tests import oracle
from tests.models.plain_attention import DictAttention
from tests.weights import lively_qwen3, lively_qwen3_moe, random_mixtral, random_qwen2_moe

SHAPE = Path(__file__).parents[2] / "benchmarks" / "shapes" / "Qwen3-30B-A3B"
Build = Callable[..., Path]
IDS = torch.arange(64) * 37 % 500
DENSE = {"decoder_sparse_step": 2, "num_hidden_layers": 5, "mlp_only_layers": [3]}  # experts in layer 1 alone
FAST: list[tuple[Build, dict[str, Any]]] = [
    (lively_qwen3_moe, {"norm_topk_prob": True, "experts_apart": False}),
    (lively_qwen3_moe, DENSE),
    (random_qwen2_moe, {}),
    (random_mixtral, {}),
]
SLOW: list[tuple[Build, dict[str, Any]]] = [
    (lively_qwen3_moe, {}),
    (lively_qwen3_moe, {"norm_topk_prob": True}),
    (lively_qwen3_moe, {"mlp_only_layers": [0, 2], "norm_topk_prob": True, "attention_bias": True}),
    (lively_qwen3_moe, {"num_experts_per_tok": 1}),
    (lively_qwen3_moe, {"num_experts_per_tok": 1, "norm_topk_prob": True}),
    (lively_qwen3_moe, {"num_experts_per_tok": 8}),
    (lively_qwen3_moe, {"num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": True}),
    (lively_qwen3_moe, {"num_experts": 100, "num_experts_per_tok": 4, "head_dim": None, "save_in_shards": True}),
    (random_qwen2_moe, {"norm_topk_prob": True, "decoder_sparse_step": 2, "spelling": "old"}),
    (random_qwen2_moe, {"experts_apart": False, "save_in_shards": True}),
    (random_mixtral, {"experts_apart": False, "head_dim": 32}),
    (random_mixtral, {"num_experts_per_tok": 1, "tie_word_embeddings": True, "spelling": "old"}),
]
VARIANTS = [*FAST, *(pytest.param(*variant, marks=pytest.mark.slow) for variant in SLOW)]
BUILDS = [lively_qwen3_moe, random_qwen2_moe, random_mixtral]


def name_of(value: Any) -> str:
    if callable(value):
        return str(value.__name__)
    return value if isinstance(value, str) else " ".join(f"{key}={said}" for key, said in value.items())[:60]


@torch.inference_mode()
def logits_of(path: Path, **options: Any) -> Tensor:
    loaded = load_model(path, **options)
    model = loaded.model
    return model.logits(model(IDS, torch.arange(len(IDS)), DictAttention(loaded.config))).float()


def changed(source: Path, target: Path, changes: dict[str, Any]) -> Path:
    """A copy of a checkpoint with other words in config.json (`...` drops a key)."""
    shutil.copytree(source, target)
    raw = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    return target


def hf_logits(path: Path) -> Tensor:
    return oracle.truth(path).logits(IDS.tolist())


@pytest.mark.parametrize(("build", "over"), VARIANTS, ids=name_of)
def test_logits_are_hf_s(build: Build, over: dict[str, Any], checkpoints: Path) -> None:
    path = build(checkpoints, **over)
    oracle.check_logits(logits_of(path), hf_logits(path))


@pytest.mark.parametrize("build", BUILDS)
def test_the_test_models_have_lively_routing(
    build: Build, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, edit: Callable[..., Path]
) -> None:
    """All experts of all layers have tokens, some many more than others; and which expert it is matters."""
    seen: list[Routing] = []

    def spy(*args: Any, **options: Any) -> Tensor:
        seen.append(Routing(*args[3:5]))
        return grouped_mlp(*args, **options)

    monkeypatch.setattr(experts_module, "grouped_mlp", spy)
    path = build(checkpoints)
    logits = logits_of(path)
    config = read_config(path)
    assert config.moe is not None and len(seen) == config.num_hidden_layers
    for routing in seen:
        loads = routing.experts.flatten().bincount(minlength=config.moe.num_experts)
        assert loads.min() > 0 and loads.max() > 1.5 * loads.min()
        assert (routing.weights.max(-1).values > 0.5).any() and (routing.weights.min(-1).values > 0.1).any()
    layers = [{tuple(sorted(row)) for row in routing.experts.tolist()} for routing in seen]
    assert all(len(chosen) > 5 for chosen in layers)

    def swap(tensors: dict[str, Tensor]) -> None:
        names = sorted(name for name in tensors if ".1.mlp.experts." in name or ".1.block_sparse_moe.experts." in name)
        for name in (n for n in names if "experts.0." in n):
            other = name.replace("experts.0.", "experts.1.")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    assert (logits_of(edit(path, swap)) - logits).abs().max() > 0.1


def test_layers_without_experts_are_where_the_config_says(checkpoints: Path) -> None:
    model = load_model(lively_qwen3_moe(checkpoints, **DENSE)).model
    kinds = [type(layer.mlp) for layer in model.layers]
    assert kinds == [MLP, MoE, MLP, MLP, MLP]


# --- routing ---


def test_a_token_that_is_not_a_number_spoils_nobody_else(checkpoints: Path) -> None:
    """Nor do infinite scores: such tokens go to some experts, and are all that is lost."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 16, generator=generator)
    gate = torch.randn(5, 16, generator=generator)
    gate_up, down = (torch.randn(shape, generator=generator) for shape in ((5, 12, 16), (5, 16, 6)))

    def run(x: Tensor) -> Tensor:
        return grouped_mlp(x, gate_up, down, *route(x @ gate.T, 3, normalise=True))

    expected = run(x)
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoiled = x.clone()
        spoiled[2], spoiled[5, 3] = bad, bad
        found = run(spoiled)
        assert not found[2].isfinite().any() and not found[5].isfinite().any()
        fine = [0, 1, 3, 4, 6, 7, 8]
        assert torch.allclose(found[fine], expected[fine], atol=1e-4)


def test_experts_of_equal_scores_are_chosen_once_each() -> None:
    """The choice is the same in any company, and the weights are those of equals."""
    scores = torch.zeros(7, 6)
    scores[3:, 4] = 1.0
    together = route(scores, 4, normalise=True)
    assert all(len(set(row)) == 4 for row in together.experts.tolist())
    assert torch.allclose(together.weights[:3], torch.tensor(0.25))
    assert (together.experts[3:, 0] == 4).all()
    for i in range(7):
        alone = route(scores[i : i + 1], 4, normalise=True)
        assert torch.equal(alone.experts[0], together.experts[i])


def test_one_token_and_one_expert_for_all() -> None:
    layer = Experts(4, 8, 6, dtype=torch.float32)
    for parameter in layer.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    routing = Routing(torch.full((5, 1), 3), torch.full((5, 1), 0.5))
    gate, up = (x @ layer.gate_up_proj[3].T).chunk(2, dim=-1)
    expected = 0.5 * (nn.functional.silu(gate) * up) @ layer.down_proj[3].T
    assert torch.allclose(layer(x, routing), expected, atol=1e-5)
    assert torch.allclose(layer(x[:1], Routing(*(part[:1] for part in routing))), expected[:1], atol=1e-5)


# --- weights ---


@pytest.mark.parametrize(
    "build", [pytest.param(b, marks=() if b is random_mixtral else pytest.mark.slow) for b in BUILDS]
)
def test_both_layouts_are_the_same_model(build: Build, checkpoints: Path) -> None:
    """Every expert has its tensors, or all of a layer have one."""
    apart, together = build(checkpoints), build(checkpoints, experts_apart=False)
    names = [set(load_file(path / "model.safetensors")) for path in (apart, together)]
    assert len(names[0]) > len(names[1])
    assert torch.equal(logits_of(apart), logits_of(together))


def test_weights_that_do_not_fit_are_named(checkpoints: Path, edit: Callable[..., Path]) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
        tensors["model.layers.0.mlp.experts.8.up_proj.weight"] = torch.zeros(24, 64)
        tensors["model.layers.2.mlp.gate.weight"] = torch.zeros(7, 64)

    with pytest.raises(ValueError, match="do not fit") as caught:
        load_model(edit(lively_qwen3_moe(checkpoints), spoil))
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.experts.5.up_proj.weight;" in message
    assert "unexpected: model.layers.0.mlp.experts.8.up_proj.weight;" in message
    assert "wrong shape: model.layers.2.mlp.gate.weight is [7, 64], not [8, 64]" in message
    for name in ("shared_expert.up_proj.weight", "shared_expert_gate.weight"):
        path = edit(random_qwen2_moe(checkpoints), lambda t, n=f"model.layers.1.mlp.{name}": t.pop(n))
        with pytest.raises(ValueError, match=rf"missing: model\.layers\.1\.mlp\.{name}"):
            load_model(path)


def test_a_layer_in_another_layout_is_not_overlooked(checkpoints: Path, edit: Callable[..., Path]) -> None:
    together = load_file(lively_qwen3_moe(checkpoints, experts_apart=False) / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    with pytest.raises(ValueError, match=f"unexpected: .*{name.replace('gate_up', '7.gate')}"):
        load_model(edit(lively_qwen3_moe(checkpoints), lambda t: t.update({name: together[name]})))


def test_dummy_weights_need_no_files(checkpoints: Path, edit: Callable[..., Path]) -> None:
    path = edit(random_qwen2_moe(checkpoints))
    (path / "model.safetensors").unlink()
    logits = logits_of(path, load_format="dummy")
    assert logits.isfinite().all() and logits.std() > 0


@pytest.mark.slow
@torch.inference_mode()
def test_half_precision_is_as_close_to_the_truth_as_hugging_face(checkpoints: Path) -> None:
    """By the median of the tokens' errors: a token that changes an expert is far from the truth, in theirs and ours."""
    from transformers import AutoModelForCausalLM

    path = lively_qwen3_moe(checkpoints)
    truth = hf_logits(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    theirs, ours = model(IDS[None]).logits[0].float(), logits_of(path, dtype=torch.bfloat16)
    errors = [(logits - truth).square().mean(-1).sqrt().median() for logits in (ours, theirs)]
    assert 0 < errors[0] <= 1.5 * errors[1]


# --- config.json ---

REFUSED: list[tuple[Build, dict[str, Any], str]] = [
    (lively_qwen3, {"num_experts": 8}, "model_type='qwen3' with a mixture of experts is not supported"),
    (lively_qwen3_moe, {"model_type": "deepseek_v3"}, "model_type='deepseek_v3' is not supported; .* qwen3_moe"),
    (lively_qwen3_moe, {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than the number of experts, 8"),
    (lively_qwen3_moe, {"num_experts_per_tok": 0}, "lacks a positive number for num_experts_per_tok"),
    (lively_qwen3_moe, {"num_local_experts": 0}, "lacks a positive number for num_experts"),
    (lively_qwen3_moe, {"num_experts": []}, r"num_experts=\[\] and num_local_experts=8 contradict each other"),
    (lively_qwen3_moe, {"num_experts": 16}, "num_experts=16 and num_local_experts=8 contradict each other"),
    (lively_qwen3_moe, {"moe_intermediate_size": None}, "lacks a positive number for moe_intermediate_size"),
    (lively_qwen3_moe, {"norm_topk_prob": "yes"}, "norm_topk_prob must be bool; got 'yes'"),
    (lively_qwen3_moe, {"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive number; got 0"),
    (lively_qwen3_moe, {"mlp_only_layers": [0.5]}, r"mlp_only_layers must be a list of layers; got \[0.5\]"),
    (lively_qwen3_moe, {"mlp_only_layers": 1}, "mlp_only_layers must be a list of layers; got 1"),
    (lively_qwen3_moe, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (lively_qwen3_moe, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method=.gptq."),
    (random_qwen2_moe, {"shared_expert_intermediate_size": 0}, "number for shared_expert_intermediate_size"),
    (random_qwen2_moe, {"qkv_bias": False}, "qkv_bias=False is not supported"),
    (random_mixtral, {"num_local_experts": None}, "lacks a positive number for num_experts"),
    (random_qwen2_moe, {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
]


@pytest.mark.parametrize(("build", "changes", "told"), REFUSED, ids=name_of)
def test_what_is_not_supported_is_refused_by_name(
    build: Build, changes: dict[str, Any], told: str, checkpoints: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=told):
        read_config(changed(build(checkpoints), tmp_path / "changed", changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "changes"),
    [
        (lively_qwen3_moe, {"num_local_experts": ..., "num_experts": 8}),  # as in Qwen's own files
        (lively_qwen3_moe, {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}),
        (lively_qwen3_moe, {"mlp_only_layers": None, "decoder_sparse_step": 1}),
        (random_qwen2_moe, {"use_sliding_window": True, "sliding_window": 4096, "layer_types": None}),
        (random_mixtral, {"sliding_window": 4096}),
        (random_mixtral, {"norm_topk_prob": False, "mlp_only_layers": [0]}),  # Mixtral has no such keys
    ],
    ids=name_of,
)
def test_what_has_no_effect_is_not_refused(
    build: Build, changes: dict[str, Any], checkpoints: Path, tmp_path: Path
) -> None:
    path = changed(build(checkpoints), tmp_path / "changed", changes)
    oracle.check_logits(logits_of(path), hf_logits(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "changes", "windows"),
    [
        # A window is for all layers, whatever the keys of the dense families say
        (lively_qwen3_moe, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 9}, (8, 8, 8)),
        (random_mixtral, {"sliding_window": 8, "use_sliding_window": False}, (8, 8, 8)),
        # or for every other one
        (random_qwen2_moe, {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}, (8, 0, 8)),
        (
            random_qwen2_moe,
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None},
            (8, 0, 0),
        ),
    ],
)
def test_windows(
    build: Build, changes: dict[str, Any], windows: tuple[int, ...], checkpoints: Path, tmp_path: Path
) -> None:
    path = changed(build(checkpoints), tmp_path / "changed", changes)
    assert read_config(path).windows == windows
    oracle.check_logits(logits_of(path), hf_logits(path))


LEFT_OUT: tuple[str, ...] = (
    "rope_parameters",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
    "norm_topk_prob",
)
LEFT_OUT += (
    "decoder_sparse_step",
    "mlp_only_layers",
    "use_sliding_window",
    "sliding_window",
    "layer_types",
    "head_dim",
)


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_what_a_config_leaves_out(build: Build, checkpoints: Path, tmp_path: Path) -> None:
    """Keys that Hugging Face has defaults for: the same answer, or weights that do not fit."""
    for key in (*LEFT_OUT, "num_key_value_heads"):
        path = changed(build(checkpoints, num_key_value_heads=4, head_dim=16), tmp_path / key, {key: ...})
        if key == "num_key_value_heads" and build is not lively_qwen3_moe:  # 8 or 16 of them
            with pytest.raises(ValueError, match="num_key_value_heads="):
                load_model(path)
        else:
            oracle.check_logits(logits_of(path), hf_logits(path))


def test_facts_tell_of_the_experts(checkpoints: Path) -> None:
    facts = {name: (value, source) for name, value, source in checkpoint_facts(random_qwen2_moe(checkpoints))}
    assert facts["experts"] == ("2 of 6 per token, and a shared one", "config.json: num_experts_per_tok")
    assert facts["weights of the experts"] == ("probabilities", "config.json: norm_topk_prob")
    facts = {name: (value, source) for name, value, source in checkpoint_facts(random_mixtral(checkpoints))}
    assert facts["experts"] == ("2 of 4 per token", "config.json: num_experts_per_tok")
    assert facts["weights of the experts"] == ("shares of their sum", "the architecture")
    assert not any("experts" in name for name, _, _ in checkpoint_facts(lively_qwen3(checkpoints)))


def test_qwen3_30b_a3b() -> None:
    """30.5 billion parameters. How long a step with prompts is recorded depends on what its tokens go through."""
    raw = json.loads((SHAPE / "config.json").read_text())
    model = read_config(SHAPE)
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in Transformer(model, 1).parameters()) == 30_532_122_624
    assert model.neurons_of_token == 8 * 768
    config = resolve(EngineConfig(), model, torch.device("cpu"))
    twice = parse_config(raw | {"num_experts_per_tok": 16})
    assert prompt_sizes(config, model)[-1] > prompt_sizes(config, twice)[-1]
