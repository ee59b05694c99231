"""The transformer in plain PyTorch: Qwen3, Qwen2 and the Llama family, with attention passed in.

The model never sees a batch. Tokens of all sequences are laid end to end in one dimension T; every layer but attention
treats each token on its own, so batching, chunking, paging and prefix hits never touch this file. Attention is the
only part that knows which tokens belong together, and the caller hands it in as a function:

    attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D]

T tokens, H hidden size, Hq query heads, Hkv key/value heads, D head dimension, V vocabulary. Module names are those of
the checkpoint, so that loading is a comparison of two sets of names.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

# On the newest GPUs PyTorch would leave attention to cuDNN, which plans anew for each length that it sees.
torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that fix the architecture (the names are Hugging Face's)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    qk_norm: bool  # Qwen3: RMSNorm on every head of q and k
    qkv_bias: bool  # Qwen2: q, k, v have biases
    o_bias: bool
    mlp_bias: bool
    dtype: torch.dtype


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 (Zhang & Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, D/2] of the rotary angles (Su et al., "RoFormer", 2021).

    In float32 whatever the model's dtype: at position 4095 a bf16 angle is wrong by whole radians.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float()[:, None] * theta**-exponent  # [T, D/2]
    return angles.cos()[:, None], angles.sin()[:, None]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + D/2]) of a head by its angle. x [T, heads, D] -> [T, heads, D]"""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=c.o_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))  # [T, Hq, D]
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))  # [T, Hkv, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, Hkv, D]
        out = attend(layer, apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)  # [T, Hq, D]
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """Token ids and their positions in, hidden states out; `logits` turns the few that are sampled into scores."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """input_ids [T] int64, positions [T] int64 -> hidden [T, H] in the model's dtype."""
        cos, sin = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        x = self.embed_tokens(input_ids)  # [T, H]
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, i, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 [N, V]. Separate from forward: only tokens that are sampled need it."""
        head = self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight
        return F.linear(hidden, head).float()
