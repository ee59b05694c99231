"""Qwen3 ("Qwen3 Technical Report", 2025): each head of q and k is normalised, and head_dim stands on its own."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.variant import Variant


def qwen3(raw: Mapping[str, Any]) -> Variant:
    """Heads have 128 dimensions unless config.json says otherwise, whatever the hidden size."""
    bias = bool(raw.get("attention_bias", False))
    return Variant(head_dim=raw.get("head_dim") or 128, qk_norm=True, qkv_bias=bias, o_bias=bias, mlp_bias=False)
