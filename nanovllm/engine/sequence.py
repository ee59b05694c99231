"""A sequence: one choice of one request in progress, and all that the scheduler knows about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from nanovllm.engine.grammars import Matcher
from nanovllm.engine.plan import TokenLogprobs
from nanovllm.outputs import FinishReason, SpeculationStats
from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """What a full, computed block holds: its tokens, and the text before them. The digest only serves to find it.

    Equal contents are the same object, so the identity of `parent` stands for the whole beginning. Since parent, tokens
    and salt are compared, a collision of digests does no harm.
    """

    digest: bytes
    parent: Content | None  # of the block before; None for the first
    tokens: bytes  # `packed`: one object, which is compared at once
    cache_salt: str | None

    def matches(self, parent: Content | None, tokens: bytes, cache_salt: str | None) -> bool:
        return self.parent is parent and self.tokens == tokens and self.cache_salt == cache_salt


class SequenceStatus(Enum):
    WAITING = "waiting"  # new, or preempted
    RUNNING = "running"  # has a row and blocks
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens that are known, and tokens whose KV is computed; scheduling is about the gap between the two.

    Compared and hashed by identity. Counts are in tokens from the start of the prompt unless they say otherwise.
    """

    # Fixed when the request is added.
    key: int  # names the sequence between the planes; never used twice
    request_id: str
    choice: int  # index among the n choices of the request
    token_ids: list[int]  # prompt, then output; `commit` appends
    num_prompt_tokens: int
    params: SamplingParams  # with `seed` filled in
    limit: int  # length at which it ends with "length": min(prompt + max_tokens, max_model_len)
    eos_ids: frozenset[int]  # empty with `ignore_eos`
    priority: int = 0  # the smaller goes first
    arrival: int = 0  # a number that grows with every sequence; kept for life, also through preemptions
    cache_salt: str | None = None
    # Given each output token that is text; returns the stop string that the token completes, None for none.
    read_token: Callable[[int], str | None] | None = None
    matcher: Matcher | None = None  # follows the output where it must match a grammar; `commit` moves it

    stop_ids: frozenset[int] = field(init=False)  # all ids that end it
    num_to_score: int = field(init=False)  # tokens after which a log-probability is wanted: all of the prompt but one

    # Set by the scheduler.
    status: SequenceStatus = SequenceStatus.WAITING
    row: int = -1  # from 0 while running
    num_known: int = 0  # len(token_ids), and one more while a step in flight samples the next token
    num_computed: int = 0  # tokens whose KV exists once all submitted steps have run
    num_planned: int = 0  # tokens that the plan in the making computes of it
    num_in_flight: int = 0  # submitted steps that contain it and are not committed
    num_blocks_sent: int = 0  # leading blocks of the table that the data plane has been told of
    num_preemptions: int = 0
    num_scored: int = 0  # of the tokens to score, those that submitted steps have scored
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of committed steps
    num_cached_tokens: int = 0  # found in the prefix cache at the first admission
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    first_scheduled_time: float | None = None  # seconds of the engine's clock, as is the next
    first_token_time: float | None = None  # set by the engine
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    # Set by the n-gram proposer.
    ngrams: dict[tuple[int, ...], int] = field(default_factory=dict)  # where the text went on after each, the last time
    num_indexed: int = 0  # positions that this covers

    # Set by the block manager.
    block_table: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of its full blocks, made when first needed and kept for life
    num_unseen: int = 0  # leading blocks of the table that were given back, since no window reaches them any more
    num_published: int = 0  # leading blocks of the table that can be found, or whose equals can
    content: Content | None = None  # of the last of those

    def __post_init__(self) -> None:
        self.num_known = len(self.token_ids)
        # One set for all sequences that end at the same ids: nearly all share the engine's.
        self.stop_ids = self.eos_ids.union(stop) if (stop := self.params.stop_token_ids) else self.eos_ids
        self.num_to_score = 0 if self.params.prompt_logprobs is None else self.num_prompt_tokens - 1

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens
