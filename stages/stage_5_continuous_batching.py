"""Stage 5: continuous batching.

What hurt:    a static batch ends when its slowest sequence ends; new requests wait for that; and every sequence holds
              the blocks of an output that it may never write.
The idea:     decide anew at every step (Yu et al., "Orca", 2022). A sequence has tokens it knows and tokens whose keys
              and values are computed; a step computes some of that gap for some sequences, within a budget of tokens.
              Decoding is a gap of one, a long prompt is cut into chunks, and both share a step. Blocks are taken when
              needed; when none is left, the latest arrival gives its blocks back and is computed again later.
Still hurts:  on a GPU the step is now so small that launching its kernels takes longer than running them: stage 6
              records the launches. And one device holds the whole model: stage 7 splits it.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

from stages.checkpoint import load_model
from stages.core import Events, OnEvent, SamplingParams, Sequence, append_token, make_sequences, sample
from stages.stage_3_paged_blocks import PagedKVCache, check_fits, make_batch
from stages.stage_4_prefix_caching import PrefixCachingPool


class Status(Enum):
    WAITING = "waiting"  # has no blocks: newly added, or preempted
    RUNNING = "running"  # has a seat and blocks
    FINISHED = "finished"


@dataclass(frozen=True)
class Scheduled:
    """The share of one sequence in a step: its next `num_tokens` tokens."""

    seq: Sequence
    num_tokens: int

    @property
    def reaches_end(self) -> bool:
        """Only the chunk that reaches the last known token has logits worth sampling."""
        return self.seq.num_computed + self.num_tokens == len(self.seq.tokens)


class Scheduler:
    """Who computes how many tokens in the next step. Pure bookkeeping: no tensor in sight.

    Waiting and running are both kept in order of arrival, and the earlier arrival always wins: it can take blocks from
    later ones, nobody can take its own. So the first one always advances, and in the end everyone is first.
    """

    def __init__(self, pool: PrefixCachingPool, max_num_seqs: int, max_num_batched_tokens: int, events: Events) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.events = events
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def status(self, seq: Sequence) -> Status:
        if seq in self.running:
            return Status.RUNNING
        return Status.WAITING if seq in self.waiting else Status.FINISHED

    def schedule(self) -> list[Scheduled]:
        """Fill the token budget: first the running (decodes and unfinished prompts), then the waiting."""
        budget = self.max_num_batched_tokens
        plan: list[Scheduled] = []
        for seq in list(self.running):
            if seq not in self.running or budget == 0:
                continue  # preempted by an earlier one, a moment ago
            num_tokens = min(len(seq.tokens) - seq.num_computed, budget)
            # exercise 5.1: get the blocks for seq.num_computed + num_tokens tokens. As long as there are too few,
            #   preempt the latest arrival of self.running; if that is seq itself, it computes nothing in this step.
            while not self.allocate(seq, seq.num_computed + num_tokens):
                victim = self.running[-1]
                self.preempt(victim)
                if victim is seq:
                    break
            # end exercise
            if seq in self.running:
                plan.append(Scheduled(seq, num_tokens))
                budget -= num_tokens
        # A victim of this very step is not let in again: it would need more blocks than it has just given up
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            # exercise 5.2: admit seq if there are blocks for all its tokens (let in with less, it would only be pushed
            #   out again). What the prefix cache knows costs no budget: schedule as much of the rest as fits in it.
            if not self.allocate(seq, len(seq.tokens)):
                break
            self.running.append(self.waiting.popleft())
            num_tokens = min(len(seq.tokens) - seq.num_computed, budget)
            plan.append(Scheduled(seq, num_tokens))
            budget -= num_tokens
            # end exercise
            self.events.emit("admitted", seq.request, cached=seq.num_computed)
        return plan

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        held = len(seq.block_table)
        if not self.pool.allocate(seq, num_tokens):
            return False
        new = seq.block_table[held:]
        if new:
            shared = 0 if held else seq.num_computed // self.pool.block_size
            self.events.emit("blocks", seq.request, taken=new[shared:], shared=new[:shared], freed=[])
        return True

    def preempt(self, seq: Sequence) -> None:
        """Take the blocks of a running sequence and let it wait again, at the place where its arrival puts it.

        Its tokens are kept, those it has generated too: when it comes back they are a prompt to be computed again, part
        of which may still be found in the prefix cache. Nothing is sampled twice.
        """
        self.events.emit("preempted", seq.request, tokens=len(seq.tokens))
        # exercise 5.3: out of self.running, blocks released, nothing computed any more, and back into self.waiting in
        #   order of arrival (seq.request): it is earlier than all that wait, save other victims.
        self.running.remove(seq)
        self.release(seq)
        seq.num_computed = 0
        insort(self.waiting, seq, key=lambda s: s.request)
        # end exercise

    def release(self, seq: Sequence) -> None:
        if seq.block_table:
            self.events.emit("blocks", seq.request, taken=[], shared=[], freed=self.pool.release(seq))

    def finish(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.release(seq)


class ContinuousBatchingEngine:
    """Sequences join and leave at any step. The requests of a call share one queue; the prefix cache outlives it."""

    def __init__(
        self,
        model: str,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        on_event: OnEvent | None = None,
        block_size: int = 16,
        num_blocks: int = 512,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        attention: Literal["gather", "triton"] = "gather",
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if attention not in ("gather", "triton"):
            raise ValueError(f"attention must be 'gather' or 'triton', got {attention!r}")
        loaded = load_model(model, device=device, dtype=dtype)
        self.model, self.config = loaded.model, loaded.config
        self.eos_token_ids = loaded.eos_token_ids
        self.vocab_size = loaded.config.vocab_size
        self.device = torch.device(device)
        self.events = Events(on_event)
        self.pool = PrefixCachingPool(num_blocks, block_size)
        self.cache = PagedKVCache(self.config, self.pool, self.device, next(loaded.model.parameters()).dtype)
        self.paged_attention = self.cache.attend if attention == "gather" else self.cache.attend_triton
        self.scheduler = Scheduler(self.pool, max_num_seqs, max_num_batched_tokens, self.events)

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
        """Token ids in, generated token ids out. Raises ValueError for a request that makes no sense or cannot fit."""
        sequences = make_sequences(
            prompts, params, vocab_size=self.vocab_size, max_model_len=self.config.max_position_embeddings
        )
        for seq in sequences:
            check_fits(seq, self.pool)
        try:
            for seq in sequences:
                self.events.emit("added", seq.request, prompt_tokens=seq.num_prompt_tokens)
                self.scheduler.waiting.append(seq)
            while self.scheduler.waiting or self.scheduler.running:
                self.step()
        finally:  # also when interrupted, in the middle of admitting as well: pool and queues outlive this call
            self.scheduler.waiting.clear()
            self.scheduler.running.clear()
            for seq in sequences:
                self.scheduler.release(seq)
        return [seq.output for seq in sequences]

    def step(self) -> None:
        """Schedule, compute, sample, and let those leave that are over."""
        self.events.step += 1
        plan = self.scheduler.schedule()
        for s in plan:
            self.events.emit("scheduled", s.seq.request, tokens=s.num_tokens, cached=s.seq.num_computed)
        sampled = [i for i, s in enumerate(plan) if s.reaches_end]
        logits = self.forward(plan, sampled)
        for s in plan:
            s.seq.num_computed += s.num_tokens
            self.pool.publish(s.seq)
        going_on = [plan[i].seq for i in sampled]
        for seq, token in zip(going_on, sample(logits, going_on), strict=True):
            if append_token(seq, token, self.eos_token_ids, self.events):
                self.scheduler.finish(seq)

    def forward(self, plan: list[Scheduled], sampled: list[int]) -> Tensor:
        """One run of the model over all scheduled tokens -> logits [len(sampled), V]."""
        batch = make_batch([(s.seq, s.num_tokens) for s in plan], self.pool.block_size, self.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(batch, layer, k, v)
            return self.paged_attention(batch, layer, q)

        hidden = self.model(batch.input_ids, batch.positions, attend)  # [T, H]
        return self.model.logits(hidden[batch.last_tokens[sampled]])
