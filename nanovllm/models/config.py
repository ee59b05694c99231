"""From config.json to `ModelConfig`. What the decoder does not implement is refused by name, and never ignored."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from nanovllm.layers.rope import DynamicScaling, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from nanovllm.models.checkpoint import WITH_IMAGES, dtype_of_weights, read_text_config
from nanovllm.models.families import FAMILIES, NEEDED, Family, Raw, layers_without_rope, shape_of
from nanovllm.models.moe_config import MoEConfig, has_experts, parse_experts
from nanovllm.models.quantization import Fp8Format, parse_quantization
from nanovllm.models.window_config import FULL, KINDS_FOR_WINDOWS, LIMITED, layer_types, parse_windows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ACTIVATIONS = ("silu", "swish")  # two names of one function
GELU, GEMMA_LOCAL_THETA = "gelu_pytorch_tanh", 10000.0
SCALINGS: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "dynamic": DynamicScaling,
}
KINDS: dict[str, tuple[type, ...]] = {  # of what may be left out; Hugging Face's config classes refuse others, too
    "num_key_value_heads": (int, type(None)),
    "head_dim": (int, type(None)),
    "max_position_embeddings": (int,),
    "rms_norm_eps": (int, float),
    "tie_word_embeddings": (bool,),
    "attention_bias": (bool,),
    "mlp_bias": (bool,),
    "layer_types": (list, type(None)),
    "rope_parameters": (dict, type(None)),
    "rope_scaling": (dict, type(None)),
}
POSITIVE = (*NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings")


@dataclass(frozen=True)
class GemmaConfig:
    """The numbers of what Gemma 3 alone does.

    It also does what needs no number. The weight of every norm is 1 plus what the checkpoint has. Attention and the MLP
    have a norm behind them as well. The MLP is gated by GELU. And RoPE turns more slowly in layers that see the whole
    text than in layers with a window.
    """

    embedding_scale: float  # what the embedding is multiplied by, rounded to its dtype
    local_layers: frozenset[int]  # layers with a window, even if no text is longer than the window
    local_rope_theta: float
    local_rope_scaling: RopeScaling | None


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that fix the architecture (the names are Hugging Face's) and the dtype of the weights."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    head_dim: int
    qk_norm: bool  # RMSNorm on each head of q and k, before RoPE
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    moe: MoEConfig | None  # None: every layer has an MLP
    windows: tuple[int, ...]  # of each layer: keys that a query sees at most, its own included; 0 is no limit
    attention_scale: float  # what scores of attention are multiplied by
    gemma: GemmaConfig | None  # None: another family
    dtype: torch.dtype
    quantization: Fp8Format | None = None  # of the weights in the files; None: they are not quantised
    without_rope: frozenset[int] = frozenset()  # layers that have no RoPE

    @property
    def neurons_of_token(self) -> int:
        """The neurons that a token goes through in a layer; if some layers have experts, in one of these."""
        return self.intermediate_size if self.moe is None else self.moe.neurons_of_token


def read_config(path: Path) -> ModelConfig:
    """Read `path`/config.json, as transformers 4 (rope_theta, torch_dtype) or 5 (rope_parameters, dtype) spell it.

    Raises ValueError for an unknown model_type, missing keys, and every feature that is not supported.
    """
    raw = read_text_config(path)
    try:
        return parse_config(raw, dtype_of_weights(path) or "float32")
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from error


def parse_config(raw: Raw, dtype_of_weights: str = "float32") -> ModelConfig:
    """`dtype_of_weights`: for a config.json that names no dtype."""
    refuse_unsupported(raw)
    family = FAMILIES[raw["model_type"]]
    for key, kinds in (KINDS if family.windows is None else KINDS | KINDS_FOR_WINDOWS).items():
        is_number = not isinstance(raw.get(key), bool)  # true is an int to Python, and a window of 1 would be wrong
        if key in raw and not (isinstance(raw[key], kinds) and (is_number or bool in kinds)):
            expected = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
            raise ValueError(f"{key} must be {expected}; got {raw[key]!r}; mend it, or leave it out")
    given = [key for key in POSITIVE if key in NEEDED or raw.get(key) is not None]
    bad = [key for key in given if type(raw.get(key)) is not int or raw[key] < 1]  # true is an int to `isinstance`
    if bad:
        raise ValueError(f"lacks a positive number for {', '.join(bad)}")
    shape = shape_of(raw, family)
    heads, kv_heads, head_dim = (shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if head_dim < 1 or head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even and positive: rotary embedding needs pairs")
    max_positions = raw.get("max_position_embeddings") or family.max_position_embeddings
    gemma = parse_gemma(raw, family, max_positions) if family.is_gemma else None
    full_rope = raw if gemma is None else {**raw, "rope_parameters": ropes_by_kind(raw).get(FULL)}
    theta, scaling = parse_rope(full_rope, max_positions, family.rope_theta)
    if isinstance(scaling, YarnScaling):  # model cards switch it on without raising max_position_embeddings
        max_positions = max(max_positions, int(scaling.original_max_position_embeddings * scaling.factor))
    return ModelConfig(
        **shape,
        max_position_embeddings=max_positions,
        rms_norm_eps=raw.get("rms_norm_eps", family.rms_norm_eps),
        rope_theta=theta,
        rope_scaling=scaling,
        moe=None if family.experts is None else parse_experts(raw, family.experts),
        windows=parse_windows(raw, family.windows, max_positions),
        attention_scale=(head_dim if gemma is None else raw.get("query_pre_attn_scalar", 256)) ** -0.5,
        gemma=gemma,
        dtype=parse_dtype(raw, dtype_of_weights),
        quantization=parse_quantization(raw),
        without_rope=layers_without_rope(raw) if family.without_rope else frozenset(),
    )


def refuse_unsupported(raw: Raw) -> None:
    kind, known = raw.get("model_type"), ", ".join([*FAMILIES, *WITH_IMAGES])
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"model_type={kind!r} is not supported; supported are {known}")
    if not raw.get("is_causal", True):  # as in embedding models; the weights do not show it
        raise ValueError(
            f"is_causal={raw['is_causal']!r} is not supported: where tokens attend to later ones, no text can be "
            "generated; use a model that was trained to continue texts"
        )
    if has_experts(raw) and FAMILIES[kind].experts is None:
        raise ValueError(f"model_type={kind!r} with a mixture of experts is not supported; supported are {known}")
    if kind == "qwen2_moe" and not raw.get("qkv_bias", True):
        raise ValueError("qkv_bias=False is not supported; supported is model_type='qwen2_moe' with biases")
    if kind == "smollm3" and raw.get("use_sliding_window"):
        raise ValueError("use_sliding_window=True is not supported; supported is model_type='smollm3' without windows")
    if FAMILIES[kind].is_gemma:
        refuse_gemma(raw)
    elif raw.get("hidden_act", "silu") not in ACTIVATIONS:
        raise ValueError(f"hidden_act={raw['hidden_act']!r} is not supported; supported is 'silu'")


def refuse_gemma(raw: Raw) -> None:
    """Raise ValueError for what Gemma 2, embedding models and unknown variants have and Gemma 3 has not."""
    if raw.get("hidden_activation", GELU) != GELU:
        raise ValueError(f"hidden_activation={raw['hidden_activation']!r} is not supported; supported is {GELU!r}")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(key):
            raise ValueError(f"{key}={raw[key]!r} is not supported; Gemma 3 is supported without it")
    for key in ("query_pre_attn_scalar", "rope_local_base_freq"):
        number = raw.get(key, 1)
        if not isinstance(number, int | float) or not number > 0:
            raise ValueError(f"{key} must be a positive number; got {number!r}; mend it, or leave it out")


def parse_gemma(raw: Raw, family: Family, max_positions: int) -> GemmaConfig:
    kinds = layer_types(raw, family.windows)
    local = {"rope_parameters": ropes_by_kind(raw).get(LIMITED), "rope_theta": raw.get("rope_local_base_freq")}
    theta, scaling = parse_rope(local, max_positions, GEMMA_LOCAL_THETA)
    return GemmaConfig(
        embedding_scale=raw["hidden_size"] ** 0.5,
        local_layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == LIMITED),
        local_rope_theta=theta,
        local_rope_scaling=scaling,
    )


def ropes_by_kind(raw: Raw) -> Raw:
    """The parameters of RoPE for each kind of layer, as transformers 5 writes them for Gemma; empty for older files."""
    ropes: Raw = raw.get("rope_parameters") or {}
    if not all(kind in (FULL, LIMITED) and isinstance(rope, dict | type(None)) for kind, rope in ropes.items()):
        raise ValueError(f"rope_parameters must have one dict for {FULL} and one for {LIMITED}; got {ropes!r}")
    return ropes


def parse_dtype(raw: Raw, dtype_of_weights: str) -> torch.dtype:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "auto").removeprefix("torch.")
    name = {"auto": dtype_of_weights, "float": "float32", "half": "float16"}.get(name, name)
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} is not supported; supported are {', '.join(DTYPES)}")
    return DTYPES[name]


def parse_rope(raw: Raw, max_positions: int, default_theta: float) -> tuple[float, RopeScaling | None]:
    """theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope, before = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}

    def spelled_out(rope: Raw) -> Raw:
        outside = {"rope_type": rope.get("type", "default"), "rope_theta": raw.get("rope_theta", default_theta)}
        return outside | {key: value for key, value in rope.items() if key != "type"}

    if rope and before and spelled_out(rope) != spelled_out(before):
        # Somebody may have followed a model card and added a scaling by hand: ignoring it would spoil long texts only.
        # Hugging Face takes rope_scaling alone, and loses a theta that only rope_parameters has.
        raise ValueError("rope_scaling contradicts rope_parameters; move it into rope_parameters, or drop it")
    rope = rope or before
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError("rope_parameters that differ between layers are not supported")
    if (rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1) != 1:
        raise ValueError("partial_rotary_factor is not supported; all of a head must be rotated")
    said_theta = [value for value in (rope.get("rope_theta"), raw.get("rope_theta")) if value is not None]
    theta = (said_theta or [default_theta])[0]
    if not isinstance(theta, int | float) or not theta > 0:
        raise ValueError(f"rope_theta must be a positive number; got {theta!r}")
    theta, kind = float(theta), rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in SCALINGS:
        known = "default, linear, llama3, yarn, and dynamic up to max_position_embeddings"
        raise ValueError(f"RoPE scaling {kind!r} is not supported; supported are {known}")
    # Where the length before the scaling is not said, or said outside, is as in Hugging Face's config classes.
    outside = {key: raw[key] for key in ("original_max_position_embeddings",) if key in raw}
    rope = {"original_max_position_embeddings": max_positions, **rope, **outside}
    for key in ("factor", "original_max_position_embeddings"):
        if isinstance(rope.get(key), int | float) and not rope[key] > 0:
            raise ValueError(f"RoPE scaling {kind!r}: {key} must be positive; got {rope[key]!r}")
    if kind == "yarn":
        rope = complete_yarn(rope, theta, max_positions)
    values: dict[str, Any] = {field.name: rope.get(field.name) for field in fields(SCALINGS[kind])}
    missing = [key for key, value in values.items() if not isinstance(value, int | float)]
    if kind == "yarn" and values["factor"] is None:
        missing = ["factor"]  # from which others follow
    if missing:
        raise ValueError(f"RoPE scaling {kind!r} lacks a number for {', '.join(missing)}")
    if kind == "llama3" and not 0 < values["low_freq_factor"] < values["high_freq_factor"]:
        raise ValueError("RoPE scaling 'llama3': low_freq_factor must be positive and less than high_freq_factor")
    if kind == "yarn" and not (values["beta_fast"] > 0 and values["beta_slow"] > 0):
        raise ValueError("RoPE scaling 'yarn': beta_fast and beta_slow must be positive")
    return theta, SCALINGS[kind](**values)


def complete_yarn(rope: Raw, theta: float, max_positions: int) -> Raw:
    """The parameters of YaRN with Hugging Face's defaults for those that are optional.

    The attention factor is the paper's 0.1 ln(factor) + 1, or DeepSeek's quotient of two such numbers.
    """
    factor, original = rope.get("factor", "missing"), rope["original_max_position_embeddings"]
    if factor is None and isinstance(original, int | float):  # as long as the model is
        factor = max_positions / original
    if not isinstance(factor, int | float):
        return {**rope, "factor": None}

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below, given = rope.get("mscale"), rope.get("mscale_all_dim"), rope.get("attention_factor")
    inferred = scale(above) / scale(below) if above and below else scale(1.0)
    return {
        "truncate": True,
        **rope,
        "theta": theta,
        "factor": factor,
        "attention_factor": inferred if given is None else given,
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
    }
