"""Stage 2: the KV cache.

What hurt:    stage 1 computes every token of the text again for each new one.
The idea:     a token's keys and values depend only on the tokens before it, so they never change: keep them. Prefill
              runs the prompt once and fills the cache; after that, decode runs one token at a time and attends to the
              cache. The price of a token no longer grows with the text. Now that a step is small, several sequences
              can share it: a static batch, padded to a rectangle.
Still hurts:  the cache is one contiguous rectangle, for every row as long as the longest sequence may become. Short
              sequences pay for long ones, in memory that nothing will ever fill. Stage 3 hands it out in small blocks.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.checkpoint import load_model
from stages.core import OnEvent, SamplingParams, Sequence, Trace, accept, append_token, check_options, sample
from stages.model import ModelConfig


class KVCache:
    """Keys and values of a static batch: for each layer two [B, L, Hkv, D]; row = sequence, column = position."""

    def __init__(self, c: ModelConfig, batch: int, length: int, device: torch.device) -> None:
        shape = (c.num_hidden_layers, batch, length, c.num_key_value_heads, c.head_dim)
        self.k = torch.zeros(shape, device=device, dtype=c.dtype)
        self.v = torch.zeros(shape, device=device, dtype=c.dtype)

    def attend(self, positions: Tensor, mask: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new keys and values, then let each new token attend to its own row of the cache.

        positions [B, Q]: where each row's Q new tokens stand; mask [B, 1, Q, context]: which columns they see;
        q [B * Q, Hq, D], k and v [B * Q, Hkv, D], the rectangle laid flat -> [B * Q, Hq, D].
        One function for prefill (Q = longest prompt) and decode (Q = 1).
        """
        batch, num_queries = positions.shape
        # exercise 2.1: write k and v into self.k[layer] and self.v[layer] at [row, position] (unflatten them to
        #   [B, Q, Hkv, D] first; a column of row numbers broadcasts against positions).
        rows = torch.arange(batch, device=positions.device)[:, None]  # [B, 1]
        self.k[layer, rows, positions] = k.unflatten(0, (batch, num_queries))
        self.v[layer, rows, positions] = v.unflatten(0, (batch, num_queries))
        # end exercise
        context = mask.shape[-1]
        out = F.scaled_dot_product_attention(
            q.unflatten(0, (batch, num_queries)).transpose(1, 2),  # [B, Hq, Q, D]
            self.k[layer, :, :context].transpose(1, 2),  # [B, Hkv, context, D]
            self.v[layer, :, :context].transpose(1, 2),
            attn_mask=mask,
            enable_gqa=True,
        )
        return out.transpose(1, 2).flatten(0, 1)  # [B * Q, Hq, D]


class KVCacheEngine:
    """Static batches of up to `max_num_seqs` sequences: prefill together, decode together, wait for the slowest."""

    def __init__(
        self,
        model: str,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        on_event: OnEvent | None = None,
        max_num_seqs: int = 16,
    ) -> None:
        check_options(max_num_seqs=max_num_seqs)
        self.model, self.config, self.eos_token_ids, _ = load_model(model, device=device, dtype=dtype)
        self.device, self.trace = torch.device(device), Trace(on_event)
        self.max_num_seqs = max_num_seqs

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
        """Token ids in, generated token ids out. Raises ValueError for a request that makes no sense."""
        sequences = accept(prompts, params, self.config, self.trace)
        for start in range(0, len(sequences), self.max_num_seqs):
            self.run_batch(sequences[start : start + self.max_num_seqs])
        return [seq.output for seq in sequences]

    def run_batch(self, batch: list[Sequence]) -> None:
        """Prefill a static batch, then decode it until its last sequence is over."""
        # A finished row runs along with its last token, so that one needs a column too
        length = max(seq.limit for seq in batch)
        cache = KVCache(self.config, len(batch), length, self.device)
        for seq in batch:
            self.trace.emit("admitted", seq.request, cached=0)
        logits = self.prefill(cache, batch)
        running = set(range(len(batch)))
        while True:
            for row, token in enumerate(sample(logits, batch)):
                if row in running and append_token(batch[row], token, self.eos_token_ids, self.trace):
                    running.remove(row)
            if not running:
                return
            logits = self.decode(cache, batch, running)

    def prefill(self, cache: KVCache, batch: list[Sequence]) -> Tensor:
        """Run all prompts as one rectangle, padded on the right -> logits [B, V] of each prompt's last token.

        What the padding computes is thrown away: its queries are never looked at, and its keys are overwritten by
        decode before any query is allowed to see that position.
        """
        self.trace.step += 1
        for seq in batch:
            self.trace.emit("scheduled", seq.request, tokens=seq.num_prompt_tokens, cached=0)
        longest = max(seq.num_prompt_tokens for seq in batch)
        padded = [seq.token_ids + [0] * (longest - len(seq.token_ids)) for seq in batch]
        input_ids = torch.tensor(padded, device=self.device)  # [B, L]
        positions = torch.arange(longest, device=self.device).expand(len(batch), longest)  # [B, L]
        hidden = self.forward(cache, input_ids, positions)  # [B, L, H]
        # exercise 2.2: the hidden state of each prompt's last real token [B, H], and the logits from it.
        rows = torch.arange(len(batch), device=self.device)
        last = torch.tensor([seq.num_prompt_tokens - 1 for seq in batch], device=self.device)
        return self.model.logits(hidden[rows, last])
        # end exercise

    def decode(self, cache: KVCache, batch: list[Sequence], running: set[int]) -> Tensor:
        """Run the newest token of every sequence -> logits [B, V]. A finished row is dead weight: it runs along."""
        self.trace.step += 1
        for row in sorted(running):
            self.trace.emit("scheduled", batch[row].request, tokens=1, cached=len(batch[row].token_ids) - 1)
        # exercise 2.3: input ids [B, 1] and positions [B, 1] of the newest tokens; forward; logits [B, V].
        input_ids = torch.tensor([[seq.token_ids[-1]] for seq in batch], device=self.device)
        positions = torch.tensor([[len(seq.token_ids) - 1] for seq in batch], device=self.device)
        return self.model.logits(self.forward(cache, input_ids, positions)[:, 0])
        # end exercise

    def forward(self, cache: KVCache, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The rectangle [B, Q] laid flat, through the model, and back -> [B, Q, H]."""
        # exercise 2.4: the mask [B, 1, Q, context]: a query sees the keys at positions up to its own, in its own row.
        #   No query looks beyond the largest position, so that is how many columns of the cache are read.
        context = int(positions.max()) + 1
        columns = torch.arange(context, device=self.device)
        mask = columns <= positions[:, None, :, None]
        # end exercise
        attend = partial(cache.attend, positions, mask)
        return self.model(input_ids.flatten(), positions.flatten(), attend).unflatten(0, input_ids.shape)
