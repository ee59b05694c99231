"""A request as the caller sees it: what is accepted, its n choices with their text, and the output made of them."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import chain
from operator import index

from nanovllm.config import EngineConfig
from nanovllm.engine.logprobs import GrowingLogprobs, OutputLogprobs, without_text
from nanovllm.engine.plan import TokenLogprobs
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SpeculationStats
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import Detokenizer

MakeDetokenizer = Callable[[list[int], SamplingParams], Detokenizer]  # from the prompt's token ids and the parameters


class ContextLengthExceeded(ValueError):
    """A request has more tokens than the model's context, or the memory, can ever hold."""


@dataclass(slots=True, eq=False)
class Choice:
    """One of the n continuations of a prompt: its sequence, and what the caller is shown of it."""

    seq: Sequence
    detokenizer: Detokenizer | None
    logprobs: GrowingLogprobs | None = None  # set if the request asks for them

    def __post_init__(self) -> None:
        if self.seq.params.logprobs is not None:
            self.logprobs = GrowingLogprobs(None if self.detokenizer is None else self.detokenizer.logprobs)

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.seq.choice,
            text="" if self.detokenizer is None else self.detokenizer.text,
            token_ids=self.seq.token_ids[self.seq.num_prompt_tokens :],
            cumulative_logprob=None if self.logprobs is None else self.logprobs.total,
            logprobs=None if self.logprobs is None else OutputLogprobs(self.logprobs),
            finish_reason=self.seq.finish_reason,
            stop_reason=self.seq.stop_reason,
        )


@dataclass(slots=True, eq=False)
class Request:
    """What `add_request` was given, and the choices made from it."""

    request_id: str
    prompt: str | None  # the text, where the caller gave one
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    choices: list[Choice] = field(default_factory=list)
    held: list[Sequence] = field(default_factory=list)  # choices that wait for the first one to compute the prompt
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # once all are known
    finished_time: float | None = None

    @property
    def finished(self) -> bool:
        return all(choice.seq.finish_reason is not None for choice in self.choices)

    def metrics(self) -> RequestMetrics:
        first = self.choices[0].seq
        first_tokens = [t for choice in self.choices if (t := choice.seq.first_token_time) is not None]
        return RequestMetrics(
            arrival_time=self.arrival_time,
            first_scheduled_time=first.first_scheduled_time,
            first_token_time=min(first_tokens, default=None),
            finished_time=self.finished_time,
            num_cached_tokens=first.num_cached_tokens,
            num_preemptions=sum(choice.seq.num_preemptions for choice in self.choices),
            speculation=SpeculationStats.total(choice.seq.speculation for choice in self.choices),
        )

    def output(self) -> RequestOutput:
        first = self.choices[0].seq
        if self.params.prompt_logprobs is not None and len(first.prompt_logprobs) == first.num_to_score:
            self.prompt_logprobs = self.prompt_logprobs or self._with_text(first.prompt_logprobs)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[choice.output() for choice in self.choices],
            finished=self.finished,
            metrics=self.metrics(),
        )

    def _with_text(self, found: list[TokenLogprobs]) -> list[dict[int, Logprob] | None]:
        detokenizer = self.choices[0].detokenizer
        if detokenizer is None:
            return [None, *map(without_text, found)]
        return [None, *detokenizer.prompt_logprobs(self.prompt_token_ids, found)]


def check_request(
    prompt_token_ids: SequenceOf[int],
    params: SamplingParams,
    vocab_size: int,
    eos_token_ids: frozenset[int],
    config: EngineConfig,
) -> tuple[list[int], int]:
    """The prompt as a list of plain integers, and the number of tokens at which the request ends with "length".

    Raises ValueError for a request that could never run, and TypeError for ids that are not integers. The server's API
    processes ask here, too: they have no engine.
    """
    prompt = check_token_ids(prompt_token_ids, params, vocab_size)
    if params.bad_words and not params.bad_words_ids:
        raise ValueError(f"bad_words={params.bad_words!r} has no token ids here; see nanovllm/text/bad_words.py")
    check_something_is_left(params, eos_token_ids)
    return prompt, length_limit(len(prompt), params, config)


def check_token_ids(prompt_token_ids: SequenceOf[int], params: SamplingParams, vocab_size: int) -> list[int]:
    """The prompt as a list of plain integers.

    Raises ValueError for an empty prompt and for ids, or a number of logprobs, that the vocabulary does not have, and
    TypeError for ids that are not integers.
    """
    try:
        if isinstance(prompt_token_ids, bytes | bytearray):  # integers, but hardly meant as ids
            raise TypeError("got bytes, which must be decoded to a text first")
        if hasattr(prompt_token_ids, "tolist"):  # an array or a tensor
            prompt_token_ids = prompt_token_ids.tolist()
        prompt = list(map(index, prompt_token_ids))
    except TypeError as error:
        raise TypeError(f"prompt_token_ids must be integers, as a tokenizer returns them: {error}") from None
    if not prompt:
        raise ValueError("prompt_token_ids is empty; give at least one token, for example the model's BOS token")
    named = {
        "prompt_token_ids": prompt,
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "bad_words": list(chain.from_iterable(params.bad_words_ids)),
    }
    for name, ids in named.items():
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            where = f"outside the vocabulary (0 to {vocab_size - 1})"
            raise ValueError(f"{name} contains {wrong}, which is {where}; use this model's tokenizer")
    for name, number in ("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs):
        if number is not None and number > vocab_size:
            raise ValueError(f"{name}={number} is more than the vocabulary has tokens ({vocab_size}); lower it")
    return prompt


def check_something_is_left(params: SamplingParams, eos_token_ids: frozenset[int]) -> None:
    """Raises ValueError where no token could ever come first: other parameters rule out all of `allowed_token_ids`."""
    if params.allowed_token_ids is None:
        return
    ids = set(params.allowed_token_ids)
    ruled_out = {word[0] for word in params.bad_words_ids if len(word) == 1}
    if params.min_tokens:
        ruled_out |= eos_token_ids.union(params.stop_token_ids)
    if ids <= ruled_out:
        raise ValueError(f"allowed_token_ids: bad_words and min_tokens rule out all {len(ids)} of them; allow others")


def length_limit(num_prompt_tokens: int, params: SamplingParams, config: EngineConfig) -> int:
    """The number of tokens, prompt included, at which the request will end with "length".

    Raises ContextLengthExceeded, with the limit by name, for a request that could never run to that end.
    """
    assert config.max_model_len and config.num_kv_blocks and config.kvcache_block_size
    prompt = f"the prompt has {num_prompt_tokens} tokens"
    if num_prompt_tokens >= config.max_model_len:
        raise ContextLengthExceeded(
            f"{prompt}, but prompt and output together may have max_model_len={config.max_model_len}; shorten it, or "
            "raise max_model_len"
        )
    if not config.enable_chunked_prefill and num_prompt_tokens > config.max_num_batched_tokens:
        raise ContextLengthExceeded(
            f"{prompt}, more than max_num_batched_tokens={config.max_num_batched_tokens}; raise that, or set "
            f"enable_chunked_prefill=True"
        )
    limit = config.max_model_len
    if params.max_tokens is not None:
        limit = min(limit, num_prompt_tokens + params.max_tokens)
    slots = config.num_kv_blocks * config.kvcache_block_size
    if limit - 1 > slots:  # the KV of the last token is never needed
        raise ContextLengthExceeded(
            f"{prompt}, so that with max_tokens={params.max_tokens} it needs {limit - 1} KV slots, but the pool has "
            f"{slots} (num_kv_blocks={config.num_kv_blocks} of kvcache_block_size={config.kvcache_block_size}); lower "
            f"max_tokens or max_model_len, or enlarge the KV cache"
        )
    return limit
