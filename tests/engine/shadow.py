"""Shadow KV: an executor without a model, where every wrong block shows.

The next token is a pure function of the whole prefix, and a slot of the "KV pool" holds a hash of the prefix whose KV
it should contain. A step performs all its writes and then checks every slot that a sequence reads. What a request gets
alone takes no engine at all to know: `solo`.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.plan import Scheduled, Scored, StepMasks, StepPlan, StepResult, TokenLogprobs
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import StructuredOutputsParams

VOCAB_SIZE = 8
EOS = 7
BAD = -1  # stands for logits that are not finite
STRUCTURED = StructuredOutputsParams(regex="what `allowed` says")
ALL = 2**VOCAB_SIZE - 1  # the mask that allows everything


def extend(prefix: int, token: int) -> int:
    """The hash of a prefix and one more token. Integers hash alike in every process."""
    return hash((prefix, token))


def root(cache_salt: str | None) -> int:
    return 0 if cache_salt is None else 1 + sum(cache_salt.encode())


def next_token(prefix: int, params: SamplingParams, output_index: int, mask: int = ALL) -> int:
    """Greedy depends on the prefix alone, sampling also on the seed and on how many tokens came before; and both on
    the mask, whose bit i allows token i."""
    if prefix % 151 == 0:
        return BAD
    noise = hash((params.seed, output_index)) if params.temperature else 0
    token = hash((prefix, noise)) % VOCAB_SIZE
    return next(t % VOCAB_SIZE for t in range(token, token + VOCAB_SIZE) if mask >> t % VOCAB_SIZE & 1)


def allowed(output: SequenceOf[int]) -> int:
    """The mask of the shadow's only grammar: about a third of the tokens may follow an output, and all of it decides
    which."""
    return sum(1 << token for token in range(VOCAB_SIZE) if hash((*output, token)) % 3 == 0) or ALL


class ShadowMatcher:
    """Sees the tokens of one output, each once, as long as it goes on."""

    def __init__(self) -> None:
        self.output: list[int] = []

    def copy(self) -> "ShadowMatcher":
        assert not self.output
        return ShadowMatcher()

    def accept(self, token_id: int) -> str | None:
        if not allowed(self.output) >> token_id & 1:
            return "not allowed"
        self.output.append(token_id)
        return None

    def num_valid(self, token_ids: SequenceOf[int]) -> int:
        output = list(self.output)
        for count, token in enumerate(token_ids):
            if not allowed(output) >> token & 1:
                return count
            output.append(token)
        return len(token_ids)


NO_MASKS = StepMasks([], 0, lambda masks: None)


class ShadowGrammars:
    def compile(self, params: StructuredOutputsParams) -> ShadowMatcher:
        return ShadowMatcher()

    def fill(self, wanted: SequenceOf[tuple[ShadowMatcher, SequenceOf[int]]], masks: bytearray) -> None:
        """One byte for each mask."""
        found = bytearray()
        for matcher, guesses in wanted:
            valid = guesses[: matcher.num_valid(guesses)]
            found += bytes(allowed([*matcher.output, *valid[:i]]) for i in range(len(valid) + 1))
            found += bytes([ALL] * (len(guesses) - len(valid)))
        assert len(found) == len(masks)
        masks[:] = found


def prompt_logprob(prefix: int, token: int) -> TokenLogprobs:
    return {token: (-(prefix % 1024) / 8, 1)}


def solo(
    prompt: SequenceOf[int], params: SamplingParams, limit: int, cache_salt: str | None = None
) -> tuple[list[int], str]:
    """What a request gets: its tokens, and why they end."""
    prefix = root(cache_salt)
    for token in prompt:
        prefix = extend(prefix, token)
    output: list[int] = []
    while True:
        mask = ALL if params.structured_outputs is None else allowed(output)
        token = next_token(prefix, params, len(output), mask)
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


class ShadowHandle:
    def __init__(self, executor: "ShadowExecutor", plan: StepPlan) -> None:
        self.executor, self.plan = executor, plan
        items = {item.key: item for item in plan.scheduled}
        self.prompt_logprobs = {s.key: executor.score(s, items[s.key]) for s in plan.scored}
        assert len(self.prompt_logprobs) == len(plan.scored)
        self.drawn, self.tokens = False, dict[int, tuple[list[int], list[TokenLogprobs] | None]]()
        if not plan.masked:
            self.draw(NO_MASKS)

    def guesses(self) -> dict[int, list[int]]:
        return {item.key: [g for g in item.guesses if g is not None] for item in self.plan.scheduled if item.sample}

    def draw(self, masks: StepMasks) -> None:
        assert not self.drawn, "tokens are drawn once"
        assert self.plan is self.executor.plans[-1], "and before anything else is submitted"
        assert set(masks.keys) <= set(self.plan.masked)
        missing = set(self.plan.masked).difference(masks.keys)
        assert not missing & self.executor.engine.scheduler.sequences.keys(), "a row is drawn without its mask"
        filled, self.drawn = bytearray(masks.number), True
        masks.fill(filled)
        words = bytes(filled)
        for item in self.plan.scheduled:
            if item.sample:
                count = len(item.guesses) + 1 if item.key in masks.keys else 0
                self.tokens[item.key] = self.executor.sample(
                    item, words[:count] or bytes([ALL] * (len(item.guesses) + 1))
                )
                words = words[count:]
        assert not words, "a mask for each token, and no more"

    def result(self) -> StepResult:
        assert self.plan.step == self.executor.pending.pop(0), "steps are collected once and in order"
        assert self.drawn, "nothing was drawn"
        self.executor.last_collected = self.plan.step
        return StepResult(self.tokens, self.prompt_logprobs)


class ShadowExecutor:
    """Runs a plan the moment it is submitted, as a device does that is never idle; the engine may look later."""

    def __init__(self, config: EngineConfig, window: int = 0) -> None:
        """window: keys that a token sees at most, its own included, in all layers; 0 is no limit."""
        assert config.num_kv_blocks and config.kvcache_block_size
        self.window = window
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
        structured = {s.key for s in plan.scheduled if s.sample and self.params[s.key].structured_outputs is not None}
        assert set(plan.masked) == structured and len(plan.masked) == len(structured)
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
        return ShadowHandle(self, plan)

    def score(self, scored: Scored, item: Scheduled) -> list[TokenLogprobs]:
        """The prompt's next tokens after those that the step computes."""
        assert item.start <= scored.start < scored.end <= item.start + item.num_tokens
        assert scored.end < self.num_prompt_tokens[item.key], "nothing of the prompt follows its last token"
        prompt, prefixes = self.tokens[item.key], self.prefixes[item.key]
        return [prompt_logprob(prefixes[i], prompt[i + 1]) for i in range(scored.start, scored.end)]

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
        first = max(0, item.start + 1 - self.window) if self.window and end > item.start else 0
        own = self._prefixes_of(item.key)[first:end]
        assert slots[first:end] == own, f"{item} reads what is not its own prefix: {slots[first:end]}"

    def sample(self, item: Scheduled, masks: bytes) -> tuple[list[int], list[TokenLogprobs] | None]:
        """The token after the last known one, and after every guess as long as they are right."""
        tokens, params = self.tokens[item.key], self.params[item.key]
        sampled: list[int] = []
        logprobs: list[TokenLogprobs] = []
        prefixes = self._prefixes_of(item.key)[len(self.prefixes[item.key]) - 1 :]
        for prefix, guess, mask in zip(prefixes, (*item.guesses, None), masks, strict=True):
            token = next_token(prefix, params, len(tokens) - self.num_prompt_tokens[item.key], mask)
            tokens.append(max(token, 0))  # clamped, as the next step may embed it before anyone has looked
            sampled.append(token)
            logprobs.append({token: (-(prefix % 64) / 8, 1)})
            if token != guess:
                break
        row = self.rows[item.row]
        row.computed -= len(item.guesses) + 1 - len(sampled)
        del row.block_table[-(-row.computed // self.block_size) :]
        return sampled, None if params.logprobs is None else logprobs
