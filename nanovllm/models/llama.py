"""Llama 2 and 3 ("The Llama 3 Herd of Models", 2024) and the many models that took their shape, SmolLM2 among them."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.variant import Variant


def llama(raw: Mapping[str, Any]) -> Variant:
    """Biases only where config.json asks for them; `attention_bias` then covers the output projection too."""
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    attention_bias, mlp_bias = bool(raw.get("attention_bias", False)), bool(raw.get("mlp_bias", False))
    return Variant(head_dim, qk_norm=False, qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=mlp_bias)
