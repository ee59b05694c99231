"""What is refused when a request is added, so that nothing that could never run gets into a queue."""

from collections.abc import Sequence
from operator import index

from nanovllm.config import EngineConfig
from nanovllm.sampling_params import SamplingParams


def check_token_ids(prompt_token_ids: Sequence[int], params: SamplingParams, vocab_size: int) -> list[int]:
    """The prompt as a list of plain integers.

    Raises ValueError for an empty prompt and for ids, or a number of logprobs, that the vocabulary does not have, and
    TypeError for ids that are not integers.
    """
    try:
        if isinstance(prompt_token_ids, bytes | bytearray):  # integers, but hardly meant as ids
            raise TypeError("got bytes, which must be decoded to a text first")
        prompt = list(map(index, prompt_token_ids))
    except TypeError as error:
        raise TypeError(f"prompt_token_ids must be integers, as a tokenizer returns them: {error}") from None
    if not prompt:
        raise ValueError("prompt_token_ids is empty; give at least one token, for example the model's BOS token")
    for name, ids in ("prompt_token_ids", prompt), ("stop_token_ids", list(params.stop_token_ids)):
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            where = f"outside the vocabulary (0 to {vocab_size - 1})"
            raise ValueError(f"{name} contains {wrong}, which is {where}; use this model's tokenizer")
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise ValueError(f"logprobs={params.logprobs} is more than the vocabulary has tokens ({vocab_size}); lower it")
    return prompt


def length_limit(num_prompt_tokens: int, params: SamplingParams, config: EngineConfig) -> int:
    """The number of tokens, prompt included, at which the request will end with "length".

    Raises ValueError, with the limit by name, for a request that could never run to that end.
    """
    assert config.max_model_len and config.num_kv_blocks and config.kvcache_block_size
    prompt = f"the prompt has {num_prompt_tokens} tokens"
    if num_prompt_tokens >= config.max_model_len:
        raise ValueError(
            f"{prompt}, but prompt and output together may have max_model_len={config.max_model_len}; shorten it, or "
            f"raise max_model_len"
        )
    if not config.enable_chunked_prefill and num_prompt_tokens > config.max_num_batched_tokens:
        raise ValueError(
            f"{prompt}, more than max_num_batched_tokens={config.max_num_batched_tokens}; raise that, or set "
            f"enable_chunked_prefill=True"
        )
    limit = config.max_model_len
    if params.max_tokens is not None:
        limit = min(limit, num_prompt_tokens + params.max_tokens)
    slots = config.num_kv_blocks * config.kvcache_block_size
    if limit - 1 > slots:  # the KV of the last token is never needed
        raise ValueError(
            f"{prompt}, so that with max_tokens={params.max_tokens} it needs {limit - 1} KV slots, but the pool has "
            f"{slots} (num_kv_blocks={config.num_kv_blocks} of kvcache_block_size={config.kvcache_block_size}); lower "
            f"max_tokens or max_model_len, or enlarge the KV cache"
        )
    return limit
