"""Exercise 5a: Preempt whoever costs least to compute again. Does it pay?

When no block is left, stage 5 preempts the latest arrival. That one may be in the middle of a long text, all of which
has to be computed again, while an earlier one has hardly begun.

`schedule` below is stage 5's, but for one line: it asks `choose_victim` whom to preempt. Write it. The candidates are
the sequence that needs a block and all that arrived later; nobody earlier may be chosen, or the first would not always
advance, and two sequences could push each other out for ever. Take the candidate with the fewest computed tokens; of
equals, the latest arrival.

Then write `tokens_computed(events)`: how many tokens the engine sent through the model in all. It is the measure of
what preemption costs, and does not depend on the machine.

Before you measure, guess: on random workloads in a pool that is too small, how many percent does it save? Then run both
over a few hundred seeds (`served` in the check is a start), and explain what you see. Two hints: how often does each
policy preempt, and what of a victim's text is still in the prefix cache when it comes back?

Check: .venv/bin/python -m tools.lectures.lecture_exercises 5a
"""

from collections.abc import Sequence as SequenceOf
from typing import Any

from stages.core import Event, Sequence
from stages.stage_5_continuous_batching import ContinuousBatchingEngine, Scheduled, Scheduler


def choose_victim(candidates: SequenceOf[Sequence]) -> Sequence:
    """`candidates` in order of arrival; the first of them is the one that needs a block."""
    return candidates[-1]  # stage 5's choice; yours to mend


def tokens_computed(events: SequenceOf[Event]) -> int:
    raise NotImplementedError("exercise 5a: how many tokens went through the model")


class CheapestVictimScheduler(Scheduler):
    def schedule(self) -> list[Scheduled]:
        budget = self.max_num_batched_tokens
        plan: list[Scheduled] = []
        for seq in list(self.running):
            if seq not in self.running or budget == 0:
                continue
            num_tokens = min(len(seq.tokens) - seq.num_computed, budget)
            while not self.allocate(seq, seq.num_computed + num_tokens):
                victim = choose_victim(self.running[self.running.index(seq) :])
                self.preempt(victim)
                if victim is seq:
                    break
            if seq in self.running:
                plan.append(Scheduled(seq, num_tokens))
                budget -= num_tokens
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if not self.allocate(seq, len(seq.tokens)):
                break
            self.running.append(self.waiting.popleft())
            self.running.sort(key=lambda s: s.request)  # a victim may be earlier than some that still run
            num_tokens = min(len(seq.tokens) - seq.num_computed, budget)
            plan.append(Scheduled(seq, num_tokens))
            budget -= num_tokens
            self.events.emit("admitted", seq.request, cached=seq.num_computed)
        return plan


class CheapestVictimEngine(ContinuousBatchingEngine):
    def __init__(
        self, model: str, *, max_num_seqs: int = 16, max_num_batched_tokens: int = 512, **options: Any
    ) -> None:
        super().__init__(model, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **options)
        self.scheduler = CheapestVictimScheduler(self.pool, max_num_seqs, max_num_batched_tokens, self.events)
