"""Qwen2 and 2.5 ("Qwen2 Technical Report", 2024): biases on q, k and v, and nowhere else."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.variant import Variant


def qwen2(raw: Mapping[str, Any]) -> Variant:
    """The biases are part of the architecture: config.json does not mention them."""
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    return Variant(head_dim=head_dim, qk_norm=False, qkv_bias=True, o_bias=False, mlp_bias=False)
