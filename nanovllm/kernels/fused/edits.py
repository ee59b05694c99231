"""What a request does to the scores of single tokens, in a recorded step: allowed tokens, bad words, min_tokens, biases
and penalties. `constrain` in `sampling/filters.py` is the reference.

A row names few of 151,936 tokens: those it knows, and those in its lists. So a program, which has a row to itself, makes
a list of the tokens whose score changes, in the order of their ids, and puts -inf in their places in the row. What follows
takes "the row without these, and the list" for the row's scores. A row that asks for nothing costs a single load.

The list is made in two passes over the tokens that the row names, who may name a token many times. The first sets a bit
for each token. The number of bits before a token's own is its place in the list, and the second pass notes there what
happens to the token: so often was it in the output, so much is added, it is ruled out. This is linear, and all sums
are of integers, so that no order can matter. (A sort of the known tokens would be neither, and counts for the whole
vocabulary, as other engines have them, are 311 MB for 512 rows.)

Nothing is kept from step to step, so nothing has to be undone for a guess that was rejected or a row that was preempted.
"""

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import overlaps_launches

TILE = 1024  # tokens, or words of bits, that a program looks at together
# What is noted of a token: how often it was in the output, and these.
IN_PROMPT = tl.constexpr(1 << 30)
RULED_OUT = tl.constexpr(1 << 29)


class Edits(NamedTuple):
    """The tokens whose score an edit changes, for N rows of logits; of row n the first counts[n], in ascending order."""

    ids: Tensor  # [N, E] int32
    raw: Tensor  # [N, E] float32, the model's logits
    scores: Tensor  # [N, E] float32, -inf where a token is ruled out
    counts: Tensor  # [N] int32


class EditState(Protocol):
    """What R rows ask for, as `SamplingState` has it. All are contiguous; a list's rest is left over from others."""

    token_ids: Tensor  # [R, L] int32: prompt and output, and guesses
    num_prompt_tokens: Tensor  # [R] int32
    edited: Tensor  # [R] int64: 0 where a row asks for nothing
    repetition_penalty: Tensor  # [R] float32
    presence_penalty: Tensor  # [R] float32
    frequency_penalty: Tensor  # [R] float32
    min_tokens: Tensor  # [R] int64
    num_stop_ids: Tensor  # [R] int64
    stop_ids: Tensor  # [R, S] int32: what min_tokens holds back
    num_biased: Tensor  # [R] int64
    biased_ids: Tensor  # [R, B] int32, each once
    bias: Tensor  # [R, B] float32
    num_bad_words: Tensor  # [R] int64
    bad_ends: Tensor  # [R, W] int32: where each ends in
    bad_tokens: Tensor  # [R, T] int32
    masked: Tensor  # [R] int64: 0 where the mask does not count
    mask: Tensor  # [R, ceil(V / 32)] int32: a set bit for each token that is allowed


def longest_list(state: EditState, num_ids: int) -> int:
    """E: as many tokens of `num_ids` as a row can name."""
    named = (state.token_ids, state.stop_ids, state.biased_ids, state.bad_ends)
    return min(num_ids, sum(tensor.shape[1] for tensor in named))


def scratch_bytes(state: EditState, num_logits: int, num_ids: int) -> int:
    """What `edit_logits` allocates for so many rows of logits of `num_ids` tokens: the lists, and two words each for
    32 tokens."""
    return 4 * num_logits * (3 * longest_list(state, num_ids) + 1 + 2 * triton.cdiv(num_ids, 32))


def edit_logits(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: EditState,
    first_id: int = 0,
    num_ids: int | None = None,
) -> Edits:
    """Edit the scores of the tokens that go to `positions` of `rows`, without a copy of the others.

    Args:
        logits: [N, V] of any float dtype, contiguous. Written: -inf for each token in the result.
        rows: [N] integers: the row of persistent state that each row of logits belongs to.
        positions: [N] integers: where in its row the new token goes; what stands before counts.
        state: what the rows ask for.
        first_id: the token of the first logit. num_ids: how many of the V are logits; None: all. The rest is padding.

    Returns:
        The edited tokens, -inf among them for those that the row's mask does not allow. A token that the mask forbids is
        not in the list for that alone. A raw logit that is NaN or infinite is its own score, so that the row still shows.
    """
    raise NotImplementedError


def restore_logits(logits: Tensor, edits: Edits, first_id: int = 0) -> None:
    """Put the raw logits back in place, for log-probabilities. logits, first_id: those that `edit_logits` had."""
    raise NotImplementedError
