"""From logits to tokens: argmax(logit + temperature * noise(seed, output index, token id)).

Two tails read the same logits. The *plain* tail is part of a recorded step. On one GPU the plain tail does all that a
row may ask for, in a few kernels, and rows that ask for nothing pay for nothing. Elsewhere the plain tail knows
temperature alone. There the *full* tail runs after it, for the rows that need edits, filters or the acceptance of a
draft's guesses. A row that needs none of this gets the same token from both tails. Log-probabilities come last, from
raw logits. Every row is computed by itself, so batch and order cannot matter. Nothing here waits for the device.

Temperature 0 is exact, because the noise is multiplied by 0. Among equal scores the lowest id wins. A row whose largest
logit is not a finite number (torch's max gives NaN if there is any) samples -1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.distributed.group import Group
from nanovllm.engine.plan import Scheduled, StepMasks
from nanovllm.kernels import fused_kernels
from nanovllm.pinned import to_device
from nanovllm.sampling.acceptance import accept_or_resample
from nanovllm.sampling.filters import constrain
from nanovllm.sampling.logprobs import TopLogprobs, log_probabilities
from nanovllm.sampling.masks import masks_of_tokens
from nanovllm.sampling.noise import add_noise, choose
from nanovllm.sampling.state import Needs, SamplingMetadata, SamplingState

# The most scores that the full tail works on at once: 32 MiB. A sort of the vocabulary holds ten tensors of this size.
# For all rows of a large batch at once, these would be gigabytes that nobody set aside.
MAX_SCORES = 2**23


class Sampled(NamedTuple):
    """What the plain tail of a step sampled: N tokens. Each sequence that samples has a token after its last known
    token and a token after every guess. The next replay of a recorded step overwrites the tensors.

    A recording may have sampled more than was asked for. `chosen` says, on the host, which of its tokens count.
    """

    rows: Tensor  # [N] int32
    positions: Tensor  # [N] int32, where in its row each token went
    token_ids: Tensor  # [N] int64
    logits: Tensor  # [N, V], of several ranks [N, V / R]
    guesses: Tensor | None  # [N] int64: the guess that was at each position before; None if nobody guesses
    chosen: NDArray[np.int64] | None = None  # None: all

    def at(self, index: slice | Tensor) -> "Sampled":
        """Some of the tokens."""
        rows, positions, token_ids, logits, guesses, _ = self
        guesses = None if guesses is None else guesses[index]
        return Sampled(rows[index], positions[index], token_ids[index], logits[index], guesses)

    def asked(self) -> "Sampled":
        """The tokens that count, on the device."""
        return self if self.chosen is None else self.at(to_device(self.chosen, self.rows.device))


class Sampler:
    """Both tails of the target model, on one of the ranks of `group`. Tokens are written into the rows of `state`."""

    def __init__(self, state: SamplingState, group: Group) -> None:
        self.state, self.group = state, group

    def sample(self, logits: Tensor, rows: Tensor, positions: Tensor, all_greedy: bool = False) -> Tensor:
        """Run the plain tail: logits [N, V] for the tokens at `positions` [N] of `rows` [N] -> token ids [N] int64."""
        state, group, vocab_size = self.state, self.group, self.state.vocab_size
        sample_rows = fused_kernels(state.device).sample_rows
        if state.in_kernels:
            return self._sample_in_kernels(logits, rows, positions)
        if sample_rows is not None:
            of_rows = state.temperature, state.seed, state.num_prompt_tokens, state.token_ids
            return sample_rows(
                logits, rows, positions, *of_rows, *ids_of_shard(logits, group, vocab_size), group.all_gather
            )
        metadata = state.metadata(rows, positions, all_greedy)
        if group.size > 1:
            token_ids = sample_sharded(logits, metadata, group, vocab_size)
        else:
            token_ids = sample_plain(logits, metadata)
        state.write(rows, positions, token_ids)
        return token_ids

    def _sample_in_kernels(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Run edits, filters and the draw. logits [N, V], of the whole vocabulary, are restored at the end."""
        state, kernels = self.state, fused_kernels(self.state.device)
        assert kernels.edit_logits and kernels.restore_logits and kernels.sample_rows
        edits = kernels.edit_logits(logits, rows, positions, state)
        token_ids = kernels.sample_rows(
            logits, rows, positions, state.temperature, state.seed, state.num_prompt_tokens, state.token_ids,
            filters=(state.top_k, state.top_p, state.log_min_p), masks=(state.masked, state.mask), edits=edits,
        )  # fmt: skip
        kernels.restore_logits(logits, edits)
        return token_ids

    def sample_masked(self, logits: Tensor, rows: Tensor, positions: Tensor, masked: Tensor, masks: Tensor) -> Tensor:
        """Run the plain tail again, in kernels, with masks [B, W] for rows `masked` [B]. Otherwise as `sample`."""
        before = self.state.allow(masked, masks)
        token_ids = self._sample_in_kernels(logits, rows, positions)
        self.state.masked.index_copy_(0, masked.long(), before)
        return token_ids

    def finish(
        self,
        step: Sampled,
        sampling: Sequence[Scheduled],
        needs: Needs | None,
        q: Tensor | None,
        masks: StepMasks | None = None,
    ) -> tuple[Tensor, TopLogprobs | None]:
        """Run the full tail for the rows that need it. Returns the step's token ids [N] int64, and log-probabilities.

        sampling: the sequences that sample. q [N, V]: the distributions of a draft's guesses, which are accepted or
        replaced; None if there are no such guesses. masks: which tokens the grammars of rows with structured outputs
        allow. The log-probabilities are None if no row wants them.
        """
        token_ids = step.token_ids
        if needs is None and q is None:
            return token_ids, None
        state, needs = self.state, needs or Needs()
        has_masks = masks is not None and len(masks.keys) > 0
        if state.in_kernels and not has_masks and needs.num_logprobs is None:
            return token_ids, None
        # Only the rows that need the full tail: nothing is sampled again or sorted for the others.
        masked = () if masks is None else set(masks.keys)
        left = [state.is_left(s.row, s.key in masked) for s in sampling for _ in range(len(s.guesses) + 1)]
        special = np.array(left) | (q is not None)
        if not special.any():
            return token_ids, None
        # None: all rows. For a large batch, logits are too many to copy in vain.
        index = None if special.all() else to_device(np.flatnonzero(special), state.device)
        some = step if index is None else step.at(index)
        logits, found = some.logits, some.token_ids
        if self.group.size > 1:
            logits = gather_logits(logits, self.group, state.vocab_size).contiguous()
        allowed: Tensor | None = None
        if masks is not None and has_masks:
            allowed = to_device(masks_of_tokens(masks, sampling, special, state), state.device)  # [N, W]
        if not state.in_kernels or allowed is not None:
            # The plain tail wrote over the guesses, and penalties after a guess count the guess.
            if step.guesses is not None:
                state.token_ids[step.rows, step.positions] = step.guesses.int()
            of_rows = step.guesses is None or allowed is None  # a mask belongs to a row, not to each guess
            if q is None and of_rows and fused_kernels(state.device).sample_rows is not None:
                if allowed is not None:
                    found = self.sample_masked(logits, some.rows, some.positions, some.rows, allowed)
                else:
                    found = self._sample_in_kernels(logits, some.rows, some.positions)
            else:
                drafted = None if q is None or step.guesses is None else (step.guesses, q)
                metadata = state.metadata(some.rows, some.positions)
                found = sample_full(logits, metadata, some.rows, state, needs, drafted, allowed)
            token_ids = found if index is None else token_ids.index_copy(0, index, found)
            state.write(step.rows, step.positions, token_ids)
        if needs.num_logprobs is None:
            return token_ids, None
        logprobs = log_probabilities(logits, found, needs.num_logprobs)
        return token_ids, logprobs if index is None else logprobs.spread(index, len(token_ids))


def sample_plain(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """logits [N, V] of any float dtype -> token ids [N] int64."""
    return choose(add_noise(logits.float(), metadata))


def sample_full(
    logits: Tensor,
    metadata: SamplingMetadata,
    rows: Tensor,
    state: SamplingState,
    needs: Needs,
    drafted: tuple[Tensor, Tensor] | None = None,
    masks: Tensor | None = None,
) -> Tensor:
    """logits [N, V] of any float dtype, rows [N] of `state` -> token ids [N] int64.

    drafted: guesses [N], and the distributions [N, V] that a draft sampled them from. They are accepted or replaced.
    masks: see `constrain`.
    """
    at_once = max(1, MAX_SCORES // logits.shape[1])  # rows
    parts = [slice(first, first + at_once) for first in range(0, max(1, len(logits)), at_once)]
    scores = (
        constrain(logits[p].float(), metadata[p], rows[p], state, needs, None if masks is None else masks[p])
        for p in parts
    )
    if drafted is None:
        tokens = torch.cat([choose(add_noise(s, metadata[part])) for s, part in zip(scores, parts, strict=True)])
    else:
        tokens = accept_or_resample(torch.cat(list(scores)), metadata, *drafted)
    # The value that was not finite may have been ruled out, so the logits decide.
    return torch.where(logits.amax(-1).isfinite(), tokens, -1)


def sample_sharded(logits: Tensor, metadata: SamplingMetadata, group: Group, vocab_size: int) -> Tensor:
    """`sample_plain` for several ranks: each has the logits [N, V / R] of its own tokens, and the best of all wins."""
    first, own = ids_of_shard(logits, group, vocab_size)
    scores = add_noise(logits.float(), metadata, first)
    scores[:, own:] = float("-inf")
    largest, ids = scores.max(-1)  # [N]
    best = group.all_gather(torch.stack((largest.double(), (ids + first).double())))  # [R, 2, N]
    winner = best[:, 0].argmax(0, keepdim=True)  # [1, N], among equals the lowest rank, which has the lowest ids
    largest, ids = best[:, 0].max(0).values, best[:, 1].gather(0, winner)[0].long()
    return torch.where(largest.isfinite(), ids, -1)


def ids_of_shard(logits: Tensor, group: Group, vocab_size: int) -> tuple[int, int]:
    """Logits [N, V / R] -> this rank's first token id, and how many ids the rank has. The rest is padding."""
    first = group.rank * logits.shape[1]
    return first, max(0, min(logits.shape[1], vocab_size - first))


def gather_logits(logits: Tensor, group: Group, vocab_size: int) -> Tensor:
    """The ranks' logits [N, V / R] side by side, without padding: [N, V]"""
    return group.all_gather(logits.contiguous()).transpose(0, 1).flatten(1)[:, :vocab_size]
