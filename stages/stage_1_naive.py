"""Stage 1: naive generation.

What hurts:   nothing yet. This is what a language model does: given a text, it scores every token that could come next.
The idea:     score, choose one, append it, and start again with the longer text. That is all of `generate`.
Still hurts:  to choose token 500, tokens 1 to 499 go through the whole network again, though nothing about them has
              changed. The work per token grows with the length of the text, and one text is served at a time.
              Stage 2 keeps what was computed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.checkpoint import load_model
from stages.core import OnEvent, SamplingParams, Sequence, Trace, accept, append_token, sample


def attend_to_all(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal self-attention over one whole text: every token sees itself and all before it.

    q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D] (Vaswani et al., 2017; several query heads share one key/value
    head: grouped-query attention, Ainslie et al., 2023).
    """
    # exercise 1.1: attention where token i sees tokens 0..i. Put the heads first ([heads, T, D]), call
    #   F.scaled_dot_product_attention with is_causal and enable_gqa, put the tokens first again.
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, T, D]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # [1, Hq, T, D]
    return out.squeeze(0).transpose(0, 1)
    # end exercise


class NaiveEngine:
    """One sequence at a time, everything computed again for every token."""

    def __init__(
        self, model: str, *, device: str = "cpu", dtype: torch.dtype | None = None, on_event: OnEvent | None = None
    ) -> None:
        self.model, self.config, self.eos_token_ids, _ = load_model(model, device=device, dtype=dtype)
        self.device, self.trace = torch.device(device), Trace(on_event)

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
        """Token ids in, generated token ids out. Raises ValueError for a request that makes no sense."""
        sequences = accept(prompts, params, self.config, self.trace)
        for seq in sequences:
            self.trace.emit("admitted", seq.request, cached=0)
            self.complete(seq)
        return [seq.output for seq in sequences]

    def complete(self, seq: Sequence) -> None:
        """Append tokens to `seq` until it is over."""
        # exercise 1.2: the whole of text generation. Until append_token says that the sequence is over: compute the
        #   logits of the next token from all tokens so far, sample one, append it.
        finished = False
        while not finished:
            logits = self.next_token_logits(seq)
            [token] = sample(logits, [seq])
            finished = append_token(seq, token, self.eos_token_ids, self.trace)
        # end exercise

    def next_token_logits(self, seq: Sequence) -> Tensor:
        """Run the whole text through the model; only the last position's scores [1, V] are of use."""
        self.trace.step += 1
        self.trace.emit("scheduled", seq.request, tokens=len(seq.token_ids), cached=0)
        # exercise 1.3: input ids and positions [T] on self.device, the model with attend_to_all, the logits of the
        #   last token alone (as a batch of one).
        input_ids = torch.tensor(seq.token_ids, device=self.device)  # [T]
        positions = torch.arange(len(seq.token_ids), device=self.device)  # [T]
        hidden = self.model(input_ids, positions, attend_to_all)  # [T, H]
        return self.model.logits(hidden[-1:])  # [1, V]
        # end exercise
