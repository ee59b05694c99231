"""min_p, top_k and top_p: which tokens may be sampled at all.

`kernels/fused/threshold.py` finds the same tokens without a sort, in a recorded step.
"""

import torch
from torch import Tensor


def filter_scores(
    scores: Tensor,
    temperature: Tensor,
    *,
    log_min_p: Tensor | None,
    top_k: Tensor,
    top_p: Tensor,
    num_candidates: int,
) -> Tensor:
    """scores [N, V] -> [N, V] with -inf where a token is ruled out; the others keep their scores exactly.

    In vLLM's order, on the probabilities at the row's temperature: min_p (its logarithm [N]; None: no row has one)
    keeps tokens at least that many times as likely as the likeliest; of these top_k [N] keeps the k likeliest (V: off);
    and of these, renormalised, top_p [N] keeps the fewest that reach that probability (Holtzman et al., "The Curious
    Case of Neural Text Degeneration", 2020; 1: off). Among equal scores the lower ids are kept, so the result is the
    same on every device.

    num_candidates: an upper bound of top_k over the rows (greedy ones excepted) that have top_k or top_p, V if one has
    top_p alone, 0 if no row has either. Only V costs a full sort of the vocabulary.
    """
    # Relative to the largest, so that no temperature can overflow. Greedy rows only need some temperature.
    scaled = scores - scores.amax(-1, keepdim=True)  # [N, V], at most 0
    scaled /= torch.where(temperature > 0, temperature, 1)[:, None]
    if log_min_p is not None:
        scaled.masked_fill_(scaled < log_min_p[:, None], -torch.inf)
    kept = scaled > -torch.inf  # [N, V]
    if num_candidates:
        vocab_size = scores.shape[1]
        whole = num_candidates >= vocab_size
        largest = scaled.sort(descending=True).values if whole else scaled.topk(num_candidates).values  # [N, C]
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
    """Mask [N, V] of the count [N] largest of each row, lower ids first among equals. `largest`: see `count_kept`."""
    border = largest.gather(1, count[:, None] - 1)  # [N, 1]
    above, at_border = scaled > border, scaled == border  # [N, V]
    room = count - above.sum(-1)  # [N]
    return above | (at_border & (at_border.cumsum(-1, dtype=torch.int32) <= room[:, None]))
