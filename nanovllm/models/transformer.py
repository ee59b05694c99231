"""The decoder that all model families have in common, with attention passed in.

The model never sees a batch: the tokens of all sequences are laid end to end, and every layer but attention treats each
token on its own. Attention alone knows which tokens belong together, and the caller passes it in.

T tokens, H hidden size, Hq query heads, Hkv KV heads, D head dimension, I intermediate size, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm import kernels
from nanovllm.attention.interface import UNSCALED, BoundAttention
from nanovllm.distributed.group import Group
from nanovllm.layers.linear import Embedding, Linear, MergedLinear, ScaledEmbedding, SubLayerOutput
from nanovllm.layers.norm import OffsetRMSNorm, RMSNorm
from nanovllm.layers.rope import LinearScaling, RotaryEmbedding, Rotation
from nanovllm.models.config import ModelConfig
from nanovllm.models.mlp import MLP, GeluMLP, MoE

# attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D], called after q/k-norm and RoPE. v is a view
# into a larger tensor: contiguous within a token, not from one token to the next.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def make_norm(c: ModelConfig, size: int) -> RMSNorm:
    return RMSNorm(size, c.rms_norm_eps, dtype=c.dtype) if c.gemma is None else OffsetRMSNorm(size, c.rms_norm_eps)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig, layer: int, group: Group | None) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = c.head_dim
        self.eps = c.rms_norm_eps
        self.heads = (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)
        q_size, kv_size, _ = (n * c.head_dim for n in self.heads)
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(c.hidden_size, parts, bias=c.qkv_bias, dtype=c.dtype)
        self.o_proj = Linear(q_size, c.hidden_size, bias=c.o_bias, dtype=c.dtype, group=group)
        self.q_norm = make_norm(c, c.head_dim) if c.qk_norm else None
        self.k_norm = make_norm(c, c.head_dim) if c.qk_norm else None

    def mix(self, qkv: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """What lies between the two projections: qkv [T, (Hq + 2 Hkv) D] -> [T, Hq D]"""
        qkv = qkv.unflatten(-1, (-1, self.head_dim))  # [T, Hq + 2 Hkv, D]
        fused = kernels.fused_kernels(qkv.device).norm_rope_write
        is_power_of_two = self.head_dim & (self.head_dim - 1) == 0  # Triton's vectors have such lengths only
        if fused is not None and isinstance(attend, BoundAttention) and is_power_of_two:
            norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)
            kv, slots, scales = attend.kv[self.layer], attend.meta.slots, attend.scales[self.layer]
            q = fused(qkv, kv, norms, rotation.rotary.table, rotation.positions, slots, self.eps, scales)  # [T, Hq, D]
            return attend.read(self.layer, q).flatten(1)
        q, k, v = qkv.split(self.heads, dim=1)  # views
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return attend(self.layer, rotation.apply(q), rotation.apply(k), v).flatten(1)


class Layer(nn.Module):
    """Attention, then an MLP or experts. Takes and returns (x, residual): the next norm does the addition after each.

    The first layer is given no residual.
    """

    def __init__(self, c: ModelConfig, layer: int, group: Group | None) -> None:
        super().__init__()
        self.is_local = layer in c.without_rope  # whether it uses `Transformer.local_rotary`
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=c.dtype)
        self.self_attn = Attention(c, layer, group)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype=c.dtype)
        moe = None if c.moe is None or layer in c.moe.dense_layers else c.moe
        self.mlp = MLP(c, c.intermediate_size, group) if moe is None else MoE(c, moe, group)

    def forward(
        self, x: SubLayerOutput, residual: Tensor | None, rotation: Rotation, attend: Attend
    ) -> tuple[SubLayerOutput, Tensor]:
        attention, mlp = self.self_attn, self.mlp
        qkv, residual = self.input_layernorm.add_then(attention.qkv_proj, x, residual)
        x = attention.o_proj.partial(attention.mix(qkv, rotation, attend))
        if isinstance(mlp, MLP):
            inner, residual = self.post_attention_layernorm.add_then(mlp.gate_up_proj, x, residual, gated=True)
            return mlp.down_proj.partial(inner), residual
        normed, residual = self.post_attention_layernorm.add(x, residual)
        return mlp(normed), residual


class GemmaLayer(nn.Module):
    """A layer of Gemma 3: attention, then an MLP, each between two norms. Otherwise as `Layer`."""

    def __init__(self, c: ModelConfig, layer: int, group: Group | None) -> None:
        super().__init__()
        assert c.gemma is not None
        self.is_local = layer in c.gemma.local_layers
        self.input_layernorm = make_norm(c, c.hidden_size)
        self.self_attn = Attention(c, layer, group)
        self.post_attention_layernorm = make_norm(c, c.hidden_size)
        self.pre_feedforward_layernorm = make_norm(c, c.hidden_size)
        self.mlp = GeluMLP(c, c.intermediate_size, group)
        self.post_feedforward_layernorm = make_norm(c, c.hidden_size)

    def forward(self, x: Tensor, residual: Tensor | None, rotation: Rotation, attend: Attend) -> tuple[Tensor, Tensor]:
        normed, residual = self.input_layernorm.add(x, residual)
        mixed = self.self_attn.mix(self.self_attn.qkv_proj(normed), rotation, attend)
        x, _ = self.post_attention_layernorm.add(self.self_attn.o_proj(mixed), None)
        normed, residual = self.pre_feedforward_layernorm.add(x, residual)
        x, _ = self.post_feedforward_layernorm.add(self.mlp(normed), None)
        return x, residual


class Transformer(nn.Module):
    """From token ids and positions to hidden states; `logits` turns those of the tokens that are sampled into scores.

    Parameters are left uninitialised, on torch's default device: the loader fills them. `max_model_len` is the number
    of positions that the rotary table covers; a position beyond it is an index error. With a group of several ranks,
    `c` is the rank's own share (`sharding.shard_config`), and `logits` has the rank's own part of the vocabulary.
    """

    def __init__(self, c: ModelConfig, max_model_len: int, group: Group | None = None) -> None:
        super().__init__()
        self.config = c
        self.rotary = RotaryEmbedding(c.head_dim, c.rope_theta, c.rope_scaling, max_model_len)
        self.local_rotary = self.rotary  # of Gemma's layers with a window, and of layers without RoPE
        sizes = c.vocab_size, c.hidden_size
        self.embed_tokens: Embedding
        if c.gemma is None:
            self.embed_tokens = Embedding(*sizes, dtype=c.dtype, group=group)
            if c.without_rope:  # every angle is 0
                self.local_rotary = RotaryEmbedding(c.head_dim, c.rope_theta, LinearScaling(math.inf), max_model_len)
            layers: Iterable[nn.Module] = (Layer(c, i, group) for i in range(c.num_hidden_layers))
        else:
            local = c.gemma.local_rope_theta, c.gemma.local_rope_scaling
            self.local_rotary = RotaryEmbedding(c.head_dim, *local, max_model_len)
            self.embed_tokens = ScaledEmbedding(*sizes, c.gemma.embedding_scale, dtype=c.dtype, group=group)
            layers = (GemmaLayer(c, i, group) for i in range(c.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.kv_scales = [UNSCALED] * c.num_hidden_layers  # of each layer; a checkpoint may have others
        self.norm = make_norm(c, c.hidden_size)
        if not c.tie_word_embeddings:
            self.lm_head = Linear(c.hidden_size, c.vocab_size, bias=False, dtype=c.dtype)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """input_ids [T] int32, positions [T] int32 -> hidden [T, H], after the final norm."""
        rotation, local = (Rotation(rotary, positions) for rotary in (self.rotary, self.local_rotary))
        x: SubLayerOutput = self.embed_tokens(input_ids)  # [T, H]
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, local if layer.is_local else rotation, attend)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [N, H] -> [N, V] in the model's dtype, or into `out`. Apart from `forward`, because only tokens that
        are sampled need it."""
        head = self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight
        return F.linear(hidden, head) if out is None else torch.mm(hidden, head.t(), out=out)
