"""Which steps are recorded: those that take longer to launch than to compute."""

from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.config import EngineConfig
from nanovllm.engine.plan import Scheduled
from nanovllm.models.config import ModelConfig

# Tokens of a decode recording in which a sequence has several, and bytes of keys and values that these tokens may read
# per layer. Keys of a chunk count twice: a step has mostly one chunk, and recordings with prompts are fast for few
# sequences. On an H200 both kinds of recording take about as long for 32 sequences of 3 guesses each, behind 512 keys,
# and for a chunk of 64 behind 512 keys.
MAX_REPLAYED = 256
MAX_READ = 2**28
CHUNK_WEIGHT = 2
# So many times more, without counting twice, if no recording with prompts has room: launching a layer takes longer.
MORE_ALONE = 4
# Tokens of the recordings with prompts
PROMPT_SIZES = (64, 128, 256, *range(384, 1024, 128), *range(1024, 2048, 256), *range(2048, 4097, 512))
# Places of a recording with prompts: for sequences, the padding included, and for tokens that it samples, one for every
# guess included. A place costs a little even if it is empty, so there are recordings with few places, and with one for
# every sequence that may run.
FEW_PLACES = 64
# A step with at most so many tokens and `FEW_PLACES` sequences, in which a chunk follows at least so many keys, has
# kernels of its own for attention, and recordings of its own. With fewer keys or more tokens the usual kernels are
# faster on an H200.
MOST_CUT_TOKENS = 512
LONG_CONTEXT = 4096
FEW_CUT_TOKENS = 16  # of a chunk: up to here it is faster to compute them as decodes, if nothing else speaks against it
# Operations that an H200 does, at its measured rate for large products, in about the time that launching a layer kernel
# by kernel takes: a third of a millisecond
OPERATIONS_WHILE_LAUNCHING = 2 * 10**11


@dataclass(frozen=True)
class StepSizes:
    """The recordings of one model, by their numbers of tokens, ascending."""

    decodes: list[int]  # every token is a decode of its own
    prompts: list[int]  # the tokens are shared among sequences in any way; may be empty
    max_several: int  # tokens that a step may have for a decode recording if a sequence has several of them
    max_keys: int  # keys that such tokens may read, each token by itself; those of chunks count twice
    places: list[int]  # of the recordings with prompts, ascending; may be empty
    most_cut: int = 0  # tokens: up to here, recordings with prompts and few places have a twin for long contexts

    @property
    def with_prompts(self) -> list[tuple[int, int]]:
        """Tokens and places of each recording with prompts, ascending."""
        return [(tokens, places) for places in self.places for tokens in self.prompts]

    @property
    def for_long_contexts(self) -> list[tuple[int, int]]:
        """Those of `with_prompts` that have a twin."""
        return [(tokens, self.places[0]) for tokens in self.prompts if tokens <= self.most_cut]

    @property
    def num_logits(self) -> int:
        """Rows of logits of the largest recording."""
        return max([self.decodes[-1], *self.places])


def step_sizes(config: EngineConfig, model: ModelConfig) -> StepSizes:
    """For the target: decodes, guesses to verify, and prompts. `model` is this rank's share."""
    itemsize = 1 if config.fp8_kv_cache else model.dtype.itemsize
    key_bytes = 2 * model.num_key_value_heads * model.head_dim * itemsize
    max_sampled = 1 if config.speculation is None else 1 + config.speculation.k  # tokens of each sequence
    num_decodes = max(config.max_num_seqs, min(config.max_num_seqs * max_sampled, MAX_REPLAYED))
    decodes = batch_sizes(num_decodes, min(MAX_REPLAYED, config.max_num_batched_tokens))
    prompts = prompt_sizes(config, model)
    assert config.max_model_len is not None
    most_cut = MOST_CUT_TOKENS if config.max_model_len > LONG_CONTEXT else 0
    places = prompt_places(config) if prompts else []
    return StepSizes(decodes, prompts, MAX_REPLAYED, MAX_READ // key_bytes, places, most_cut)


def has_long_context(scheduled: Sequence[Scheduled]) -> bool:
    """Whether a chunk of several tokens, guesses not counted, lies behind a long context."""
    return any(s.start >= LONG_CONTEXT and s.num_tokens - len(s.guesses) > 1 for s in scheduled)


def draft_sizes(config: EngineConfig) -> StepSizes:
    """For a draft model: decodes of one token per sequence."""
    return StepSizes(batch_sizes(config.max_num_seqs, 0), [], max_several=0, max_keys=0, places=[])


def batch_sizes(num_decodes: int, largest: int) -> list[int]:
    """Dense up to `num_decodes`, where padding would cost most; then, for steps in which a sequence has several tokens,
    doubled up to `largest`."""
    sizes = [1, 2, 4, *range(8, min(num_decodes, 256), 8), *range(256, num_decodes, 16)]
    sizes = [*(s for s in sizes if s < num_decodes), num_decodes]
    while sizes[-1] < largest:
        sizes.append(min(2 * sizes[-1], largest))
    return sizes


def prompt_places(config: EngineConfig) -> list[int]:
    """The most is a multiple of 16, as kernels are compiled for."""
    most = -(-(config.max_num_seqs + 1) // 16) * 16
    return [FEW_PLACES] if most <= FEW_PLACES else [FEW_PLACES, most]


def prompt_sizes(config: EngineConfig, model: ModelConfig) -> list[int]:
    """Those of `PROMPT_SIZES` up to where computing takes longer than launching. `model` is this rank's share."""
    assert config.max_model_len is not None
    heads = 2 * model.num_attention_heads + 2 * model.num_key_value_heads
    weights = model.hidden_size * (heads * model.head_dim + 3 * model.neurons_of_token)  # of a layer
    max_tokens = min(config.max_num_batched_tokens, config.max_model_len, OPERATIONS_WHILE_LAUNCHING // (2 * weights))
    return [size for size in PROMPT_SIZES if size <= max_tokens]
