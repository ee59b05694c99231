"""Solution of exercise 1b. Cut the row into texts for attention, and for nothing else."""

import torch
from torch import Tensor

from stages.core import SamplingParams, Sequence, accept, append_token, sample
from stages.stage_1_naive import NaiveEngine, attend_to_all


class TogetherEngine(NaiveEngine):
    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
        sequences = accept(prompts, params, self.config, self.trace)
        running = list(sequences)
        while running:
            chosen = sample(self.scores(running), running)
            over = [append_token(s, t, self.eos_token_ids, self.trace) for s, t in zip(running, chosen, strict=True)]
            running = [s for s, finished in zip(running, over, strict=True) if not finished]
        return [seq.output for seq in sequences]

    def scores(self, batch: list[Sequence]) -> Tensor:
        """The logits [len(batch), V] of the next token of each text."""
        # exercise 1b: one pass, with the texts laid end to end
        # instead: return torch.cat([self.next_token_logits(seq) for seq in batch])  # a pass for each; yours to mend
        lengths = [len(seq.token_ids) for seq in batch]
        input_ids = torch.tensor([token for seq in batch for token in seq.token_ids], device=self.device)  # [T]
        positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])  # [T]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            texts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
            return torch.cat([attend_to_all(layer, *text) for text in texts])

        hidden = self.model(input_ids, positions, attend)  # [T, H]
        last = torch.tensor(lengths, device=self.device).cumsum(0) - 1  # [N]
        return self.model.logits(hidden[last])
        # end exercise
