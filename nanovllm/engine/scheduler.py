"""Continuous batching: what the next step computes, which sequences get memory, which give it back.

One rule: a sequence has tokens it knows and tokens whose KV is computed, and a step computes some of that gap. Prefill,
chunked prefill, decode, prefix hits and recomputation after a preemption are all this rule. (Scheduling by
iteration: Orca, Yu et al. 2022; chunks beside decodes: Sarathi-Serve, Agrawal et al. 2024; recomputation: vLLM.)
"""

from bisect import bisect_left, insort
from collections import Counter
from heapq import heappop, heappush
from operator import attrgetter

from nanovllm.config import EngineConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.guesses import Proposer, make_proposer
from nanovllm.engine.plan import Scheduled, Scored, StepPlan, StepResult, TokenLogprobs
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.trace import Trace
from nanovllm.outputs import FinishReason, SpeculationStats

_order = attrgetter("priority", "arrival")

NOTHING_ALLOWED = (
    "no token is left: structured_outputs, together with the request's other parameters, allows none here, or the "
    "logits are not finite"
)

# What a step added to a sequence: the sequence, its new tokens up to the one that ended it, their log-probabilities.
# The sequence's `finish_reason` says whether they ended it. A plain tuple: hundreds are made in each step.
Committed = tuple[Sequence, list[int], list[TokenLogprobs] | None]


class Scheduler:
    """Owns queues, rows and blocks. `schedule` may run one step ahead of `commit`: it reads lengths, never new tokens.

    Policy. The order is (priority, arrival), the smaller first. When blocks run out, the running sequence that is last
    in order is preempted, possibly the one that needs a block. So the first sequence in order always advances. The
    pool has room for it alone, so every sequence ends. A waiting sequence takes a seat or blocks only from sequences of
    strictly worse priority, and never overtakes another sequence of its own priority.
    """

    def __init__(self, config: EngineConfig, trace: Trace | None = None, window: int = 0) -> None:
        if config.kvcache_block_size is None or config.num_kv_blocks is None:
            raise ValueError("kvcache_block_size and num_kv_blocks must be known by now: see EngineConfig.resolve")
        self.config = config
        self.trace = trace or Trace()
        self.window = window
        self.num_kv_blocks: int = config.num_kv_blocks
        self.block_size: int = config.kvcache_block_size
        self.proposer = None if config.speculation is None else make_proposer(config.speculation)
        self.max_guesses = 0 if config.speculation is None else config.speculation.k
        self.speculation = SpeculationStats()  # of all sequences there ever were
        self._num_steps = 0
        self.reset()

    def reset(self) -> None:
        """Forget all sequences and all cached blocks, also from a state that an exception left half changed."""
        self.blocks = BlockManager(self.num_kv_blocks, self.block_size, self.config.enable_prefix_caching, self.window)
        self.sequences: dict[int, Sequence] = {}  # by key, all that are not finished
        self.num_matchers = 0  # how many of these have one
        # Both in order of (priority, arrival). To join or leave moves one pointer for each sequence after it: with ten
        # thousand waiting, that takes two microseconds.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._free_rows = list(range(self.config.max_num_seqs))  # a heap: low rows first
        self._freed_rows = list(self._free_rows)  # not yet told to the data plane; of what it holds nothing is known
        # The plan in the making: its sequences (`num_planned` says how much of each), and what is left of the budget.
        self._planned: list[Sequence] = []
        self._budget = 0
        # The waiting sequence that was looked up last in the prefix cache, and the free blocks that it needed; kept
        # until the sequence starts, or more of its text can be found. Until then it has no more hits, and needs no
        # fewer free blocks: only the start of another sequence takes free hits into use, and it was looked up later.
        self._looked_up: Sequence | None = None
        self._num_needed = 0
        self._guesses: dict[Sequence, tuple[int | None, ...]] = {}
        self._scoring: dict[Sequence, None] = {}  # admitted with tokens to score, in this order

    def add(self, seq: Sequence) -> None:
        self.sequences[seq.key] = seq
        self.num_matchers += seq.matcher is not None
        insort(self.waiting, seq, key=_order)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence in whatever state it is. A step in flight that contains it will find it gone."""
        del self.sequences[seq.key]
        self.num_matchers -= seq.matcher is not None
        seq.finish_reason = reason
        was, seq.status = seq.status, SequenceStatus.FINISHED
        queue = self.running if was is SequenceStatus.RUNNING else self.waiting
        del queue[bisect_left(queue, _order(seq), key=_order)]
        if was is SequenceStatus.RUNNING:
            self._release(seq, keep_cached=reason != "error")
        self.trace.emit("finished", seq, reason=reason)

    def schedule(self) -> StepPlan:
        """Plan a step. With nothing in `scheduled` it need not run (and `freed_rows` waits for the next plan)."""
        self.trace.step = self._num_steps
        self._planned, self._budget, self._guesses = [], self.config.max_num_batched_tokens, {}
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        for seq in self.running:
            # A sequence that knows its last token, or has it in flight, only awaits the commit of that token.
            if seq.num_known < seq.limit:
                (decodes if seq.num_known - seq.num_computed == 1 else prompts).append(seq)
        for seq in decodes + prompts:
            if not self._budget:
                break
            num_tokens = seq.num_known - seq.num_computed
            if num_tokens > self._budget:
                num_tokens = self._budget
            # Between two plans, all blocks of a running sequence have been sent.
            if seq.num_computed + num_tokens > seq.num_blocks_sent * self.block_size:
                self._make_room(seq, seq.num_computed + num_tokens)
            if seq.row >= 0:  # else it was preempted, just now or for one before it
                seq.num_planned = num_tokens
                self._planned.append(seq)
                self._budget -= num_tokens
        self._admit()
        if self.proposer is not None:
            self._speculate(self.proposer)
        return self._finish_plan()

    def _make_room(self, seq: Sequence, num_tokens: int) -> None:
        """Grow the block table of a running sequence to `num_tokens`. If need be, preempt whoever is last in order,
        which may be `seq` itself. If all layers have windows, `seq` first gives back blocks that none reads again."""
        if self.window:
            self.trace.blocks(seq, freed=self.blocks.release_unseen(seq))
        needed = self.blocks.num_blocks_for(num_tokens) - len(seq.block_table)
        while seq.row >= 0 and needed > self.blocks.num_free:
            self._preempt(seq, needed)
        if seq.row >= 0:
            self.trace.blocks(seq, taken=self.blocks.grow(seq, num_tokens))

    def _admit(self) -> None:
        """Let waiting sequences start, in order, until one does not fit."""
        while self._budget and self.waiting:
            seq = self.waiting[0]
            # Preempted with a step in flight: its next token may not be known yet. Its turn is not given to another.
            if seq.num_in_flight:
                return
            no_seat = not self._free_rows and self.running[-1].priority <= seq.priority
            if no_seat or (self._looked_up is seq and not self._may_fit(seq)):
                return
            cached = self.blocks.find_prefix(seq)
            self._looked_up, self._num_needed = seq, self.blocks.num_needed(seq.num_known, cached)
            whole = not self.config.enable_chunked_prefill and not seq.num_preemptions
            if whole and len(cached) * self.block_size + self._budget < seq.num_known:
                return
            if not self._claim_seat(seq, cached):
                return
            del self.waiting[0]
            self._start(seq, cached)
            num_tokens = min(seq.num_known - seq.num_computed, self._budget)
            self.trace.blocks(seq, shared=cached, taken=self.blocks.grow(seq, seq.num_computed + num_tokens))
            seq.num_planned = num_tokens
            self._planned.append(seq)
            self._budget -= num_tokens

    def _may_fit(self, seq: Sequence) -> bool:
        """Whether to look `seq` up again, which costs more the longer its beginning is. The last look-up was in vain,
        and `seq` needs no fewer blocks now. Blocks that victims share are counted for each of them."""
        most = self.blocks.num_free + sum(len(v.block_table) for v in self.running if v.priority > seq.priority)
        return self._num_needed <= most

    def _speculate(self, proposer: Proposer) -> None:
        """Spend on guesses what is left of the token budget, and blocks that nobody needs now. A step full of prompts
        has no guesses, and nobody is preempted for one."""
        for seq in self._planned:
            end = seq.num_computed + seq.num_planned
            room = (len(seq.block_table) + self.blocks.num_free) * self.block_size - end
            # One token will come without any guess, and nothing is scheduled past the last one.
            k = min(self.max_guesses, seq.limit - seq.num_known - 1, self._budget, room)
            if end == seq.num_known and k > 0 and (guesses := proposer.propose(seq, k)):
                self._guesses[seq] = tuple(guesses)
                self._budget -= len(guesses)
                self.trace.blocks(seq, taken=self.blocks.grow(seq, end + len(guesses)))

    def _claim_seat(self, seq: Sequence, cached: list[int]) -> bool:
        """Make sure of a row, and of blocks for all tokens of `seq`: with blocks for its first chunk alone, it would
        soon be preempted. If need be, preempt running sequences of strictly worse priority: as few as suffice, and
        none if all of them would not suffice. Returns whether `seq` may start."""
        shortage = self._num_needed - self.blocks.num_free
        shared = set(cached)
        users: Counter[int] = Counter()  # how many victims use a block
        victims = 0
        for victim in reversed(self.running):
            if victim.priority <= seq.priority or (shortage <= 0 and (victims or self._free_rows)):
                break
            victims += 1
            held = victim.block_table[victim.num_unseen :]
            users.update(held)
            # A block is free when its last user is gone. One that `seq` will share was never part of the shortage.
            shortage -= sum(users[b] == self.blocks.ref_counts[b] and b not in shared for b in held)
        if shortage > 0:
            return False
        for _ in range(victims):
            self._preempt(seq, self._num_needed)
        return True

    def _start(self, seq: Sequence, cached: list[int]) -> None:
        """Move a sequence from waiting to running, with the blocks `cached` as its beginning."""
        self.blocks.share(seq, cached)
        self._looked_up = None
        seq.status = SequenceStatus.RUNNING
        seq.row = heappop(self._free_rows)
        seq.num_computed = len(cached) * self.block_size
        insort(self.running, seq, key=_order)
        if seq.num_scored < seq.num_to_score:
            self._scoring[seq] = None
        if seq.first_scheduled_time is None:
            seq.first_scheduled_time = self.trace.clock()
            seq.num_cached_tokens = seq.num_computed
        self.trace.emit("admitted", seq, cached=seq.num_computed)

    def _preempt(self, by: Sequence, needs: int) -> None:
        """Take row, blocks and share of the unfinished plan from the running sequence that is last in order, since `by`
        needs so many blocks, or a row."""
        seq, free = self.running.pop(), self.blocks.num_free
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        if seq.num_planned:
            self._planned.remove(seq)
            self._budget += seq.num_planned
            seq.num_planned = 0
        insort(self.waiting, seq, key=_order)
        self.trace.emit("preempted", seq, by=[by.request_id, by.choice], needs=needs, free=free)

    def _release(self, seq: Sequence, keep_cached: bool = True) -> None:
        """Give back row and blocks at once, even with a step in flight: their next user is computed after that step."""
        self.trace.blocks(seq, freed=self.blocks.release(seq, keep_cached))
        heappush(self._free_rows, seq.row)
        self._freed_rows.append(seq.row)
        self._scoring.pop(seq, None)
        seq.row = -1
        seq.num_computed = seq.num_blocks_sent = 0

    def _finish_plan(self) -> StepPlan:
        """Write the plan down, and advance the sequences as if it had run."""
        if not self._planned:
            return StepPlan(self._num_steps, [])
        scheduled = []
        for seq in self._planned:
            start = seq.num_computed
            num_tokens, seq.num_planned = seq.num_planned, 0
            seq.num_computed = end = start + num_tokens
            guesses = self._guesses.get(seq, ())
            seq.num_in_flight += 1
            sample = end == seq.num_known
            if sample:
                seq.num_known += 1  # the next token: known by its length only, until the commit
            new_blocks: tuple[int, ...] = ()
            if end + len(guesses) > seq.num_blocks_sent * self.block_size:
                new_blocks = tuple(seq.block_table[seq.num_blocks_sent :])
                seq.num_blocks_sent = len(seq.block_table)
            num_tokens += len(guesses)
            # This takes little more than half of the constructor's time, a good part of what a decode costs the host.
            item = tuple.__new__(Scheduled, (seq.key, seq.row, start, num_tokens, sample, new_blocks, guesses))
            scheduled.append(item)
            if self.trace.on_event is not None:
                self.trace.emit("scheduled", seq, tokens=num_tokens, cached=start)
        masked: list[int] = []
        if self.num_matchers:
            masked = [s.key for s in scheduled if s.sample and self.sequences[s.key].matcher is not None]
        scored = self._score() if self._scoring else []
        plan = StepPlan(self._num_steps, scheduled, self._freed_rows, masked, scored)
        self._freed_rows = []
        self._num_steps += 1
        return plan

    def _score(self) -> list[Scored]:
        """What this plan computes of the tokens to score, and was not planned before."""
        scored = []
        for seq in list(self._scoring):
            start, end = seq.num_scored, min(seq.num_computed, seq.num_to_score)
            if start < end:
                scored.append(Scored(seq.key, start, end))
                seq.num_scored = end
            if end == seq.num_to_score:
                del self._scoring[seq]
        return scored

    def commit(self, plan: StepPlan, result: StepResult) -> list[Committed]:
        """Take in what a step computed and sampled. Steps are committed in order, each once."""
        self.trace.step = plan.step
        committed = []
        for key, found in result.prompt_logprobs.items():
            if key in self.sequences:
                self.sequences[key].prompt_logprobs += found
        for key, _, start, num_tokens, sample, _, guesses in plan.scheduled:
            seq = self.sequences.get(key)
            if seq is None:  # the sequence ended while the step was in flight: its new token is surplus
                continue
            seq.num_in_flight -= 1
            sampled, logprobs = result.tokens[key] if sample else ([], None)
            token_ids, num_known = sampled, len(seq.token_ids)
            reason = self._append(seq, sampled)
            if reason is not None:
                token_ids = seq.token_ids[num_known:]
                logprobs = logprobs and logprobs[: len(token_ids)]
            if reason == "error":
                self.finish(seq, "error")
                committed.append((seq, token_ids, logprobs))
                continue
            end = start + num_tokens
            if guesses:
                num_accepted = min(len(sampled) - 1, len(token_ids))  # behind the end of a sequence they are surplus
                for stats in seq.speculation, self.speculation:
                    stats.count(len(guesses), num_accepted, len(token_ids))
                self._roll_back(seq)
                end = seq.num_computed
            # A sequence without a row was preempted after this step was planned: its blocks are no longer its own.
            if seq.row >= 0 and end // self.block_size > seq.num_published:
                self._publish(seq, end)
            if sample:
                if self.trace.on_event is not None:
                    self.trace.emit("token", seq, ids=token_ids)
                if reason is not None:
                    self.finish(seq, reason)
                committed.append((seq, token_ids, logprobs))
        return committed

    def _append(self, seq: Sequence, token_ids: list[int]) -> FinishReason | None:
        """Append new tokens up to the one that ends the sequence, if one does; returns why it ends.

        Apart from an abort, nothing else ends a sequence: its detokenizer is asked here for stop strings.
        """
        for token in token_ids:
            if token == -1:
                if seq.matcher is not None:
                    seq.stop_reason = NOTHING_ALLOWED
                return "error"
            if seq.matcher is not None and (refusal := seq.matcher.accept(token)):
                seq.stop_reason = refusal
                return "error"
            seq.token_ids.append(token)
            stops, stop_string = token in seq.stop_ids and seq.num_output_tokens >= seq.params.min_tokens, None
            # A token that ends the output stays in its ids, but is not text, unless that is asked for.
            if seq.read_token is not None and (not stops or seq.params.include_stop_str_in_output):
                stop_string = seq.read_token(token)
            if stops or stop_string:
                seq.stop_reason = stop_string or (None if token in seq.eos_ids else token)
                return "stop"
            if len(seq.token_ids) >= seq.limit:
                return "length"
        return None

    def _publish(self, seq: Sequence, num_computed: int) -> None:
        """Make full blocks findable. A waiting sequence with the same text is worth another look-up then."""
        for i in self.blocks.publish(seq, num_computed):
            if self._looked_up is not None and self._looked_up.digests[i : i + 1] == seq.digests[i : i + 1]:
                self._looked_up = None

    def _roll_back(self, seq: Sequence) -> None:
        """Forget the KV of wrong guesses, and the blocks that hold nothing else. The next step computes the last token,
        as ever. No step is in flight here: speculation is synchronous."""
        seq.num_known = len(seq.token_ids)
        seq.num_computed = seq.num_known - 1
        num_kept = self.blocks.num_blocks_for(seq.num_computed)
        self.trace.blocks(seq, freed=self.blocks.release(seq, num_kept=num_kept))
        seq.num_blocks_sent = num_kept
