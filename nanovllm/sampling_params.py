"""How one request wants its tokens chosen. Names, meanings and defaults are vLLM's, but for `max_tokens` (64)."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from numbers import Real
from operator import index
from types import NoneType
from typing import Any

from nanovllm.structured_outputs import StructuredOutputsParams


class RequestOutputKind(Enum):
    """What `step()` reports of a request that is not finished yet."""

    CUMULATIVE = 0  # all of its output so far
    FINAL_ONLY = 2  # nothing


KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("n", "top_k", "min_tokens"), (int,)),
    **dict.fromkeys(("seed", "max_tokens", "logprobs", "prompt_logprobs"), (int, NoneType)),
    **dict.fromkeys(("temperature", "top_p", "min_p"), (int, float)),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), (int, float)),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"), (bool,)),
    "structured_outputs": (StructuredOutputsParams, NoneType),
    "output_kind": (RequestOutputKind,),
}

MASK64 = 2**64 - 1
LARGEST_N = 16_384  # as vLLM has it
LARGEST = 1e30  # of what multiplies or divides logits: they stay finite in float32
LARGEST_BIAS = 100.0  # as OpenAI and vLLM have it

# Each running sequence has room on the device for so many.
MAX_LOGIT_BIAS = 1024  # tokens
MAX_STOP_IDS = 128  # `stop_token_ids` that `min_tokens` holds back
MAX_BAD_WORDS = 512  # spellings: a word has two, without and with a space before
MAX_BAD_TOKENS = 2048  # of all spellings together


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Immutable, validated when made; one object may serve any number of requests.

    n:                   how many independent continuations ("choices") of the prompt.
    temperature:         0 is greedy; otherwise the logits are divided by it.
    top_k:               only the k likeliest tokens; 0 or -1 is off.
    top_p:               only the likeliest tokens that together reach this probability, in (0, 1]; 1 is off.
    min_p:               only tokens at least min_p times as likely as the likeliest, in [0, 1]; 0 is off.
    repetition_penalty:  > 1 discourages tokens of prompt and output (Keskar et al. 2019); 1 is off.
    presence_penalty, frequency_penalty:  subtracted from the logits of tokens in the output, once and per occurrence.
    seed:                the same seed gives the same tokens, alone or in any batch. None draws a fresh one.
    stop:                strings that end the output; they are cut from the text unless `include_stop_str_in_output`.
    stop_token_ids:      ids that end the output, like the model's EOS; they stay in `token_ids`, not in the text.
    ignore_eos:          go on past EOS.
    max_tokens:          at most this many output tokens; None means as many as `max_model_len` allows.
    min_tokens:          neither EOS nor a stop ends the output before it has this many tokens.
    logprobs:            report the log-probabilities of this many likeliest tokens and of the chosen one; None is off.
    prompt_logprobs:     report this for the prompt as well: of this many likeliest tokens and of the prompt's own, at
                         each of its positions but the first. Such a request reads no cached prefix; others read its.
    logit_bias:          added to the logits of these tokens; values beyond -100 and 100 count as these.
    bad_words:           the output contains none of these texts, at its start or anywhere, with or without a space
                         before: the token that would complete one is ruled out. Spelled in other tokens than those that
                         the tokenizer makes of it, a text is not recognised.
    allowed_token_ids:   only these tokens, EOS among them if the output may end with it; None is all.
    structured_outputs:  a JSON schema, an expression, a grammar or the like that the output must match; it ends there.

    Raises ValueError for a value out of range, and TypeError for a parameter that does not exist.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 64
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    bad_words: Iterable[str] = ()
    allowed_token_ids: Iterable[int] | None = None
    # The spellings of `bad_words`, once a tokenizer has been asked (`text/bad_words.py`)
    bad_words_ids: tuple[tuple[int, ...], ...] = field(default=(), init=False, repr=False)

    def changed(self, **values: object) -> "SamplingParams":
        """A copy with other values, which must be good: unlike `dataclasses.replace`, this checks none again."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self) | values)
        return copy

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, Iterable | None) or (name != "stop" and isinstance(value, str)):
                raise TypeError(f"{name} must be a list; got {value!r}")
        # None is accepted in vLLM's way; afterwards all are tuples, so that the parameters can be hashed and shared.
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        bad_words = tuple(self.bad_words or ())
        stop_ids = token_ids(() if self.stop_token_ids is None else self.stop_token_ids)
        allowed = None if self.allowed_token_ids is None else token_ids(self.allowed_token_ids)
        for name, of_name in ("stop", stop), ("bad_words", bad_words), ("stop_token_ids", stop_ids):
            object.__setattr__(self, name, of_name)
        object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "logit_bias", None if self.logit_bias is None else clamped(self.logit_bias))
        for name, kind in KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind):
                wanted = " or ".join("None" if k is NoneType else k.__name__ for k in kind)
                raise TypeError(f"{name} must be {wanted}; got {value!r}")
        max_tokens = math.inf if self.max_tokens is None else self.max_tokens

        def check(name: str, good: bool, remedy: str, got: object = None) -> None:
            if not good:
                raise ValueError(f"{name} must be {remedy}; got {getattr(self, name) if got is None else got!r}")

        check("n", 1 <= self.n <= LARGEST_N, f"from 1 to {LARGEST_N}")
        check("temperature", 0 <= self.temperature <= LARGEST, "0 (greedy) or a positive number up to 1e30")
        check("top_k", -1 <= self.top_k < 2**31, "positive (below 2**31), or 0 or -1 for off")
        check("top_p", 0 < self.top_p <= 1, "in (0, 1]; 1 is off")
        check("min_p", 0 <= self.min_p <= 1, "in [0, 1]; 0 is off")
        check("repetition_penalty", 1 / LARGEST <= self.repetition_penalty <= LARGEST, "from 1e-30 to 1e30; 1 is off")
        check("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]; 0 is off")
        check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]; 0 is off")
        check("seed", self.seed is None or 0 <= self.seed < 2**63, "in [0, 2**63), or None for a fresh one")
        check("stop", all(isinstance(s, str) and s for s in stop), "one or more strings that are not empty")
        check("stop_token_ids", all(map(is_id, stop_ids)), "token ids (integers from 0)")
        check("allowed_token_ids", allowed is None or allowed != (), "one or more token ids, or None for all")
        check("allowed_token_ids", all(map(is_id, allowed or ())), "token ids (integers from 0)")
        check(
            "logit_bias", all(map(is_id, self.logit_bias or ())), "a dict from token ids (integers from 0) to numbers"
        )
        num_biased = len(self.logit_bias or ())
        check("logit_bias", num_biased <= MAX_LOGIT_BIAS, f"of at most {MAX_LOGIT_BIAS} tokens", num_biased)
        check("bad_words", all(isinstance(s, str) and s for s in bad_words), "one or more texts that are not empty")
        check("max_tokens", max_tokens >= 1, "at least 1, or None for as many as max_model_len allows")
        possible = 0 <= self.min_tokens <= min(max_tokens, 2**31)
        check("min_tokens", possible, f"from 0 to max_tokens ({self.max_tokens}), and at most 2**31")
        num_held_back = len(set(stop_ids)) if self.min_tokens else 0
        few = num_held_back <= MAX_STOP_IDS
        check("stop_token_ids", few, f"at most {MAX_STOP_IDS} ids where min_tokens holds them back", num_held_back)
        for name in "logprobs", "prompt_logprobs":
            check(name, getattr(self, name) is None or getattr(self, name) >= 0, "at least 0, or None for off")
        free = self.structured_outputs is None
        check("ignore_eos", free or not self.ignore_eos, "False with structured_outputs, which say where the end is")
        check("min_tokens", free or not self.min_tokens, "0 with structured_outputs, which say where the end is")


def token_ids(ids: Iterable[object]) -> tuple[object, ...]:
    """As a tuple, with Python's integers for those of numpy and torch."""
    given = tuple(ids)
    if set(map(type, given)) == {int}:
        return given
    return tuple(index(i) if hasattr(i, "__index__") else i for i in given)


def is_id(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def clamped(bias: Mapping[Any, Any]) -> dict[Any, float]:
    """A copy with values from -100 to 100. Raises TypeError for what is no dict of numbers, and ValueError for NaN."""
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias must be a dict from token ids to numbers; got {bias!r}")
    for value in bias.values():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"logit_bias must be a dict from token ids to numbers; got {value!r}")
        if math.isnan(value):
            raise ValueError(f"logit_bias must be a dict from token ids to numbers; got {bias!r}")
    limited = (max(-LARGEST_BIAS, min(LARGEST_BIAS, float(value))) for value in bias.values())
    return dict(zip(token_ids(bias), limited, strict=True))


def mix64(x: int) -> int:
    """A bijection of 64-bit integers in which every input bit flips half of the output bits (SplitMix64's finaliser:
    Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators", 2014)."""
    x &= MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def derive_seed(seed: int, choice: int) -> int:
    """The seed of choice `choice` (from 0) of a request whose seed is `seed`.

    In [0, 2**63), as `SamplingParams.seed`. Choices of one request, and of requests with neighbouring seeds, are as
    good as independent.
    """
    return mix64(mix64(seed) + choice + 1) >> 1
