"""The decoder that Llama, Qwen2 and Qwen3 have in common, with attention passed in.

It never sees a batch: the tokens of all sequences are laid end to end, and every layer but attention treats each token
on its own. Attention alone knows what belongs together, and the caller hands it in.

T tokens, H hidden size, Hq query heads, Hkv KV heads, D head dimension, I intermediate size, V vocabulary.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.activation import silu_and_mul
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import Linear, MergedLinear
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rope import RotaryEmbedding, apply_rope
from nanovllm.models.config import ModelConfig

# attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D], after q/k-norm and RoPE. v is a view into a
# larger tensor: contiguous within a token, not from one token to the next.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = c.head_dim
        self.heads = (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)
        q_size, kv_size, _ = (n * c.head_dim for n in self.heads)
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(c.hidden_size, parts, bias=c.variant.qkv_bias, dtype=c.dtype)
        self.o_proj = Linear(q_size, c.hidden_size, bias=c.variant.o_bias, dtype=c.dtype)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype=c.dtype) if c.variant.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype=c.dtype) if c.variant.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, Hq + 2 Hkv, D]
        q, k, v = qkv.split(self.heads, dim=1)  # views
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(self.layer, apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)  # [T, Hq, D]
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        parts = {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size}
        self.gate_up_proj = MergedLinear(c.hidden_size, parts, bias=c.variant.mlp_bias, dtype=c.dtype)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=c.variant.mlp_bias, dtype=c.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))


class Layer(nn.Module):
    """Takes and returns (x, residual): the addition that ends a half-layer is left to the norm that begins the next.

    The first layer is given no residual.
    """

    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=c.dtype)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=c.dtype)
        self.mlp = MLP(c)

    def forward(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, cos, sin, attend)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class Transformer(nn.Module):
    """Token ids and their positions in, hidden states out; `logits` turns the few that are sampled into scores.

    Parameters are left uninitialised, on torch's default device: the loader fills them. `max_model_len` is the number
    of positions that the rotary table covers; a position beyond it is an index error.
    """

    def __init__(self, c: ModelConfig, max_model_len: int) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, dtype=c.dtype)
        self.rotary = RotaryEmbedding(c.head_dim, c.rope_theta, c.rope_scaling, max_model_len)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=c.dtype)
        if not c.tie_word_embeddings:
            self.lm_head = Linear(c.hidden_size, c.vocab_size, bias=False, dtype=c.dtype)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """input_ids [T] int64, positions [T] int64 -> hidden [T, H], after the final norm."""
        cos, sin = self.rotary(positions)  # [T, 1, D]
        x: Tensor = self.embed_tokens(input_ids)  # [T, H]
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin, attend)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> [N, V] in the model's dtype. Apart from `forward`: only tokens that are sampled need it."""
        head = self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight
        return F.linear(hidden, head)
