"""Token ids from other libraries: integers of numpy and torch, and what a tokenizer of `transformers` returns.

Neither library is imported here: arrays and tensors are recognised by their method `tolist`.
"""

from collections.abc import Mapping
from typing import Any

# What else a tokenizer of `transformers` returns with its ids. A prompt needs only the mask, which marks padding.
ASIDES = {"attention_mask", "token_type_ids", "special_tokens_mask", "assistant_masks", "offset_mapping", "length"}


def is_token_id(value: Any) -> bool:
    """Whether it is one integer, of Python or of another library."""
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0


def as_lists(value: Any) -> Any:
    """An array or a tensor as lists of numbers; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def prompts_of(encoding: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The prompts in what `apply_chat_template`, or a call of the tokenizer, returns: `input_ids` of one text or of
    several, as lists, arrays or tensors. Where there is an `attention_mask`, what it hides is padding, and left out.
    Keys that do not come from a tokenizer stay in every prompt."""
    rest = {key: value for key, value in encoding.items() if key != "input_ids" and key not in ASIDES}
    rows, masks = as_lists(encoding["input_ids"]), as_lists(encoding.get("attention_mask"))
    if not rows or is_token_id(rows[0]):
        rows, masks = [rows], None if masks is None else [masks]
    if masks is not None:
        rows = [
            [token for token, seen in zip(as_lists(row), as_lists(mask), strict=True) if seen]
            for row, mask in zip(rows, masks, strict=True)
        ]
    return [{"prompt_token_ids": row} | rest for row in rows]
