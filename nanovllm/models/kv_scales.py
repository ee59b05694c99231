"""The scales of a KV cache in FP8, if a checkpoint has them: one for the keys of a layer, and one for the values.

Checkpoints use several names for them: here they are the names that vLLM knows. A layer without scales has 1.0. Some
checkpoints have -1 where a scale was not determined, which counts as 1.0 too. The scales are used only if the KV cache
is in FP8.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from nanovllm.attention.interface import KVScales

NAME = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:attn\.|[kv]_proj\.|qkv_proj\.)?(?P<part>k|v|kv)_scale|(?P<old>k|v)_proj\.output_scale)"
)


def take_kv_scales(found: Mapping[str, Any], num_layers: int) -> tuple[dict[str, Any], list[KVScales], list[str]]:
    """Of `found` (name to `loader.Stored`): all that is no such scale, the scales of each layer, and complaints."""
    others, scales, complaints = dict[str, Any](), [KVScales()] * num_layers, list[str]()
    for name, stored in found.items():
        match = NAME.fullmatch(name)
        if match is None or int(match["layer"]) >= num_layers:
            others[name] = stored
            continue
        value = stored.tensor().double().flatten().tolist()
        if value == [-1.0]:
            continue
        if len(value) != 1 or not 0 < value[0] < math.inf:
            complaints.append(f"{name} must be one positive number, and is {value[:4]}")
            continue
        layer, part = int(match["layer"]), match["part"] or match["old"]
        scales[layer] = scales[layer]._replace(**dict.fromkeys(part, value[0]))
    return others, scales, complaints
