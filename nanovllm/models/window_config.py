"""What config.json says of sliding windows: how far back each layer looks (Beltagy et al., "Longformer", 2020; Jiang et
al., "Mistral 7B", 2023).

The families differ in which layers have the window, in the key that switches it on, and in its default. All that is
data, in `models/config.py`. What is decided here is what Hugging Face's classes decide.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

KINDS_FOR_WINDOWS: dict[str, tuple[type, ...]] = {
    "use_sliding_window": (bool,),
    "sliding_window": (int, type(None)),
    "max_window_layers": (int,),
    "sliding_window_pattern": (int,),
}
LIMITED, FULL = "sliding_attention", "full_attention"  # in `layer_types`


class WindowKeys(NamedTuple):
    """What a family makes of the keys in config.json."""

    # Layers with the window. "always": every one, whatever `layer_types` says. The others are for where there is no
    # such list. "all": every one. "upper": those from `max_window_layers` on. "alternate": every other one of those
    # below that, from the first on. "pattern": all but every `sliding_window_pattern`-th
    layers: Literal["always", "all", "upper", "alternate", "pattern"] = "upper"
    has_switch: bool = True  # whether the window counts only with `use_sliding_window`
    default: int | None = 4096  # where the key is absent; null is no window


def parse_windows(raw: Mapping[str, Any], keys: WindowKeys | None, max_positions: int) -> tuple[int, ...]:
    """For each layer how many keys a query sees at most, its own included; 0 is all that a text can have.

    Raises ValueError for kinds of layers that are not known, and for windows that are no positive number.
    """
    window = sliding_window(raw, keys)
    limited = [kind == LIMITED for kind in layer_types(raw, keys)]
    if any(limited) and (window is None or window < 1):
        raise ValueError(
            f"layers with {LIMITED} need a positive sliding_window; got {window!r}, or it is not switched on "
            f"(use_sliding_window); mend it, or name these layers {FULL} in layer_types"
        )
    return within([(window or 0) if has_window else 0 for has_window in limited], max_positions)


def sliding_window(raw: Mapping[str, Any], keys: WindowKeys | None) -> int | None:
    """What the layers have that have a window. None: it is not switched on, or null."""
    if keys is None or (keys.has_switch and not raw.get("use_sliding_window")):
        return None
    window: int | None = raw.get("sliding_window", keys.default)
    return window


def layer_types(raw: Mapping[str, Any], keys: WindowKeys | None) -> list[str]:
    """The kind of each layer: "full_attention", or "sliding_attention"."""
    layers, listed, window = raw["num_hidden_layers"], raw.get("layer_types"), sliding_window(raw, keys)
    if listed is not None and len(listed) != layers:
        raise ValueError(f"layer_types names {len(listed)} layers, and num_hidden_layers={layers}; mend one of them")
    if keys is None:
        return [FULL] * layers
    unknown = set(map(str, listed or ())) - {LIMITED, FULL}
    if unknown:
        raise ValueError(f"layers with {', '.join(sorted(unknown))} are not supported; {LIMITED} and {FULL} are")
    if keys.layers == "always" and window is not None:
        return [LIMITED] * layers
    if listed is not None:
        return list(listed)
    border, pattern = raw.get("max_window_layers", 28), raw.get("sliding_window_pattern", 6)
    if pattern < 1:
        raise ValueError(f"sliding_window_pattern must be a positive number; got {pattern!r}; mend it, or leave it out")
    if keys.layers == "pattern":
        return [LIMITED if (layer + 1) % pattern else FULL for layer in range(layers)]
    if window is None:
        return [FULL] * layers
    with_window = {"all": range(layers), "upper": range(border, layers), "alternate": range(0, border, 2)}[keys.layers]
    return [LIMITED if layer in with_window else FULL for layer in range(layers)]


def within(windows: Sequence[int], max_len: int) -> tuple[int, ...]:
    """The same windows for texts of up to `max_len` tokens: a window that is as long is no limit."""
    return tuple(0 if window >= max_len else window for window in windows)


def reach(windows: Sequence[int]) -> int:
    """How many keys some layer still looks at, a query's own included; 0 if a layer looks at all of them."""
    return 0 if 0 in windows else max(windows)
