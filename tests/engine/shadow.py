"""Shadow KV: an executor without a model, where every wrong block shows.

The next token is a pure function of the whole prefix, and a slot of the "KV pool" holds a hash of the prefix whose KV
it should contain. A step performs all its writes and then checks every slot that a sequence reads. What a request gets
alone takes no engine at all to know: `solo`.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.plan import Scheduled, StepPlan, StepResult, TokenLogprobs
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

VOCAB_SIZE = 8
EOS = 7
BAD = -1  # stands for logits that are not finite


def extend(prefix: int, token: int) -> int:
    """The hash of a prefix and one more token. Integers hash alike in every process."""
    return hash((prefix, token))


def root(cache_salt: str | None) -> int:
    return 0 if cache_salt is None else 1 + sum(cache_salt.encode())


def next_token(prefix: int, params: SamplingParams, output_index: int) -> int:
    """Greedy depends on the prefix alone, sampling also on the seed and on how many tokens came before."""
    if prefix % 151 == 0:
        return BAD
    noise = hash((params.seed, output_index)) if params.temperature else 0
    return hash((prefix, noise)) % VOCAB_SIZE


def solo(
    prompt: SequenceOf[int], params: SamplingParams, limit: int, cache_salt: str | None = None
) -> tuple[list[int], str]:
    """What a request gets: its tokens, and why they end."""
    prefix = root(cache_salt)
    for token in prompt:
        prefix = extend(prefix, token)
    output: list[int] = []
    while True:
        token = next_token(prefix, params, len(output))
        if token == BAD:
            return output, "error"
        output.append(token)
        ends = (token == EOS and not params.ignore_eos) or token in params.stop_token_ids
        if ends and len(output) >= params.min_tokens:
            return output, "stop"
        if len(prompt) + len(output) == limit:
            return output, "length"
        prefix = extend(prefix, token)


@dataclass
class Row:
    key: int
    block_table: list[int] = field(default_factory=list)
    computed: int = 0


@dataclass
class ShadowHandle:
    executor: "ShadowExecutor"
    step: int
    tokens: dict[int, tuple[list[int], list[TokenLogprobs] | None]]

    def result(self) -> StepResult:
        assert self.step == self.executor.pending.pop(0), "steps are collected once and in order"
        self.executor.last_collected = self.step
        return StepResult(self.tokens)


class ShadowExecutor:
    """Runs a plan the moment it is submitted, as a device does that is never idle; the engine may look later."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.num_kv_blocks and config.kvcache_block_size
        self.config = config
        self.block_size = config.kvcache_block_size
        self.pool: list[int | None] = [None] * (config.num_kv_blocks * self.block_size)
        self.written = [-1] * config.num_kv_blocks  # the last step that wrote to the block
        self.pending: list[int] = []  # steps submitted and not collected
        self.last_collected = -1
        self.rows: dict[int, Row] = {}
        self.tokens: dict[int, list[int]] = {}
        self.num_prompt_tokens: dict[int, int] = {}
        self.params: dict[int, SamplingParams] = {}
        self.prefixes: dict[int, list[int]] = {}  # for each token, the hash of all up to it
        self.guessed: dict[int, list[int]] = {}  # the same for the guesses of the step
        self.engine: LLMEngine
        self.plans: list[StepPlan] = []
        self.closed = False

    def add(self, key: int, token_ids: SequenceOf[int], params: SamplingParams) -> None:
        assert key not in self.tokens, "handed over once"
        self.tokens[key] = list(token_ids)
        self.num_prompt_tokens[key] = len(token_ids)
        self.params[key] = params
        self.prefixes[key] = []

    def remove(self, key: int) -> None:
        self.tokens.pop(key, None)

    def close(self) -> None:
        self.closed = True

    def submit(self, plan: StepPlan) -> ShadowHandle:
        self.plans.append(plan)
        self.pending.append(plan.step)
        for number in plan.freed_rows:
            self.rows.pop(number, None)
        assert sum(item.num_tokens for item in plan.scheduled) <= self.config.max_num_batched_tokens
        assert len({item.key for item in plan.scheduled}) == len(plan.scheduled), "a sequence is planned once"
        for item in plan.scheduled:
            self._take_in(item)
        for item in plan.scheduled:
            self._write(item, plan.step)
        for item in plan.scheduled:
            self._check_reads(item, item.start + item.num_tokens)
            assert item.sample or not item.guesses, "guesses follow the last known token"
        return ShadowHandle(self, plan.step, {i.key: self._sample(i) for i in plan.scheduled if i.sample})

    def _take_in(self, item: Scheduled) -> None:
        """What a runner does with its tables, and what it relies on."""
        seq = self.engine.scheduler.sequences[item.key]
        end = item.start + item.num_tokens
        assert item.num_tokens >= 1, "at least one token is computed"
        assert end <= seq.limit - 1, "nothing is scheduled past the last token"
        assert 0 <= item.row < self.config.max_num_seqs
        admitted = item.row not in self.rows
        row = self.rows.setdefault(item.row, Row(item.key, computed=item.start))
        assert row.key == item.key, "a row belongs to one sequence until it is freed"
        assert sum(other.key == item.key for other in self.rows.values()) == 1, "and a sequence has one row"
        assert row.computed == item.start, "no token is skipped or computed twice"
        row.computed = end
        row.block_table += item.new_blocks
        assert len(row.block_table) == -(-end // self.block_size), "just the blocks that are needed"
        num_tokens, known = len(self.tokens[item.key]), end - len(item.guesses)
        assert known <= num_tokens and item.sample == (known == num_tokens), "only the last known token samples"
        self._extend_prefixes(item.key, seq)
        self.guessed[item.key] = []
        for token in item.guesses:
            assert token is not None
            self.guessed[item.key].append(extend((self.prefixes[item.key] + self.guessed[item.key])[-1], token))
        if admitted:
            for block in row.block_table[: item.start // self.block_size]:
                assert self.written[block] <= self.last_collected, "found before it was committed"
            assert item.start % self.block_size == 0, "whole blocks are found"
            self._check_reads(item, item.start)

    def _extend_prefixes(self, key: int, seq: Sequence) -> None:
        prefixes = self.prefixes[key]
        for token in self.tokens[key][len(prefixes) :]:
            prefixes.append(extend(prefixes[-1] if prefixes else root(seq.cache_salt), token))

    def _write(self, item: Scheduled, step: int) -> None:
        table = self.rows[item.row].block_table
        for position in range(item.start, item.start + item.num_tokens):
            block, offset = table[position // self.block_size], position % self.block_size
            self.pool[block * self.block_size + offset] = self._prefixes_of(item.key)[position]
            self.written[block] = step

    def _prefixes_of(self, key: int) -> list[int]:
        return self.prefixes[key] + self.guessed[key]

    def _check_reads(self, item: Scheduled, end: int) -> None:
        slots: list[int | None] = []
        for block in self.rows[item.row].block_table:
            slots += self.pool[block * self.block_size : (block + 1) * self.block_size]
        own = self._prefixes_of(item.key)[:end]
        assert slots[:end] == own, f"{item} reads what is not its own prefix: {slots[:end]}"

    def _sample(self, item: Scheduled) -> tuple[list[int], list[TokenLogprobs] | None]:
        """The token after the last known one, and after every guess as long as they are right."""
        tokens, params = self.tokens[item.key], self.params[item.key]
        sampled: list[int] = []
        logprobs: list[TokenLogprobs] = []
        prefixes = self._prefixes_of(item.key)[len(self.prefixes[item.key]) - 1 :]
        for prefix, guess in zip(prefixes, (*item.guesses, None), strict=True):
            token = next_token(prefix, params, len(tokens) - self.num_prompt_tokens[item.key])
            tokens.append(max(token, 0))  # clamped, as the next step may embed it before anyone has looked
            sampled.append(token)
            logprobs.append({token: (-(prefix % 64) / 8, 1)})
            if token != guess:
                break
        row = self.rows[item.row]
        row.computed -= len(item.guesses) + 1 - len(sampled)
        del row.block_table[-(-row.computed // self.block_size) :]
        return sampled, None if params.logprobs is None else logprobs
