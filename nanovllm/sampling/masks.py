"""Gathers the masks of a step's grammars on the host, with `allowed_token_ids`. A mask has W = ceil(V / 32) words."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nanovllm.engine.plan import Scheduled, StepMasks
from nanovllm.sampling.state import SamplingState, packed


def masks_of_rows(
    masks: StepMasks, sampling: Sequence[Scheduled], state: SamplingState
) -> tuple[list[int], npt.NDArray[np.int32]]:
    """The rows [M] of the sequences that have a mask, and the masks [M, W]. For steps without guesses."""
    row_of = {s.key: s.row for s in sampling}
    rows = [row_of[key] for key in masks.keys]
    found = words_of(masks, len(rows), state)
    for row, own in zip(rows, found, strict=True):
        if (ids := state.params[row].allowed_token_ids) is not None:
            own &= packed(ids, state.vocab_size)
    return rows, found


def masks_of_tokens(
    masks: StepMasks, sampling: Sequence[Scheduled], special: npt.NDArray[np.bool_], state: SamplingState
) -> npt.NDArray[np.int32]:
    """The masks [M, W] of those tokens of a step for which `special` [N] is true. N counts a token after each guess."""
    keys = set(masks.keys)
    places = [s for s in sampling for _ in range(len(s.guesses) + 1)]  # [N]
    masked = np.array([s.key in keys for s in places])
    found = words_of(masks, int(masked.sum()), state)
    if not masked.all():
        spread = np.full((len(places), found.shape[1]), -1, dtype=np.int32)
        spread[masked] = found
        found = spread
    for s, own in zip(places, found, strict=True):
        if (ids := state.params[s.row].allowed_token_ids) is not None:
            own &= packed(ids, state.vocab_size)
    return found if special.all() else found[special]


def words_of(masks: StepMasks, number: int, state: SamplingState) -> npt.NDArray[np.int32]:
    """All masks [number, W], cut to W words: a tokenizer may have more tokens than the model."""
    return np.frombuffer(masks.words, dtype=np.int32).reshape(number, -1)[:, : state.mask.shape[1]]
