"""Gathers the masks of a step's grammars on the host, with `allowed_token_ids`. A mask has W = ceil(V / 32) words."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from nanovllm.engine.plan import Scheduled, StepMasks
from nanovllm.sampling.state import SamplingState, packed

Masks = npt.NDArray[np.int32]


def masks_of_rows(
    masks: StepMasks, sampling: Sequence[Scheduled], state: SamplingState
) -> tuple[list[int], Callable[[Masks], None]]:
    """The rows of the M sequences with a mask, and a function that fills masks [M, W]. For steps without guesses."""
    row_of = {s.key: s.row for s in sampling}
    rows = [row_of[key] for key in masks.keys]

    def fill(found: Masks) -> None:
        masks.fill(found)
        narrow(found, rows, state)

    return rows, fill


def masks_of_tokens(
    masks: StepMasks, sampling: Sequence[Scheduled], special: npt.NDArray[np.bool_], state: SamplingState
) -> Masks:
    """The masks [M, W] of those tokens of a step for which `special` [N] is true. N counts a token after each guess."""
    keys = set(masks.keys)
    places = [s for s in sampling for _ in range(len(s.guesses) + 1)]  # [N]
    masked = np.array([s.key in keys for s in places])
    found = np.empty((masks.number, state.mask.shape[1]), dtype=np.int32)
    masks.fill(found)
    if not masked.all():
        spread = np.full((len(places), found.shape[1]), -1, dtype=np.int32)
        spread[masked] = found
        found = spread
    narrow(found, [s.row for s in places], state)
    return found if special.all() else found[special]


def narrow(masks: Masks, rows: Sequence[int], state: SamplingState) -> None:
    """Clear the bits of masks [N, W] that `allowed_token_ids` of their rows [N] rules out."""
    for place, row in enumerate(rows):
        if (ids := state.params[row].allowed_token_ids) is not None:
            masks[place] &= packed(ids, state.vocab_size)
