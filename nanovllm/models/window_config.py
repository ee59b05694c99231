"""What config.json says of sliding windows: how far back each layer looks (Beltagy et al., "Longformer", 2020; Jiang et
al., "Mistral 7B", 2023).

The families differ in which layers have a window, in whether config.json has to switch it on, and in its default. All
that is data, in `models/families.py`. The functions here decide what Hugging Face's classes decide.
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

    # Which layers have a window. "always": every layer, whatever `layer_types` says. The other rules hold where
    # config.json has no `layer_types`. "all": every layer. "upper": layers from `max_window_layers` on. "alternate":
    # every other layer below `max_window_layers`, from the first on. "pattern": all but every
    # `sliding_window_pattern`-th layer
    layers: Literal["always", "all", "upper", "alternate", "pattern"] = "upper"
    has_switch: bool = True  # whether windows count only with `use_sliding_window`
    default: int | None = 4096  # of `sliding_window`, where the key is absent; null is no window


def parse_windows(raw: Mapping[str, Any], keys: WindowKeys | None, max_positions: int) -> tuple[int, ...]:
    """The window of each layer: how many keys a query sees at most, its own included. 0 is no limit.

    keys: of the family; None: its layers have no windows. max_positions: tokens of the longest text.

    Raises ValueError for kinds of layers that are not known, and for a window that is no positive number.
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
    """The window of those layers that have one. None: windows are not switched on, or the window is null."""
    if keys is None or (keys.has_switch and not raw.get("use_sliding_window")):
        return None
    window: int | None = raw.get("sliding_window", keys.default)
    return window


def layer_types(raw: Mapping[str, Any], keys: WindowKeys | None) -> list[str]:
    """The kind of each layer: "full_attention" or "sliding_attention". Raises ValueError as `parse_windows`."""
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
    """The same windows for texts of up to `max_len` tokens: a window of `max_len` or more is no limit, so it is 0."""
    return tuple(0 if window >= max_len else window for window in windows)


def reach(windows: Sequence[int]) -> int:
    """How many keys a query sees at most in any layer, its own included; 0 if some layer has no window."""
    return 0 if 0 in windows else max(windows)
