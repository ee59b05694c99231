"""What config.json says of quantised weights. Read are weights in FP8 (e4m3), each with the scales that widen it.

Two layouts are understood. Both have, beside the `weight` [out, in] of a linear layer, a tensor of scales in floating
point, and a weight is its stored value times its scale.

- Qwen's and DeepSeek's own, quant_method "fp8" ("DeepSeek-V3 Technical Report", 2024): `weight_scale_inv` has a scale
  for each block of 128 x 128. (The "inverse" is that of the factor by which the weights were multiplied.)
- compressed-tensors, format "float-quantized": `weight_scale` [out, 1] has a scale for each output channel.

Which layers are in FP8, the dtypes in the files say. Activations are quantised by what they are at the moment
("dynamic"), if at all. Everything else is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BLOCK = 128
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
DYNAMIC = {"activation_scheme": "dynamic", "fmt": "e4m3", "kv_cache_scheme": None}  # or the keys are absent
REMEDY = "use an unquantised checkpoint, which quantization='fp8' quantises"


@dataclass(frozen=True)
class Fp8Format:
    """scale: name of the scales, in the place of "weight". block: rows and columns of a scale; None: a row each."""

    scale: str
    block: tuple[int, int] | None


PER_CHANNEL = Fp8Format("weight_scale", None)  # also that of what is quantised here
PER_BLOCK = Fp8Format("weight_scale_inv", (BLOCK, BLOCK))


def parse_quantization(raw: Mapping[str, Any]) -> Fp8Format | None:
    """None: the weights are not quantised. Raises ValueError for what is not understood, with key, value and remedy."""
    said = raw.get("quantization_config")
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise ValueError(f"quantization_config must be an object; got {said!r}; mend it, or leave it out")
    method = said.get("quant_method")
    if method == "fp8":
        expect({**DYNAMIC, **said}, {**DYNAMIC, "weight_block_size": [BLOCK, BLOCK]})
        return PER_BLOCK
    if method == "compressed-tensors":
        expect(said, {"format": "float-quantized", "kv_cache_scheme": None})
        refuse_transforms(said)
        groups = said.get("config_groups")
        for name, group in groups.items() if isinstance(groups, Mapping) and groups else [("group_0", None)]:
            group, where = group if isinstance(group, Mapping) else {}, f"config_groups.{name}."
            expect(group, {"targets": ["Linear"], "output_activations": None}, where)
            expect(group.get("weights") or {}, WEIGHTS, f"{where}weights.")
            expect(group.get("input_activations") or {}, ACTIVATIONS, f"{where}input_activations.")
        return PER_CHANNEL
    raise refusal("quant_method", method, "'fp8' and 'compressed-tensors'")


def expect(said: Mapping[str, Any], wanted: Mapping[str, Any], where: str = "") -> None:
    for key, value in wanted.items():
        if said.get(key) != value:
            raise refusal(f"{where}{key}", said.get(key), repr(value))


def refuse_transforms(said: Mapping[str, Any]) -> None:
    """compressed-tensors can say that weights are sparse, or rotated. Empty objects say that they are not."""
    if said.get("transform_config"):
        raise refusal("transform_config", said["transform_config"], "none")
    sparsity = said.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise refusal("sparsity_config.format", sparsity["format"], "'dense'")


def refusal(key: str, value: Any, supported: str) -> ValueError:
    return ValueError(f"quantization_config.{key}={value!r} is not supported; supported is {supported}; {REMEDY}")
