"""The model families, as data: all that differs between them is a row of `FAMILIES`. Nothing here imports torch.

- Llama 2 and 3 ("The Llama 3 Herd of Models", 2024) and the many models that took their shape, SmolLM2 among them:
  biases only where config.json asks for them.
- Qwen2 and 2.5 ("Qwen2 Technical Report", 2024): biases on q, k and v, and nowhere else. They are part of the
  architecture, and config.json does not mention them.
- Qwen3 ("Qwen3 Technical Report", 2025): each head of q and k is normalised, and a head has 128 dimensions unless
  config.json says otherwise, whatever the hidden size.
- Mixtral ("Mixtral of Experts", 2024), Qwen2-MoE ("Qwen1.5-MoE", 2024) and Qwen3-MoE ("Qwen3 Technical Report", 2025):
  experts in place of the MLP, see `moe_config.py`. The rest of them is Llama, Qwen2 and Qwen3.
- Mistral ("Mistral 7B", 2023): Llama with a sliding window, see `window_config.py`. Hugging Face calls it Ministral if
  `layer_types` says which layers have the window.
- Gemma 3 ("Gemma 3 Technical Report", 2025), text alone: see `config.GemmaConfig`.
- SmolLM3 (Hugging Face, 2025): Llama, but every fourth layer has no RoPE, see `layers_without_rope`.
- Seed-OSS (ByteDance, 2025): Llama with biases on q, k and v, and none on o unless config.json says otherwise.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from nanovllm.models.moe_config import ExpertKeys
from nanovllm.models.window_config import WindowKeys

NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
Raw = Mapping[str, Any]


class Family(NamedTuple):
    """The switches of the decoder, and what holds where config.json is silent.

    A bias is True, False, or the key of config.json that decides. Where that key is absent there is no bias.
    """

    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    num_key_value_heads: int | None = 32  # None: num_attention_heads
    windows: WindowKeys | None = WindowKeys()  # None: no layer has one, whatever config.json says
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    qk_norm: bool = False  # RMSNorm on each head of q and k, before RoPE
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    experts: ExpertKeys | None = None  # None: an MLP in each layer
    tie_word_embeddings: bool = False
    is_gemma: bool = False  # see `config.GemmaConfig`
    without_rope: bool = False  # whether some layers have no RoPE, see `layers_without_rope`


MISTRAL = Family(
    num_key_value_heads=8,
    windows=WindowKeys("all", has_switch=False),
    max_position_embeddings=131072,
    qkv_bias=False,
    o_bias=False,
)
FAMILIES = {  # by the `model_type` of config.json
    "llama": Family(num_key_value_heads=None, windows=None, max_position_embeddings=2048, mlp_bias="mlp_bias"),
    "mistral": MISTRAL,
    "qwen2": Family(qkv_bias=True, o_bias=False),
    "qwen3": Family(head_dim=128, qk_norm=True),
    "mixtral": Family(
        num_key_value_heads=8,
        windows=WindowKeys("always", has_switch=False, default=None),
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        qkv_bias=False,
        o_bias=False,
        experts=ExpertKeys("intermediate_size", norm_topk_prob=True, dense_layers=False),
    ),
    "qwen2_moe": Family(
        num_key_value_heads=16,
        windows=WindowKeys("alternate"),
        qkv_bias=True,
        o_bias=False,
        experts=ExpertKeys(shared_intermediate_size="shared_expert_intermediate_size"),
    ),
    "qwen3_moe": Family(num_key_value_heads=4, windows=WindowKeys("always"), qk_norm=True, experts=ExpertKeys()),
    "gemma3_text": Family(
        head_dim=256,
        num_key_value_heads=4,
        windows=WindowKeys("pattern", has_switch=False),
        max_position_embeddings=131072,
        rope_theta=1e6,
        qk_norm=True,
        tie_word_embeddings=True,
        is_gemma=True,
    ),
    "ministral": MISTRAL,
    "smollm3": Family(
        num_key_value_heads=4, rope_theta=2e6, mlp_bias="mlp_bias", tie_word_embeddings=True, without_rope=True
    ),
    "seed_oss": Family(
        head_dim=128,
        num_key_value_heads=8,
        windows=None,
        max_position_embeddings=524288,
        o_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
}


def shape_of(raw: Raw, family: Family) -> dict[str, Any]:
    """What the parameters of all layers but experts follow from, by the names in `ModelConfig`.

    raw: config.json. Raises KeyError for a number of `NEEDED` that it lacks.
    """

    def has_bias(switch: bool | str) -> bool:
        return bool(raw.get(switch, False)) if isinstance(switch, str) else switch

    heads = raw["num_attention_heads"]
    return {
        **{key: raw[key] for key in NEEDED},
        "num_key_value_heads": raw.get("num_key_value_heads", family.num_key_value_heads) or heads,
        "head_dim": raw.get("head_dim") or family.head_dim or raw["hidden_size"] // heads,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", family.tie_word_embeddings)),
        "qk_norm": family.qk_norm,
        "qkv_bias": has_bias(family.qkv_bias),
        "o_bias": has_bias(family.o_bias),
        "mlp_bias": has_bias(family.mlp_bias),
    }


def layers_without_rope(raw: Raw) -> frozenset[int]:
    """The layers of SmolLM3 that have no RoPE (Yang et al., "Rope to Nope and Back Again", 2025): those with a 0 in
    `no_rope_layers`, or every `no_rope_layer_interval`-th. Raises ValueError if one of these keys is malformed."""
    num_layers, interval = raw["num_hidden_layers"], raw.get("no_rope_layer_interval", 4)
    if type(interval) is not int or interval < 1:
        raise ValueError(
            f"no_rope_layer_interval must be a positive number; got {interval!r}; mend it, or leave it out"
        )
    turned = raw.get("no_rope_layers")
    turned = [layer % interval for layer in range(1, num_layers + 1)] if turned is None else turned
    if not isinstance(turned, list) or len(turned) < num_layers or not all(type(number) is int for number in turned):
        raise ValueError(f"no_rope_layers must be a list with 0 or 1 for each layer; got {turned!r}; mend it")
    return frozenset(layer for layer in range(num_layers) if not turned[layer])
