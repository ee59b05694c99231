"""A smaller model that guesses what the target will say.

Its KV cache has the target's blocks, tables and slots, with tensors of its own. A step gives the draft the same known
tokens as the target, and one more turn for every guess, the last one included, which guesses nothing that is used. So
both caches always hold the same positions, and nothing has to be caught up with: a rejected guess, a preemption or a
prefix found in the cache means the same for both.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention import select_backend
from nanovllm.attention.interface import AttentionMetadata, BoundAttention
from nanovllm.config import EngineConfig, Speculation
from nanovllm.engine.plan import Scheduled
from nanovllm.graphs.cuda_graphs import DecodeBatch, DecodeGraphs, Recorder, batch_sizes, record_nothing
from nanovllm.models.checkpoint import find_checkpoint
from nanovllm.models.config import ModelConfig, read_config
from nanovllm.models.loader import LoadedModel, load_model
from nanovllm.runner.batch import Batch, make_batch
from nanovllm.runner.rows import Rows, to_device
from nanovllm.sampling.rejection import draw_guesses
from nanovllm.sampling.sampler import Draws, constrain
from nanovllm.sampling.sampling_state import Needs, SamplingState


def read_draft_config(speculation: Speculation, target: ModelConfig) -> ModelConfig:
    """Raises ValueError for a draft that is no checkpoint, or does not fit the target."""
    assert speculation.model is not None
    try:
        config = read_config(find_checkpoint(speculation.model, weights=False))
    except ValueError as error:
        raise ValueError(f"speculative['model']: {error}") from None
    if config.vocab_size != target.vocab_size:
        raise ValueError(
            f"speculative['model']={str(speculation.model)!r} has a vocabulary of {config.vocab_size} tokens, and the "
            f"target one of {target.vocab_size}; take a draft with the target's tokenizer"
        )
    return config


def load_draft(model: str | Path, target: ModelConfig, config: EngineConfig, device: torch.device) -> LoadedModel:
    """The draft in the target's dtype. Of several ranks each has the whole of it."""
    return load_model(
        model, device=device, dtype=target.dtype, max_model_len=config.max_model_len, load_format=config.load_format
    )


class DraftModel:
    """Shares the target's rows and their sampling parameters: q is filtered as p is, which makes them agree more."""

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, rows: Rows, sampling: SamplingState, recorder: Recorder | None
    ) -> None:
        c = loaded.config
        self.model = loaded.model
        self.rows, self.sampling = rows, sampling
        self.backend = select_backend(config.attention_backend, rows.device, c.head_dim, rows.block_size, c.dtype)
        self.scale = c.head_dim**-0.5
        shape = (2, rows.scratch_block + 1, rows.block_size, c.num_key_value_heads, c.head_dim)
        self.kv = [torch.zeros(shape, dtype=c.dtype, device=rows.device) for _ in range(c.num_hidden_layers)]
        self.graphs: DecodeGraphs | None = None
        if recorder is not None and (self.backend.capturable or recorder is record_nothing):
            assert config.speculation is not None
            self.logits = torch.empty(config.max_num_seqs, c.vocab_size, dtype=c.dtype, device=rows.device)  # [B, V]
            copies = config.speculation.k + 1  # the turns of a step; the step before is over
            with torch.inference_mode():
                sizes = batch_sizes(config.max_num_seqs, 0)
                self.graphs = DecodeGraphs(rows, sizes, self.decode, recorder, copies=copies)

    def propose(self, scheduled: Sequence[Scheduled], needs: Needs, all_greedy: bool) -> Tensor | None:
        """Write the guesses of a step into the rows, and one more for each sequence.

        Returns the distributions they were drawn from, in the order of the positions that the target samples at
        [N, V] float32; None if all rows are greedy.
        """
        last = {s.key: s.start + s.num_tokens for s in scheduled}  # where the guess goes that the target never sees
        turn = [s._replace(num_tokens=s.num_tokens - len(s.guesses), new_blocks=(), guesses=()) for s in scheduled]
        lengths = np.array([len(s.guesses) + 1 for s in scheduled if s.sample], dtype=np.int64)
        places = dict(zip((s.key for s in scheduled if s.sample), np.cumsum(lengths) - lengths, strict=True))
        q: Tensor | None = None
        for depth in range(lengths.max(initial=1)):
            sampled = [s for s in turn if s.sample]
            found = self._guess(turn, needs, all_greedy)
            if found is not None:
                if q is None:
                    q = found.new_empty(int(lengths.sum()), found.shape[1])
                q[to_device(np.array([places[s.key] + depth for s in sampled]), q.device)] = found
            turn = [
                s._replace(start=s.start + s.num_tokens, num_tokens=1)
                for s in sampled
                if s.start + s.num_tokens < last[s.key]
            ]
        return q

    def _guess(self, scheduled: list[Scheduled], needs: Needs, all_greedy: bool) -> Tensor | None:
        """One turn: compute tokens, and write a guess behind each that is sampled; returns what it was drawn from."""
        batch: Batch | DecodeBatch
        if self.graphs is not None and all(s.sample and s.num_tokens == 1 for s in scheduled):
            batch, _, logits = self.graphs.run([(s.row, s.start) for s in scheduled])
            if all_greedy and needs == Needs():
                return None  # the recording wrote the guesses
            logits = logits[: len(scheduled)]
        else:
            batch = make_batch(scheduled, self.rows)
            hidden = self.model(batch.input_ids, batch.positions, self._bind(batch.attention))  # [T, H]
            logits = self.model.logits(hidden[batch.sampled_tokens])  # [N, V]
        n = logits.shape[0]
        rows, positions = batch.sampled_rows[:n], batch.next_positions[:n]
        draws = self._draws(rows, positions, all_greedy)
        guesses, q = draw_guesses(constrain(logits.float(), draws, rows, self.sampling, needs), draws)
        self.rows.token_ids[rows, positions] = guesses.int()
        return q

    def decode(self, batch: DecodeBatch) -> tuple[Tensor, Tensor]:
        """A turn of one token each, as graphs record it: greedy guesses [B], and logits [B, V]."""
        batch.look_up(self.rows)
        hidden = self.model(batch.input_ids, batch.positions, self._bind(batch.attention))  # [B, H]
        logits = self.model.logits(hidden, self.logits[: batch.size])  # [B, V]
        guesses, _ = draw_guesses(logits.float(), self._draws(batch.sampled_rows, batch.next_positions, True))
        self.rows.token_ids[batch.sampled_rows, batch.next_positions] = guesses.int()
        return guesses, logits

    def _bind(self, meta: AttentionMetadata) -> BoundAttention:
        return BoundAttention(self.backend, self.kv, meta, self.scale)

    def _draws(self, rows: Tensor, next_positions: Tensor, all_greedy: bool) -> Draws:
        r = self.rows
        return Draws(r.temperature[rows], r.seed[rows], next_positions - r.num_prompt_tokens[rows], all_greedy)
