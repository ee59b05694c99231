"""Rotary position embedding (Su et al., "RoFormer", 2021) and its scalings for long texts.

A scaling here may change the frequencies and the length of the rotated vectors, once and for every position. A scaling
whose frequencies depend on the length of the text has no place here: keys in the KV cache are never rotated again.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor` (kaiokendev; Chen et al., "Extending Context Window ...", 2023)."""

    factor: float

    def apply(self, frequencies: Tensor) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: slow rotations are divided by `factor`, fast ones kept, and those between interpolated.

    A rotation is slow if it turns fewer than `low_freq_factor` times within `original_max_position_embeddings`
    positions, and fast if it turns more than `high_freq_factor` times.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def apply(self, frequencies: Tensor) -> Tensor:
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies * keep + frequencies / self.factor * (1 - keep)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): as `Llama3Scaling`, but interpolated between dimensions, not between frequencies.

    A rotation is slow if it turns fewer than `beta_slow` times within `original_max_position_embeddings` positions, and
    fast if it turns more than `beta_fast` times. Slow rotations are divided by `factor`, fast ones are kept.
    `attention_factor` multiplies cos and sin, so that the scores of q and k grow by its square. `truncate` rounds the
    dimensions between which the interpolation runs.
    """

    theta: float
    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool

    def apply(self, frequencies: Tensor) -> Tensor:
        half = len(frequencies)

        def dimension(turns: float) -> float:
            angle = turns * 2 * math.pi
            return half * math.log(self.original_max_position_embeddings / angle) / math.log(self.theta)

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        if low == high:
            high += 0.001
        divided = (torch.arange(half, dtype=torch.float32, device="cpu") - low) / (high - low)  # [D/2]
        divided = divided.clamp(0, 1)
        return frequencies / self.factor * divided + frequencies * (1 - divided)


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK: no change up to the model's `max_position_embeddings`, and what lies beyond is refused.

    Beyond, the frequencies follow the length of the text so far, and the keys in the KV cache would be out of date.
    """

    factor: float

    def apply(self, frequencies: Tensor) -> Tensor:
        return frequencies


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | DynamicScaling


class RotaryEmbedding(nn.Module):
    """The table of cos and sin for every position up to `max_positions`, computed once.

    Angles and table are float32 whatever the model's dtype: at position 4095 a bf16 angle is wrong by whole radians.
    They are computed on the CPU, so that every device holds the same table.
    """

    table: Tensor

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None, max_positions: int) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        frequencies = 1.0 / theta**exponents  # [D/2], radians a position
        if scaling is not None:
            frequencies = scaling.apply(frequencies)
        positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
        angles = positions[:, None] * frequencies  # [L, D/2]
        table = torch.stack((angles.cos(), angles.sin()), dim=1)  # [L, 2, D/2]
        if isinstance(scaling, YarnScaling):
            table *= scaling.attention_factor
        self.register_buffer("table", table.to(torch.get_default_device()), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin [T, 1, D] float32, for `apply_rope`."""
        cos, sin = self.table[positions].unbind(1)  # [T, D/2] each
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) of a head by its angle, in float32.

    x [T, heads, D] -> [T, heads, D] in the dtype of x, contiguous. cos and sin [T, 1, D] are those of
    `RotaryEmbedding`: the first half of sin is negated, so that a roll by D/2 swaps the pairs.
    """
    x32 = x.float()
    return torch.addcmul(x32 * cos, x32.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


class Rotation:
    """Turns the heads of one step's tokens. Without a fused kernel cos and sin are made once, for all layers."""

    def __init__(self, rotary: RotaryEmbedding, positions: Tensor) -> None:
        self.rotary = rotary
        self.positions = positions  # [T]

    @cached_property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """[T, 1, D] float32 each."""
        cos, sin = self.rotary(self.positions)
        return cos, sin

    def apply(self, x: Tensor) -> Tensor:
        """x [T, heads, D] -> [T, heads, D], turned."""
        return apply_rope(x, *self.cos_sin)
