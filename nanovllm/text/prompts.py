"""Check a prompt and find its token ids, by the same rules offline, in `AsyncLLM` and in the server's API processes."""

from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.text.tokenizer import Tokenizer

PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


def encode_prompt(prompt: Mapping[str, Any], tokenizer: Tokenizer | None) -> Sequence[int]:
    """The token ids of {"prompt": text} or {"prompt_token_ids": ids}, both with an optional "cache_salt".

    Token ids are not checked here: `LLMEngine.add_request` does that. Raises TypeError for an unknown key or a value of
    the wrong type, and ValueError for a text that cannot be encoded and for a prompt that has neither text nor ids.
    """
    if not isinstance(prompt, Mapping):
        raise TypeError(f"a prompt must be a dict with the key 'prompt' or 'prompt_token_ids'; got {prompt!r:.100}")
    if unknown := sorted(prompt.keys() - PROMPT_KEYS):
        raise TypeError(f"a prompt has no key {unknown[0]!r}; supported are {', '.join(sorted(PROMPT_KEYS))}")
    for key in ("prompt", "cache_salt"):
        if not isinstance(prompt.get(key), str | None):
            raise TypeError(f"{key} must be a string; got {prompt[key]!r}")
    if any("\ud800" <= c <= "\udfff" for c in prompt.get("prompt") or ""):
        raise ValueError(f"prompt has half a surrogate pair, which is no character; got {prompt['prompt']!r}")
    if "prompt_token_ids" in prompt:
        ids: Sequence[int] = prompt["prompt_token_ids"]
        return ids
    if prompt.get("prompt") is None:
        raise ValueError(f"a prompt needs the key 'prompt' or 'prompt_token_ids'; got {sorted(prompt)}")
    if tokenizer is None:
        raise ValueError("a text prompt needs the tokenizer; pass token ids, or leave skip_tokenizer_init out")
    return tokenizer.encode(prompt["prompt"])
