"""Guesses at the target's next tokens: none, those in the plan (n-grams), or those of a smaller model.

The KV cache of a draft model has the target's blocks, tables and slots, with tensors of its own. In a step the draft
computes the same known tokens as the target, and then every guess, the last one too, though what follows it is not
used. So both caches always hold the same positions, and the draft never has to catch up: a rejected guess, a
preemption or a prefix found in the cache means the same for both.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nanovllm.config import EngineConfig, Speculation
from nanovllm.engine.plan import Scheduled
from nanovllm.graphs.cuda_graph import Recorder, record_nothing
from nanovllm.graphs.decode_steps import DecodeSteps
from nanovllm.graphs.sizes import draft_sizes
from nanovllm.models.checkpoint import find_checkpoint
from nanovllm.models.config import ModelConfig, read_config
from nanovllm.pinned import to_device
from nanovllm.runner.batch import DecodeInputs, make_batch
from nanovllm.runner.device_model import DeviceModel
from nanovllm.runner.rows import Rows
from nanovllm.sampling.acceptance import sample_guesses
from nanovllm.sampling.filters import constrain
from nanovllm.sampling.sampler import Sampled
from nanovllm.sampling.state import Needs, SamplingState


class PlannedGuesses:
    """The guesses are in the plan: the control plane made them (n-grams)."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def propose(self, scheduled: Sequence[Scheduled], needs: Needs | None) -> Tensor | None:
        """Write a step's guesses into the rows, after the last known token of each. needs: of the rows that sample.

        Returns the distributions that the guesses were sampled from, in the order of the positions that the target
        samples at [N, V] float32; None if the guesses are deterministic, so that there is nothing to correct.
        """
        if guessed := [s for s in scheduled if s.guesses]:
            self.rows.write_guesses(guessed)
        return None


def read_draft_config(speculation: Speculation, target: ModelConfig) -> ModelConfig:
    """The draft's configuration. Raises ValueError for a draft that is no checkpoint, or does not fit the target."""
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


class DraftModel:
    """Guesses with a smaller model, which shares the target's rows and their sampling parameters: q is filtered as p
    is, which makes them agree more. Steps of one token per sequence are recorded where the target's are."""

    def __init__(
        self, model: DeviceModel, config: EngineConfig, rows: Rows, state: SamplingState, recorder: Recorder | None
    ) -> None:
        assert config.speculation is not None
        self.model, self.rows, self.state = model, rows, state
        self.recorded: DecodeSteps | None = None
        if recorder is not None and (model.backend.capturable or recorder is record_nothing):
            sizes = draft_sizes(config)
            self.inputs, self.logits = DecodeInputs(rows, sizes.decodes[-1]), model.make_logits(sizes.num_logits)
            copies = config.speculation.k + 1  # the turns of a step; the step before is over
            with torch.inference_mode():
                self.recorded = DecodeSteps(sizes, rows.token_ids, self.decode_step, recorder, copies)

    def propose(self, scheduled: Sequence[Scheduled], needs: Needs | None) -> Tensor | None:
        """As `PlannedGuesses.propose`. Each sequence gets one more guess, which the target never sees. None if all are
        greedy."""
        needs = needs or Needs()
        all_greedy = self.state.all_greedy(s.row for s in scheduled if s.sample)
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
        """One turn: compute tokens, and write a guess after each that samples. Returns the guesses' distributions."""
        if self.recorded is not None and all(s.sample and s.num_tokens == 1 for s in scheduled):
            step = self.recorded.run(np.array([(s.row, s.row, s.start) for s in scheduled], dtype=np.int32).T)
            if all_greedy and needs == Needs():
                return None  # the recording wrote the guesses
            rows, positions, logits = step.rows, step.positions, step.logits
        else:
            batch = make_batch(scheduled, self.rows)
            rows, positions, logits = batch.sampled_rows, batch.next_positions, self.model.forward(batch)  # [N, V]
        return self._sample(logits, rows, positions, needs, all_greedy)[1]

    def decode_step(self, numbers: Tensor) -> Sampled:
        """A turn of one token per sequence, as it is recorded, with greedy guesses."""
        batch = self.inputs.look_up(numbers)
        logits = self.model.forward(batch, self.logits)  # [B, V]
        rows, positions = batch.sampled_rows, batch.next_positions
        guesses, _ = self._sample(logits, rows, positions, Needs(), all_greedy=True)
        return Sampled(rows, positions, guesses, logits, None)

    def _sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, needs: Needs, all_greedy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Guesses [N], written into the rows, and their distributions [N, V]; None if all are greedy."""
        metadata = self.state.metadata(rows, positions, all_greedy)
        guesses, q = sample_guesses(constrain(logits.float(), metadata, rows, self.state, needs), metadata)
        self.rows.token_ids[rows, positions] = guesses.int()
        return guesses, q


Guesses = PlannedGuesses | DraftModel | None  # where the guesses of a step come from; None: nobody guesses


def let_go(guesses: Guesses) -> None:
    """Free a draft's recordings. They hold the draft in turn, so that otherwise only a garbage collection would."""
    if isinstance(guesses, DraftModel):
        guesses.recorded = None
