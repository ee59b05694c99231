"""Changes to the logits themselves, before any token is sampled: penalties for repetition, and min_tokens."""

import torch
from torch import Tensor


def penalize(
    scores: Tensor,
    token_ids: Tensor,
    num_prompt: Tensor,
    num_known: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """scores [N, V] -> [N, V], in vLLM's order: repetition, then frequency and presence.

    token_ids [N, L]: prompt (num_prompt [N]), then output, num_known [N] tokens in all; what follows is not read.
    repetition [N] divides positive scores and multiplies negative ones of every known token (Keskar et al., "CTRL",
    2019); frequency [N] is subtracted once per occurrence in the output, presence [N] once for any. A row whose
    penalties are 1, 0 and 0 keeps its scores exactly.

    Counted anew each time: nothing has to be kept, undone for a token that is dropped, or rebuilt after a preemption.
    """
    ids = token_ids.long()
    columns = torch.arange(ids.shape[1], device=ids.device)
    known = columns < num_known[:, None]  # [N, L]
    in_output = known & (columns >= num_prompt[:, None])  # [N, L]
    zeros = torch.zeros_like(scores)
    seen = zeros.scatter_add(1, ids, known.float()) > 0  # [N, V]
    count = zeros.scatter_add_(1, ids, in_output.float())  # [N, V]
    repetition = repetition[:, None]
    scores = torch.where(seen, torch.where(scores > 0, scores / repetition, scores * repetition), scores)
    return scores - frequency[:, None] * count - presence[:, None] * (count > 0)


def suppress_stops(scores: Tensor, stop_ids: Tensor, too_early: Tensor) -> Tensor:
    """-inf for stop_ids [N, S] in the rows of scores [N, V] where too_early [N] holds."""
    kept = scores.gather(1, stop_ids)  # [N, S]
    return scores.scatter(1, stop_ids, kept.masked_fill(too_early[:, None], -torch.inf))
