"""An engine over the shadow executor that checks itself at every step, and random histories of it."""

import random
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.logprobs import without_text
from nanovllm.engine.plan import StepPlan
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Content, Sequence, SequenceStatus
from nanovllm.outputs import Logprob, RequestOutput
from nanovllm.sampling_params import SamplingParams, derive_seed
from tests.engine.shadow import (
    EOS,
    STRUCTURED,
    VOCAB_SIZE,
    ShadowExecutor,
    ShadowGrammars,
    ShadowMatcher,
    extend,
    prompt_logprob,
    root,
    solo,
)  # fmt: skip

# From the tokens that will come (fewer than k before the end) and k, what to propose.
Guess = Callable[[list[int], int], list[int]]


@dataclass
class Expected:
    """A request that was added, and what has been seen of it."""

    limit: int
    logprobs: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    alone: list[tuple[list[int], str]]  # what each choice gets by itself
    seen: list[list[int]]
    over: bool = False  # finished or aborted: nothing may follow


class World:
    """An engine over a shadow executor that checks itself at every step."""

    def __init__(self, guess: Guess | None = None, window: int = 0, **config: Any) -> None:
        """`guess` makes what is speculated out of what will be right, if `speculative` is set at all. `window`: as of
        the shadow executor."""
        values = {"max_model_len": 64, "async_scheduling": False, **config}
        self.config = EngineConfig(**values)
        self.executor = ShadowExecutor(self.config, window)
        self.events: list[dict[str, Any]] = []
        self.engine = LLMEngine(
            self.executor,
            self.config,
            vocab_size=VOCAB_SIZE,
            eos_token_ids={EOS},
            grammars=ShadowGrammars(),
            on_event=self._note,
            window=window,
        )
        self.executor.engine = self.engine
        schedule = self.scheduler.schedule

        def checked() -> StepPlan:
            plan = schedule()
            self._check_first(plan)
            return plan

        self.scheduler.schedule = checked  # type: ignore[method-assign]
        if guess is not None:
            self.engine.scheduler.proposer = Guesser(self, guess)
        self.requests: dict[str, Expected] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.idle_steps = 0
        self._held: dict[Content, tuple[int, ...]] = {}

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    def add(
        self, prompt: list[int], priority: int = 0, cache_salt: str | None = None, id: str | None = None, **params: Any
    ) -> str:
        params = {"temperature": 0.0, "seed": 1, "max_tokens": 8, **params}
        request_id = id or f"r{len(self.requests)}"
        sampling = SamplingParams(**params)
        self.engine.add_request(request_id, prompt, sampling, priority=priority, cache_salt=cache_salt)
        assert self.config.max_model_len and sampling.max_tokens
        limit = min(len(prompt) + sampling.max_tokens, self.config.max_model_len)
        choices = [replace(sampling, seed=derive_seed(sampling.seed or 0, i)) for i in range(sampling.n)]
        alone = [solo(prompt, choice, limit, cache_salt) for choice in choices]
        scored: list[dict[int, Logprob] | None] | None = None
        if sampling.prompt_logprobs is not None:
            prefixes = accumulate(prompt, extend, initial=root(cache_salt))
            entries = [prompt_logprob(prefix, token) for prefix, token in zip(prefixes, prompt, strict=False)]
            scored = [None, *map(without_text, entries[1:])]
        self.requests[request_id] = Expected(limit, sampling.logprobs is not None, scored, alone, [[] for _ in choices])
        return request_id

    def abort(self, request_id: str) -> None:
        self.engine.abort_request(request_id)
        if request_id in self.requests:
            self.requests[request_id].over = True
        self.check()

    def _note(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        assert len(self.events) < 5000, "a step goes on for ever"

    def step(self) -> list[RequestOutput]:
        del self.events[:]
        before = {key for key, seq in self.scheduler.sequences.items() if seq.status is SequenceStatus.WAITING}
        num_plans = len(self.executor.plans)
        in_flight = bool(self.engine._in_flight)
        outputs = self.engine.step()
        self.idle_steps = self.idle_steps + 1 if len(self.executor.plans) == num_plans and not in_flight else 0
        assert self.idle_steps < 2 or not self.engine.has_unfinished(), "the engine stands still"
        for output in outputs:
            self._check_output(output)
        self._check_policy(before)
        self.check()
        return outputs

    def drain(self) -> None:
        """Step until all is done, which may not take for ever, and check that everything was given back."""
        bound = 50 + 20 * sum(expected.limit * len(expected.seen) for expected in self.requests.values())
        while self.engine.has_unfinished():
            self.step()
            bound -= 1
            assert bound > 0, "requests make no progress"
        assert all(expected.over for expected in self.requests.values()), "a request got lost"
        assert self.scheduler.blocks.num_free == self.config.num_kv_blocks, "idle, but blocks are not free"
        assert not self.scheduler.sequences and not self.executor.tokens and not self.scheduler.waiting

    def _check_output(self, output: RequestOutput) -> None:
        expected = self.requests[output.request_id]
        assert not expected.over, f"{output.request_id} is over, but got {output}"
        expected.over = output.finished
        self.outputs[output.request_id] = output
        if output.prompt_logprobs is not None or output.outputs[0].token_ids or output.finished:
            assert output.prompt_logprobs == expected.prompt_logprobs, "each token of the prompt once"
        assert expected.prompt_logprobs is None or output.num_cached_tokens == 0
        for choice in output.outputs:
            seen = expected.seen[choice.index]
            assert choice.token_ids[: len(seen)] == seen
            expected.seen[choice.index] = choice.token_ids
            if expected.logprobs:
                assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
            alone, reason = expected.alone[choice.index]
            if choice.finish_reason is None:
                assert choice.token_ids == alone[: len(choice.token_ids)]
            else:
                assert (choice.token_ids, choice.finish_reason) == (alone, reason)

    def _check_policy(self, waiting_before: set[int]) -> None:
        """No one overtakes who waits in front, and who is preempted stands behind who was admitted."""
        seqs = self.scheduler.sequences.values()
        order = {(seq.request_id, seq.choice): self._order(seq) for seq in seqs}
        named: dict[str, list[tuple[int, int]]] = {"admitted": [], "preempted": []}
        for event in self.events:
            who = event["request"], event["choice"]
            if event["type"] in named and who in order:
                named[event["type"]].append(order[who])
        waiting = [
            self._order(seq) for seq in seqs if seq.status is SequenceStatus.WAITING and seq.key in waiting_before
        ]
        # One may be preempted and come back in the same step, where it finds equals of the blocks that it gave back.
        waiting += set(named["preempted"]) - set(named["admitted"])
        if named["admitted"]:
            assert max(named["admitted"]) < min(waiting, default=(99, 0)), "overtaken"

    def _check_first(self, plan: StepPlan) -> None:
        """The first of those that wait would not fit, now that a step has been planned."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        first, budget = next(iter(scheduler.waiting), None), self.config.max_num_batched_tokens
        budget -= sum(item.num_tokens for item in plan.scheduled)
        if first is None or first.num_in_flight or not budget:
            return
        kept = [seq for seq in scheduler.running if seq.priority <= first.priority]
        cached = blocks.find_prefix(first)
        uncached = first.num_known - len(cached) * blocks.block_size
        too_long = not self.config.enable_chunked_prefill and not first.num_preemptions and uncached > budget
        if len(kept) < self.config.max_num_seqs and not too_long:
            held = {block for seq in kept for block in seq.block_table[seq.num_unseen :]}.difference(cached)
            assert len(held) + blocks.num_blocks_for(first.num_known) > blocks.num_blocks, "waits, and yet it would fit"

    @staticmethod
    def _order(seq: Sequence) -> tuple[int, int]:
        return seq.priority, seq.key  # keys are given out in order of arrival

    def check(self) -> None:
        """What must hold between any two steps."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        running = [seq for seq in scheduler.sequences.values() if seq.status is SequenceStatus.RUNNING]
        assert scheduler.running == sorted(running, key=self._order)
        assert all(
            not seq.block_table for seq in scheduler.sequences.values() if seq.status is not SequenceStatus.RUNNING
        )
        waiting = [seq for seq in scheduler.sequences.values() if seq.status is SequenceStatus.WAITING]
        assert scheduler.waiting == sorted(waiting, key=self._order)
        holders = Counter(block for seq in running for block in seq.block_table[seq.num_unseen :])
        assert blocks.ref_counts == [holders[block] for block in range(blocks.num_blocks)]
        assert sorted(blocks.free) == [block for block in range(blocks.num_blocks) if not holders[block]]
        for seq in scheduler.sequences.values():
            if isinstance(seq.matcher, ShadowMatcher):
                assert seq.matcher.output == seq.token_ids[seq.num_prompt_tokens :], "a grammar saw other tokens"
        rows = [seq.row for seq in running]
        assert sorted(rows + scheduler._free_rows) == list(range(self.config.max_num_seqs))
        named = {block: content for block, content in enumerate(blocks.contents) if content is not None}
        assert {content.digest: block for block, content in named.items()} == blocks.block_by_digest
        for block, content in named.items():
            held = self.executor.pool[block * blocks.block_size : (block + 1) * blocks.block_size]
            assert tuple(held) == self._slots_of(content), "what is found is not what the name says"

    def _slots_of(self, content: Content) -> tuple[int, ...]:
        """The prefix hashes that a block with this content must hold."""
        if content not in self._held:
            prefix = self._slots_of(content.parent)[-1] if content.parent else root(content.cache_salt)
            slots = []
            for token in array("q", content.tokens):
                prefix = extend(prefix, token)
                slots.append(prefix)
            self._held[content] = tuple(slots)
        return self._held[content]


@dataclass
class Guesser:
    """A proposer that knows what comes, and what to make of it."""

    world: World
    guess: Guess

    def propose(self, seq: Sequence, k: int) -> list[int | None]:
        alone, _ = self.world.requests[seq.request_id].alone[seq.choice]
        return [*self.guess(alone[seq.num_output_tokens :][:k], k)]


def random_guess(rng: random.Random) -> Guess:
    """Right with a probability of its own; sometimes shorter, sometimes past the end."""
    right = rng.choice((0.0, 0.5, 0.8, 1.0))

    def guess(coming: list[int], k: int) -> list[int]:
        coming = coming + [rng.randrange(VOCAB_SIZE) for _ in range(k - len(coming))]
        return [t if rng.random() < right else rng.randrange(VOCAB_SIZE) for t in coming][: rng.randint(0, 2 * k)]

    return guess


def random_history(seed: int, speculative: bool = False, window: int = 0) -> None:
    """One engine, some rounds of random requests, steps and aborts; everything is checked on the way."""
    rng = random.Random(seed)
    guessing: dict[str, Any] = {}
    if speculative:
        guessing = {"speculative": {"method": "ngram", "k": rng.randint(1, 9), "n": rng.randint(1, 2)}}
        guessing["guess"] = None if rng.random() < 0.3 else random_guess(random.Random(seed))
    block_size = rng.choice((1, 2, 4, 8))
    budget = rng.choice((1, 2, 3, 5, 8, 16, 64))
    chunked = budget < 8 or rng.random() < 0.5
    world = World(
        kvcache_block_size=block_size,
        num_kv_blocks=max(2, rng.choice((12, 16, 24, 48)) // block_size),
        max_num_seqs=rng.choice((1, 2, 3, 4, 8)),
        max_num_batched_tokens=budget,
        max_model_len=rng.choice((12, 20, 64)),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=rng.random() < 0.85,
        async_scheduling=not speculative and rng.random() < 0.5,
        window=window,
        **guessing,
    )
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(12)] for _ in range(2)]
    for _ in range(rng.randint(1, 3)):
        for _ in range(rng.randint(1, 8)):
            for _ in range(rng.randint(0, 3)):
                add_random_request(world, rng, stems)
            for _ in range(rng.randint(0, 6)):
                world.step()
            if world.requests and rng.random() < 0.2:
                world.abort(rng.choice(list(world.requests)))
        world.drain()


def add_random_request(world: World, rng: random.Random, stems: list[list[int]]) -> None:
    prompt = rng.choice(stems)[: rng.randint(0, 12)] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 3))]
    max_tokens = rng.randint(1, 10)
    structured = rng.random() < 0.25
    with suppress(ValueError):  # too large for this engine, or empty: refused when added, and the rest goes on
        world.add(
            prompt,
            priority=rng.choice((0, 0, 0, 1, 2)),
            cache_salt=rng.choice((None, None, None, "a")),
            n=rng.choice((1, 1, 1, 1, 2)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(3),
            max_tokens=max_tokens,
            min_tokens=rng.choice((0, 0, 0, max_tokens)) if not structured else 0,
            ignore_eos=rng.random() < 0.5 and not structured,
            stop_token_ids=rng.choice(((), (), (2,))),
            logprobs=rng.choice((None, 1)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
            structured_outputs=STRUCTURED if structured else None,
        )
