"""What differs between the supported families: everything else is one and the same decoder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variant:
    """The switches of the decoder. Each family's file says how it reads them from config.json."""

    head_dim: int
    qk_norm: bool  # RMSNorm on each head of q and k, before RoPE
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool


ReadVariant = Callable[[Mapping[str, Any]], Variant]
