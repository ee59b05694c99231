"""The model families, Llama, Qwen2 and Qwen3, as data: what differs between them. All else is one decoder.

- Llama 2 and 3 ("The Llama 3 Herd of Models", 2024) and the many models that took their shape, SmolLM2 among them:
  biases only where config.json asks for them.
- Qwen2 and 2.5 ("Qwen2 Technical Report", 2024): biases on q, k and v, and nowhere else. They are part of the
  architecture, and config.json does not mention them.
- Qwen3 ("Qwen3 Technical Report", 2025): each head of q and k is normalised, and a head has 128 dimensions unless
  config.json says otherwise, whatever the hidden size.
"""

from typing import NamedTuple


class Family(NamedTuple):
    """The switches of the decoder, and what holds where config.json is silent.

    A bias is True, False, or the key of config.json that decides, where that key is absent False.
    """

    head_dim: int | None  # None: hidden_size / num_attention_heads
    max_position_embeddings: int
    qk_norm: bool  # RMSNorm on each head of q and k, before RoPE
    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str


# By the `model_type` of config.json
FAMILIES = {
    "llama": Family(
        head_dim=None,
        max_position_embeddings=2048,
        qk_norm=False,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "qwen2": Family(
        head_dim=None, max_position_embeddings=32768, qk_norm=False, qkv_bias=True, o_bias=False, mlp_bias=False
    ),
    "qwen3": Family(
        head_dim=128,
        max_position_embeddings=32768,
        qk_norm=True,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias=False,
    ),
}
