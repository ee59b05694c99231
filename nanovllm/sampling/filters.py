"""Change the scores of a row before a token is sampled: first edit the scores of single tokens, then filter all scores.

The order is vLLM's: structured outputs, `allowed_token_ids`, `bad_words`, `min_tokens`, `logit_bias`, penalties; then,
at the row's temperature, min_p, top_k and top_p. The first four rule tokens out, and so do the filters. A token that is
ruled out has the score -inf, which neither a bias nor a penalty changes. So among the edits, only the bias has to come
before the penalties. `kernels/fused/edits.py` and `kernels/fused/threshold.py` do the same in a recorded step, without
work for tokens that are not named and without a sort.
"""

import torch
from torch import Tensor

from nanovllm.sampling.state import Needs, SamplingMetadata, SamplingState


def constrain(
    scores: Tensor,
    metadata: SamplingMetadata,
    rows: Tensor,
    state: SamplingState,
    needs: Needs,
    masks: Tensor | None = None,
) -> Tensor:
    """scores [N, V] float32 -> the scores with bias and penalties, and with -inf for tokens that are ruled out.

    rows [N]: rows of `state`, which has their parameters. needs: what some row asks for; nothing else is computed.
    masks [N, W] int32: the tokens that the grammars of this step allow; None if there are no grammars.
    """
    if masks is not None:
        scores = scores.masked_fill(~unpacked(masks, scores.shape[1]), -torch.inf)
    if needs.mask:
        scores = scores.masked_fill(~allowed(rows, state, scores.shape[1]), -torch.inf)
    if needs.num_bad_words:
        scores = rule_out(scores, *last_tokens(metadata, rows, state, needs))
    if needs.num_stop_ids:
        stop_ids, listed = first_of(state.stop_ids, state.num_stop_ids, rows, needs.num_stop_ids)
        too_early = metadata.indices < state.min_tokens[rows]  # [N]
        scores = rule_out(scores, stop_ids, listed & too_early[:, None])
    if needs.num_biased:
        ids, listed = first_of(state.biased_ids, state.num_biased, rows, needs.num_biased)
        bias = state.bias[rows, : needs.num_biased].masked_fill(~listed, 0)  # [N, B]
        scores = scores.scatter_add(1, ids.long(), bias)
    if needs.penalties:
        scores = penalize(scores, metadata, rows, state)
    if needs.min_p or needs.num_candidates:
        scores = filter_scores(scores, metadata, rows, state, needs)
    return scores


def first_of(lists: Tensor, lengths: Tensor, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The first entries [N, width] of lists [R, L], and which of them `lengths` [R] covers; the rest is left over."""
    return lists[rows, :width], torch.arange(width, device=rows.device) < lengths[rows, None]


def rule_out(scores: Tensor, token_ids: Tensor, where: Tensor) -> Tensor:
    """scores [N, V] with -inf for those of token_ids [N, L] for which `where` [N, L] is true. An id may come twice."""
    limits = torch.where(where, -torch.inf, torch.inf)  # [N, L]
    return scores.scatter_reduce(1, token_ids.long(), limits, "amin")


def allowed(rows: Tensor, state: SamplingState, vocab_size: int) -> Tensor:
    """Which tokens the masks of rows [N] allow, [N, V] bool; all tokens where a row has no mask."""
    return unpacked(state.mask[rows], vocab_size) | (state.masked[rows] == 0)[:, None]


def unpacked(masks: Tensor, vocab_size: int) -> Tensor:
    """masks [N, W] int32 -> [N, V] bool: bit i of word w stands for token 32 * w + i."""
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device)  # [N, W, 32]
    return (bits & 1).bool().flatten(1)[:, :vocab_size]


def last_tokens(metadata: SamplingMetadata, rows: Tensor, state: SamplingState, needs: Needs) -> tuple[Tensor, Tensor]:
    """The last token of each spelling of a bad word [N, W], and whether the output ends with all its others [N, W].

    The prompt does not count, as in vLLM.
    """
    ends, listed = first_of(state.bad_ends, state.num_bad_words, rows, needs.num_bad_words)
    ends = ends.long().where(listed, 1)  # [N, W]
    starts = torch.cat((torch.zeros_like(ends[:, :1]), ends[:, :-1]), 1)
    num_before = ends - starts - 1  # [N, W]
    row = rows[:, None]
    matches = listed & (num_before <= metadata.indices[:, None])
    next_position = state.num_prompt_tokens[row] + metadata.indices[:, None]  # [N, 1]
    for distance in range(1, needs.longest_bad_word):
        known = state.token_ids[row, (next_position - distance).clamp(min=0)]  # [N, 1]
        expected = state.bad_tokens[row, (ends - 1 - distance).clamp(min=0)]  # [N, W]
        matches &= (expected == known) | (num_before < distance)
    return state.bad_tokens[row, ends - 1], matches


def penalize(scores: Tensor, metadata: SamplingMetadata, rows: Tensor, state: SamplingState) -> Tensor:
    """scores [N, V] -> [N, V] with the penalties of each row, in vLLM's order: repetition, then frequency and presence.

    repetition divides positive scores and multiplies negative ones of every known token (Keskar et al., "CTRL", 2019).
    frequency is subtracted once per occurrence in the output, presence once for any. A row whose penalties are 1, 0 and
    0 keeps its scores exactly.

    Tokens are counted anew each time: no count is kept, undone for a dropped token, or rebuilt after a preemption.
    """
    num_prompt = state.num_prompt_tokens[rows]  # [N]
    num_known = num_prompt + metadata.indices  # [N] tokens of a row that are known; nothing behind them is read
    ids = state.token_ids[rows].long()  # [N, L]
    columns = torch.arange(ids.shape[1], device=ids.device)
    known = columns < num_known[:, None]  # [N, L]
    in_output = known & (columns >= num_prompt[:, None])  # [N, L]
    zeros = torch.zeros_like(scores)
    seen = zeros.scatter_add(1, ids, known.float()) > 0  # [N, V]
    count = zeros.scatter_add_(1, ids, in_output.float())  # [N, V]
    repetition = state.repetition_penalty[rows][:, None]
    presence, frequency = state.presence_penalty[rows][:, None], state.frequency_penalty[rows][:, None]
    scores = torch.where(seen, torch.where(scores > 0, scores / repetition, scores * repetition), scores)
    return scores - frequency * count - presence * (count > 0)


def filter_scores(
    scores: Tensor, metadata: SamplingMetadata, rows: Tensor, state: SamplingState, needs: Needs
) -> Tensor:
    """scores [N, V] -> [N, V] with -inf where a token is ruled out; the others keep their scores exactly.

    The order is vLLM's, on the probabilities at the row's temperature. First, min_p keeps the tokens that have at least
    that fraction of the likeliest token's probability. Of these, top_k keeps the k likeliest (V: off). Of these,
    renormalised, top_p keeps the fewest that reach that probability (Holtzman et al., "The Curious Case of Neural Text
    Degeneration", 2020; 1: off). Among equal scores the lower ids are kept, so the result is the same on every device.

    Only needs.num_candidates = V costs a full sort of the vocabulary.
    """
    temperature, top_k, top_p = metadata.temperature, state.top_k[rows], state.top_p[rows]  # [N] each
    # Relative to the largest, so that no temperature can overflow. Greedy rows only need some temperature.
    scaled = scores - scores.amax(-1, keepdim=True)  # [N, V], at most 0
    scaled /= torch.where(temperature > 0, temperature, 1)[:, None]
    if needs.min_p:
        scaled.masked_fill_(scaled < state.log_min_p[rows][:, None], -torch.inf)
    kept = scaled > -torch.inf  # [N, V]
    if needs.num_candidates:
        vocab_size = scores.shape[1]
        whole = needs.num_candidates >= vocab_size
        largest = scaled.sort(descending=True).values if whole else scaled.topk(needs.num_candidates).values  # [N, C]
        kept &= keep_largest(scaled, largest, count_kept(largest, top_k, top_p))
        kept |= ((top_k >= vocab_size) & (top_p >= 1))[:, None] & (scaled > -torch.inf)
    return scores.masked_fill(~kept, -torch.inf)


def count_kept(largest: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """largest [N, C] in descending order -> how many of them top_k and then top_p keep [N], at least 1."""
    rank = torch.arange(largest.shape[1], device=largest.device)
    in_top_k = rank < top_k[:, None]  # [N, C]
    probability = largest.masked_fill(~in_top_k, -torch.inf).softmax(-1)
    before = probability.cumsum(-1) - probability  # [N, C] probability of all that are likelier
    # Rounding may bring the sum to 1 before the end: then top_p = 1 must still keep everything.
    in_top_p = (before < top_p[:, None]) | (top_p >= 1)[:, None]
    return (in_top_k & in_top_p).sum(-1).clamp(min=1)


def keep_largest(scaled: Tensor, largest: Tensor, count: Tensor) -> Tensor:
    """The mask [N, V] of the `count` [N] largest per row, lower ids first among equals. `largest`: see `count_kept`."""
    border = largest.gather(1, count[:, None] - 1)  # [N, 1]
    above, at_border = scaled > border, scaled == border  # [N, V]
    room = count - above.sum(-1)  # [N]
    return above | (at_border & (at_border.cumsum(-1, dtype=torch.int32) <= room[:, None]))
