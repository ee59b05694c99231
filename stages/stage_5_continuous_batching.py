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
from functools import partial
from typing import Literal

import torch

from stages.checkpoint import load_model
from stages.core import OnEvent, SamplingParams, Sequence, Trace, accept, append_token, check_options, sample
from stages.stage_3_paged_blocks import PagedKVCache, make_batch
from stages.stage_4_prefix_caching import PrefixCachingPool


@dataclass(frozen=True)
class Scheduled:
    """The share of one sequence in a step: its next `num_tokens` tokens."""

    seq: Sequence
    num_tokens: int

    @property
    def sample(self) -> bool:
        """Only the chunk that reaches the last known token has logits worth sampling."""
        return self.seq.num_computed + self.num_tokens == len(self.seq.token_ids)


class Scheduler:
    """Who computes how many tokens in the next step. Pure bookkeeping: no tensor in sight.

    Waiting and running are both kept in order of arrival, and the earlier arrival always wins: it can take blocks from
    later ones, and nobody can take its own. So the first one always advances, and in the end everyone is first.
    """

    def __init__(self, blocks: PrefixCachingPool, max_num_seqs: int, max_num_batched_tokens: int, trace: Trace) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.trace = trace
        self.waiting: deque[Sequence] = deque()  # without blocks: newly added, or preempted
        self.running: list[Sequence] = []  # each with a seat and blocks

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> list[Scheduled]:
        """Fill the token budget: first the running (decodes and unfinished prompts), then the waiting."""
        self.trace.step += 1
        budget = self.max_num_batched_tokens
        plan: list[Scheduled] = []
        for seq in list(self.running):
            if seq not in self.running or budget == 0:
                continue  # preempted by an earlier one, a moment ago
            num_tokens = min(len(seq.token_ids) - seq.num_computed, budget)
            if self.make_room(seq, seq.num_computed + num_tokens):
                plan.append(Scheduled(seq, num_tokens))
                budget -= num_tokens
        self.admit(plan, budget)
        for s in plan:
            self.trace.emit("scheduled", s.seq.request, tokens=s.num_tokens, cached=s.seq.num_computed)
        return plan

    def make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Get the blocks for the first `num_tokens` tokens of a running sequence, if need be from later arrivals.

        Returns False if even that is not enough: then the sequence is preempted itself.
        """
        # exercise 5.1: as long as self.allocate finds too few blocks, preempt the latest arrival of self.running. If
        #   that is seq itself, it computes nothing in this step: return False.
        while not self.allocate(seq, num_tokens):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        # end exercise
        return True

    def admit(self, plan: list[Scheduled], budget: int) -> None:
        """Let waiting sequences start, in order of arrival, until one does not fit, and add their shares to `plan`."""
        # A victim of this very step is not let in again: it would need more blocks than it has just given up
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            # exercise 5.2: admit seq if there are blocks for all its tokens (let in with less, it would only be pushed
            #   out again). What the prefix cache knows costs no budget: schedule as much of the rest as fits in it.
            if not self.allocate(seq, len(seq.token_ids)):
                break
            self.running.append(self.waiting.popleft())
            num_tokens = min(len(seq.token_ids) - seq.num_computed, budget)
            plan.append(Scheduled(seq, num_tokens))
            budget -= num_tokens
            # end exercise
            self.trace.emit("admitted", seq.request, cached=seq.num_computed)

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Give `seq` blocks for its first `num_tokens` tokens, or nothing, and return False."""
        held = len(seq.block_table)
        if not self.blocks.allocate(seq, num_tokens):
            return False
        new = seq.block_table[held:]
        if new:
            shared = 0 if held else seq.num_computed // self.blocks.block_size
            self.trace.emit("blocks", seq.request, taken=new[shared:], shared=new[:shared], freed=[])
        return True

    def preempt(self, seq: Sequence) -> None:
        """Take the blocks of a running sequence and let it wait again, at the place where its arrival puts it.

        Its tokens are kept, those it has generated too: when it comes back they are a prompt to be computed again, part
        of which may still be found in the prefix cache. Nothing is sampled twice.
        """
        self.trace.emit("preempted", seq.request, tokens=len(seq.token_ids))
        # exercise 5.3: out of self.running, blocks released, nothing computed any more, and back into self.waiting in
        #   order of arrival (seq.request): it is earlier than all that wait, save other victims.
        self.running.remove(seq)
        self.release(seq)
        seq.num_computed = 0
        insort(self.waiting, seq, key=lambda s: s.request)
        # end exercise

    def release(self, seq: Sequence) -> None:
        if seq.block_table:
            self.trace.emit("blocks", seq.request, taken=[], shared=[], freed=self.blocks.release(seq))

    def commit(self, plan: list[Scheduled], token_ids: list[int], eos_token_ids: frozenset[int]) -> None:
        """Take in what a step computed and sampled, and let those leave that are over.

        token_ids: one for each sequence of the plan whose `sample` was true, in order.
        """
        sampled = [s.seq for s in plan if s.sample]
        for s in plan:
            s.seq.num_computed += s.num_tokens
            self.blocks.publish(s.seq)
        for seq, token in zip(sampled, token_ids, strict=True):
            if append_token(seq, token, eos_token_ids, self.trace):
                self.finish(seq)

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
        sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        check_options(block_size=block_size, num_blocks=num_blocks, **sizes, attention=attention)
        self.model, self.config, self.eos_token_ids, _ = load_model(model, device=device, dtype=dtype)
        self.device, self.trace, self.attention = torch.device(device), Trace(on_event), attention
        self.pool = PrefixCachingPool(num_blocks, block_size)
        self.cache = PagedKVCache(self.config, num_blocks, block_size, self.device)
        self.scheduler = Scheduler(self.pool, max_num_seqs, max_num_batched_tokens, self.trace)

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
        """Token ids in, generated token ids out. Raises ValueError for a request that makes no sense or cannot fit."""
        sequences = accept(prompts, params, self.config, self.trace, self.pool.check_fits)
        try:
            for seq in sequences:
                self.scheduler.add(seq)
            while self.scheduler.waiting or self.scheduler.running:
                self.step()
        finally:  # also when interrupted, in the middle of admitting as well: pool and queues outlive this call
            self.scheduler.waiting.clear()
            self.scheduler.running.clear()
            for seq in sequences:
                self.scheduler.release(seq)
        return [seq.output for seq in sequences]

    def step(self) -> None:
        """Decide, compute, and take in what came of it."""
        plan = self.scheduler.schedule()
        token_ids = self.run(plan)
        self.scheduler.commit(plan, token_ids, self.eos_token_ids)

    def run(self, plan: list[Scheduled]) -> list[int]:
        """One run of the model over all scheduled tokens -> the next token of each sequence that samples."""
        batch = make_batch([(s.seq, s.num_tokens) for s in plan], self.pool.block_size, self.device, self.attention)
        hidden = self.model(batch.input_ids, batch.positions, partial(self.cache.attend, batch))  # [T, H]
        sampled = [i for i, s in enumerate(plan) if s.sample]
        logits = self.model.logits(hidden[batch.last_tokens[sampled]])  # [len(sampled), V]
        return sample(logits, [plan[i].seq for i in sampled])
