"""From logits to tokens: argmax(logit + temperature * noise(seed, output index, token id)).

Two tails read the same logits. The *plain* one knows temperature alone: a few operations, fit for a CUDA graph. The
*full* one adds penalties, min_tokens, filters and log-probabilities, and runs where some row needs it. A row that needs
none of these gets the same token from both. Every row is computed by itself, so batch and order cannot matter. Nothing
here waits for the device.

Temperature 0 is exact: the noise is multiplied by it. Among equal scores the lowest id wins. A row whose largest logit
is not a finite number (torch's max gives NaN if there is any) samples -1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.distributed.group import Group
from nanovllm.sampling.filters import filter_scores
from nanovllm.sampling.gumbel import gumbel
from nanovllm.sampling.logprobs import TopLogprobs, top_logprobs
from nanovllm.sampling.penalties import penalize, suppress_stops
from nanovllm.sampling.sampling_state import Needs, SamplingState

# Scores that the full tail works on at once, 32 MiB of them. A sort of the vocabulary holds ten tensors of their size:
# of all rows of a large batch together, gigabytes that nobody set aside.
MAX_SCORES = 2**23


@dataclass(frozen=True)
class Draws:
    """What decides the draw of each of N rows, besides its logits."""

    temperature: Tensor  # [N] float32
    seeds: Tensor  # [N] int64
    indices: Tensor  # [N] how many output tokens the sequence had before this one
    all_greedy: bool = False  # known on the host: no row has a temperature, so that no noise is computed

    def __getitem__(self, part: slice) -> "Draws":
        return Draws(self.temperature[part], self.seeds[part], self.indices[part], self.all_greedy)


def sample_plain(logits: Tensor, draws: Draws) -> Tensor:
    """logits [N, V] of any float dtype -> token ids [N] int64."""
    return choose(add_noise(logits.float(), draws))


# From scores [N, V] float32 and draws to token ids [N] int64, -1 where there is no finite score.
Choose = Callable[[Tensor, Draws], Tensor]


def sample_full(
    logits: Tensor, draws: Draws, rows: Tensor, state: SamplingState, needs: Needs, draw: Choose | None = None
) -> tuple[Tensor, TopLogprobs | None]:
    """logits [N, V] of any float dtype, rows [N] of `state` -> token ids [N] int64, and log-probabilities if needed.

    `draw` says how a token is drawn from what penalties and filters leave; None is as in the plain tail.
    """
    at_once = max(1, MAX_SCORES // logits.shape[1])  # rows
    parts = [slice(first, first + at_once) for first in range(0, max(1, len(logits)), at_once)]
    scores = (constrain(logits[part].float(), draws[part], rows[part], state, needs) for part in parts)
    if draw is None:
        tokens = torch.cat([choose(add_noise(s, draws[part])) for s, part in zip(scores, parts, strict=True)])
    else:
        tokens = draw(torch.cat(list(scores)), draws)
    # What was ruled out may have been what was wrong with the row.
    tokens = torch.where(logits.amax(-1).isfinite(), tokens, -1)
    if needs.num_logprobs is None:
        return tokens, None
    found = [top_logprobs(logits[part].float(), tokens[part], needs.num_logprobs) for part in parts]
    return tokens, TopLogprobs.join(found)


def constrain(scores: Tensor, draws: Draws, rows: Tensor, state: SamplingState, needs: Needs) -> Tensor:
    """scores [N, V] float32 with penalties, and -inf for what min_tokens and the filters rule out."""
    if needs.penalties:
        num_prompt = state.num_prompt_tokens[rows]
        penalties = state.repetition_penalty[rows], state.presence_penalty[rows], state.frequency_penalty[rows]
        scores = penalize(scores, state.token_ids[rows], num_prompt, num_prompt + draws.indices, *penalties)
    if needs.min_tokens:
        scores = suppress_stops(scores, state.stop_ids[rows], draws.indices < state.min_tokens[rows])
    if needs.min_p or needs.num_candidates:
        scores = filter_scores(
            scores,
            draws.temperature,
            min_p=state.min_p[rows] if needs.min_p else None,
            top_k=state.top_k[rows],
            top_p=state.top_p[rows],
            num_candidates=needs.num_candidates,
        )
    return scores


def sample_sharded(logits: Tensor, draws: Draws, group: Group, vocab_size: int) -> Tensor:
    """`sample_plain` where each rank has the logits [N, V / R] of its own tokens: the best of the ranks' best."""
    first, own = ids_of_share(logits, group, vocab_size)
    scores = add_noise(logits.float(), draws, first)
    scores[:, own:] = float("-inf")
    largest, ids = scores.max(-1)  # [N]
    best = group.all_gather(torch.stack((largest.double(), (ids + first).double())))  # [R, 2, N]
    winner = best[:, 0].argmax(0, keepdim=True)  # [1, N], of equals the lowest rank, which has the lowest ids
    largest, ids = best[:, 0].max(0).values, best[:, 1].gather(0, winner)[0].long()
    return torch.where(largest.isfinite(), ids, -1)


def ids_of_share(logits: Tensor, group: Group, vocab_size: int) -> tuple[int, int]:
    """Logits [N, V / R] -> this rank's first token, and how many it has: the rest is padding."""
    first = group.rank * logits.shape[1]
    return first, max(0, min(logits.shape[1], vocab_size - first))


def gather_logits(logits: Tensor, group: Group, vocab_size: int) -> Tensor:
    """The ranks' logits [N, V / R] side by side, without padding: [N, V]"""
    return group.all_gather(logits.contiguous()).transpose(0, 1).flatten(1)[:, :vocab_size]


def add_noise(scores: Tensor, draws: Draws, first_id: int = 0) -> Tensor:
    """scores [N, V] float32 of the tokens from `first_id` on -> scores + temperature * Gumbel noise [N, V]"""
    if draws.all_greedy:
        return scores
    token_ids = torch.arange(first_id, first_id + scores.shape[1], dtype=torch.int32, device=scores.device)
    return gumbel(draws.seeds, draws.indices, token_ids).mul_(draws.temperature[:, None]).add_(scores)


def choose(scores: Tensor) -> Tensor:
    """The id of the largest score of each row [N]; -1 where that is not finite."""
    largest, ids = scores.max(-1)
    return torch.where(largest.isfinite(), ids, -1)
