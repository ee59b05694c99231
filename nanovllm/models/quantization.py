"""What config.json says of quantised weights: which layout of FP8 (e4m3) they have, if it is one that can be read.

There are two such layouts. In both, a linear layer has a tensor of scales beside its `weight` [out, in], and a weight
is its stored value times its scale.

- Qwen's and DeepSeek's own, quant_method "fp8" ("DeepSeek-V3 Technical Report", 2024): `weight_scale_inv` has a scale
  for each block of 128 x 128. (The scale is the inverse of the factor by which the weights were multiplied.)
- compressed-tensors, format "float-quantized": `weight_scale` [out, 1] has a scale for each output channel.

The dtypes in the files say which layers are in FP8. Activations may be quantised with scales that are found at each
step ("dynamic"). There may be scales for a KV cache in FP8 (`kv_scales.py`). Everything else is refused, and the error
names the key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BLOCK = 128
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
GROUP = {"targets": ["Linear"], "output_activations": None, "weights": WEIGHTS, "input_activations": ACTIVATIONS}
DYNAMIC = {"activation_scheme": "dynamic", "fmt": "e4m3"}  # or the keys are absent
KV_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
REMEDY = "use an unquantised checkpoint, which quantization='fp8' quantises"


@dataclass(frozen=True)
class Fp8Format:
    """A layout of weights in FP8.

    scale: the name that the scales have, in the place of "weight". block: the rows and columns that share a scale;
    None: each row has a scale.
    """

    scale: str
    block: tuple[int, int] | None


PER_CHANNEL = Fp8Format("weight_scale", None)  # also of weights that are quantised while they are loaded
PER_BLOCK = Fp8Format("weight_scale_inv", (BLOCK, BLOCK))


def parse_quantization(raw: Mapping[str, Any]) -> Fp8Format | None:
    """The layout of the weights; None: they are not quantised.

    Raises ValueError for any other layout, with the key, its value and a remedy.
    """
    said = raw.get("quantization_config")
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise ValueError(f"quantization_config must be an object; got {said!r}; mend it, or leave it out")
    check_kv_cache(said.get("kv_cache_scheme"))
    method = said.get("quant_method")
    if method == "fp8":
        expect({**DYNAMIC, **said}, {**DYNAMIC, "weight_block_size": [BLOCK, BLOCK]})
        return PER_BLOCK
    if method == "compressed-tensors":
        expect(said, {"format": "float-quantized"})
        refuse_transforms(said)
        groups = said.get("config_groups")
        for name, group in groups.items() if isinstance(groups, Mapping) and groups else [("group_0", None)]:
            expect({name: group}, {name: GROUP}, "config_groups.")
        return PER_CHANNEL
    raise refusal("quant_method", method, "'fp8' and 'compressed-tensors'")


def check_kv_cache(scheme: Any) -> None:
    """Raise ValueError for a KV cache that is not in FP8 with a scale per layer. A scheme changes nothing by itself."""
    if scheme is None or scheme == "static":
        return
    if not isinstance(scheme, Mapping) or any(scheme.get(key) != value for key, value in KV_CACHE.items()):
        raise refusal("kv_cache_scheme", scheme, repr(KV_CACHE))


def expect(said: Mapping[str, Any], wanted: Mapping[str, Any], where: str = "") -> None:
    """Raise ValueError if a key of `wanted` has another value in `said`, also inside of mappings. Other keys of `said`
    are not looked at. where: what leads to `said`, for the error."""
    for key, value in wanted.items():
        if isinstance(value, Mapping):
            expect(part if isinstance(part := said.get(key), Mapping) else {}, value, f"{where}{key}.")
        elif said.get(key) != value:
            raise refusal(f"{where}{key}", said.get(key), repr(value))


def refuse_transforms(said: Mapping[str, Any]) -> None:
    """Raise ValueError if weights are sparse or rotated, as compressed-tensors can say. Empty objects say neither."""
    if said.get("transform_config"):
        raise refusal("transform_config", said["transform_config"], "none")
    sparsity = said.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping):
        raise refusal("sparsity_config", sparsity, "an object")
    if sparsity.get("format", "dense") != "dense":
        raise refusal("sparsity_config.format", sparsity["format"], "'dense'")


def refusal(key: str, value: Any, supported: str) -> ValueError:
    return ValueError(f"quantization_config.{key}={value!r} is not supported; supported is {supported}; {REMEDY}")
