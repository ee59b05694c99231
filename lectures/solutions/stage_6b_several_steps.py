"""Solution of exercise 6b. Padding stays in the scratch block: its table leads nowhere else.

Who pays: whoever comes in the middle of a replay, and sequences that end in one. Real engines have left this path: with
asynchronous scheduling the CPU prepares the next step while this one runs, and nobody has to wait for several.
"""

from typing import Any

import torch
from torch import Tensor

from stages.stage_5_continuous_batching import ContinuousBatchingEngine, Scheduled
from stages.stage_6_cuda_graphs import CUDAGraphEngine, Rows


def advance(rows: Rows, tokens: Tensor, block_size: int) -> None:
    """From the token that each row has computed to the one that it has chosen, without asking for any value."""
    # exercise 6b: input_ids, positions, context_lens and slots of the next token, in place
    rows.input_ids.copy_(tokens)
    rows.positions.add_(1)
    rows.context_lens.add_(1)
    block = rows.block_tables.gather(1, (rows.positions // block_size)[:, None])[:, 0]  # [b]
    rows.slots.copy_(block * block_size + rows.positions % block_size)
    # end exercise


class SeveralStepsEngine(CUDAGraphEngine):
    def __init__(self, model: str, *, num_steps: int = 4, **options: Any) -> None:
        self.num_steps = num_steps
        super().__init__(model, **options)

    def decode_step(self, bucket: int) -> Tensor:
        """What is recorded: `num_steps` tokens of each row, [b, num_steps]."""
        # exercise 6b: `num_steps` steps and all their tokens
        # instead: return super().decode_step(bucket)  # yours to write
        rows = Rows.of(self.memory_of(self.device_memory, bucket), bucket)  # the very memory that the step reads
        chosen: list[Tensor] = []
        for step in range(self.num_steps):
            if step:
                advance(rows, chosen[-1], self.pool.block_size)
            chosen.append(super().decode_step(bucket))
        return torch.stack(chosen, dim=1)
        # end exercise

    def bucket_for(self, plan: list[Scheduled]) -> int | None:
        """None also where somebody samples, has fewer tokens to go than a replay gives, or gets no blocks for them."""
        bucket = super().bucket_for(plan)
        for seq in (s.seq for s in plan) if bucket else ():
            left = seq.limit - len(seq.token_ids)
            short = left < self.num_steps or not self.scheduler.allocate(seq, seq.num_computed + self.num_steps)
            if seq.params.temperature > 0 or short:
                return None
        return bucket

    def step(self) -> None:
        """Stage 5's, but a replay gives each sequence several tokens, which are taken in one after another."""
        plan = self.scheduler.schedule()
        bucket = self.bucket_for(plan)
        if bucket is None:
            self.scheduler.commit(plan, ContinuousBatchingEngine.run(self, plan), self.eos_token_ids)
            return
        chosen: Any = self.replay(bucket, [s.seq for s in plan])  # for each sequence its next `num_steps` tokens
        for step in range(self.num_steps):
            # A sequence that is over has left: what comes behind its end was computed for nothing
            left = [i for i, s in enumerate(plan) if s.seq in self.scheduler.running]
            self.scheduler.commit([plan[i] for i in left], [chosen[i][step] for i in left], self.eos_token_ids)
