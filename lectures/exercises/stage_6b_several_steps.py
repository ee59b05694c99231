"""Exercise 6b: Record several decode steps, and ask the CPU once for all of them.

A replay gives one token a sequence. The CPU reads it, writes it into the input memory, adds one to every position, and
replays. All of that is arithmetic, and the device could do it alone: then `num_steps` steps are one recording, and the
CPU is asked once for `num_steps` tokens. (vLLM's first engine had this, under the name of multi-step scheduling.)

`SeveralStepsEngine` is complete but for what is recorded:

1. `advance`: the input memory describes the newest token of each row. Let it describe the next one: `tokens` [b] are
   what the step has chosen. Positions, lengths and slots follow from what is there already. A recording knows addresses
   only: write into the tensors (copy_, add_), a new tensor under an old name is not noticed. Padding rows move on like
   all others; where do they write?
2. `decode_step`: `num_steps` times the stage's own step, and the tokens of all of them, [num_steps, b].

Then think: who pays? A request that comes just now waits for the end of a replay. A sequence that ends in the middle of
one computes the rest for nothing. For which `num_steps` is it still worth it?

Check: .venv/bin/python -m tools.lectures.lecture_exercises 6b    (it records on tape, as a GPU would, and counts the
replays)
"""

from typing import Any

from torch import Tensor

from stages.core import Sequence, append_token, sample
from stages.stage_5_continuous_batching import Scheduled
from stages.stage_6_cuda_graphs import CUDAGraphEngine, Rows


def advance(rows: Rows, tokens: Tensor, block_size: int) -> None:
    """From the token that each row has computed to the one that it has chosen, without asking for any value."""
    raise NotImplementedError("exercise 6b: input_ids, positions, context_lens and slots of the next token, in place")


class SeveralStepsEngine(CUDAGraphEngine):
    def __init__(self, model: str, *, num_steps: int = 4, **options: Any) -> None:
        self.num_steps = num_steps
        super().__init__(model, **options)

    def decode_step(self, bucket: int) -> Tensor:
        """What is recorded: `num_steps` tokens of each row, [num_steps, b]."""
        return super().decode_step(bucket)  # yours to write

    # From here on nothing is missing

    def bucket_for(self, plan: list[Scheduled]) -> int | None:
        """None also where somebody samples, has fewer tokens to go than a replay gives, or gets no blocks for them."""
        bucket = super().bucket_for(plan)
        for seq in (s.seq for s in plan) if bucket else ():
            left = seq.max_tokens_total - len(seq.tokens)
            short = left < self.num_steps or not self.scheduler.allocate(seq, seq.num_computed + self.num_steps)
            if seq.params.temperature > 0 or short:
                return None
        return bucket

    def step(self) -> None:
        """Stage 6's, but a sequence gets as many tokens as the replay has for it."""
        self.events.step += 1
        plan = self.scheduler.schedule()
        bucket = self.bucket_for(plan)
        for s in plan:
            num_tokens = self.num_steps if bucket else s.num_tokens
            self.events.emit("scheduled", s.seq.request, tokens=num_tokens, cached=s.seq.num_computed)
        sampled = [i for i, s in enumerate(plan) if s.reaches_end]
        going_on = [plan[i].seq for i in sampled]
        if bucket:
            chosen = self.replay_all(bucket, going_on)
        else:
            chosen = [[token] for token in sample(self.forward(plan, sampled), going_on)]
        for s in plan:
            s.seq.num_computed += s.num_tokens
            self.pool.publish(s.seq)
        for seq, tokens in zip(going_on, chosen, strict=True):
            over = False
            while tokens and not over:  # what comes after an end-of-sequence token was computed for nothing
                over = append_token(seq, tokens.pop(0), self.eos_token_ids, self.events)
            seq.num_computed = len(seq.tokens) - 1
            self.pool.publish(seq)
            if over:
                self.scheduler.finish(seq)

    def replay_all(self, bucket: int, batch: list[Sequence]) -> list[list[int]]:
        """Copy in, replay, copy out -> for each sequence its next `num_steps` tokens."""
        host = self.memory_of(self.host_memory, bucket)
        Rows.of(host, bucket).fill(batch, self.pool.block_size, self.scratch_block)
        self.memory_of(self.device_memory, bucket).copy_(host, non_blocking=True)
        tokens: list[list[int]] = self.graphs[bucket].replay()[:, : len(batch)].T.tolist()
        return tokens
