"""Exercise 1b: The next token of several texts, from one pass through the model.

Stage 1 serves one text at a time, and reads all weights for each of its steps. Several texts could share them: the
model never asks which text a token belongs to. It takes tokens and their positions, and hands queries, keys and values
of all of them to the function that you give it.

`generate` below is finished: at every step it asks for the scores of all texts that still run, and lets those leave
that are over. Write `scores`: one pass, with the texts laid end to end.

1. The tokens of all texts in one long row. Every text begins at position 0.
2. An `attend` of your own, in which a token sees its own text and nothing of its neighbours. Stage 1's attend_to_all
   does it for one text; where does each text begin and end in the row?
3. The last token of each text has the scores, not the last of the row.

Then measure: how much faster are eight short texts together than one after the other, and eight long ones? Which part
of a step's price do they share?

Check: .venv/bin/python -m tools.lectures.lecture_exercises 1b    (it counts the passes)
"""

import torch
from torch import Tensor

from stages.core import SamplingParams, Sequence, append_token, make_sequences, sample
from stages.stage_1_naive import NaiveEngine


class TogetherEngine(NaiveEngine):
    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
        sequences = make_sequences(
            prompts, params, vocab_size=self.vocab_size, max_model_len=self.config.max_position_embeddings
        )
        running = list(sequences)
        while running:
            chosen = sample(self.scores(running), running)
            over = [append_token(s, t, self.eos_token_ids, self.events) for s, t in zip(running, chosen, strict=True)]
            running = [s for s, finished in zip(running, over, strict=True) if not finished]
        return [seq.output for seq in sequences]

    def scores(self, batch: list[Sequence]) -> Tensor:
        """The logits [len(batch), V] of the next token of each text."""
        return torch.cat([self.next_token_logits(seq) for seq in batch])  # a pass for each; yours to mend
