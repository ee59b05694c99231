"""Accept a guessed token or draw another one, so that what comes out is distributed as if nobody had guessed.

A guess drawn from q is accepted with probability min(1, p / q), and else replaced by a draw from max(p - q, 0),
normalised: together that is p, whatever q was (Leviathan et al., "Fast Inference from Transformers via Speculative
Decoding", 2023; Chen et al., 2023). p is the target's distribution as it is sampled from, so after penalties and
filters, and q that from which the guess was in fact drawn.

Where guesses come without chance (n-grams), q is a single token, and none of this is needed: a token drawn from p as
ever is the guess with probability p(guess), and else distributed as p without it. That is the same rule.

All randomness is a function of (seed, output index), in a stream for each purpose. The one position of a step that has
no guess to verify, behind the last one, is drawn in the same way, from a guess that was never shown to the target. So
the token at an output index does not depend on where steps begin, on k, or on who was preempted.
"""

from dataclasses import replace

import torch
from torch import Tensor

from nanovllm.sampling.gumbel import LARGEST_BELOW_1, gumbel, random_bits, row_keys
from nanovllm.sampling.sampler import Draws, add_noise, choose

GUESS = -(2**63)  # added to a seed (from 0 to 2**63 - 1) gives one that no request has


def draw_guesses(scores: Tensor, draws: Draws) -> tuple[Tensor, Tensor | None]:
    """scores [N, V] of the draft, after penalties and filters -> guesses [N] int64, and q [N, V] (None: all greedy)."""
    drawn = choose(add_noise(scores, replace(draws, seeds=draws.seeds + GUESS)))
    guesses = drawn.clamp(min=0)
    if draws.all_greedy:
        return guesses, None
    q = probabilities(scores, draws.temperature)
    # Where the draft's logits are not finite, token 0 is guessed for certain.
    certain = torch.zeros_like(q).scatter_(1, guesses[:, None], 1)
    return guesses, torch.where((drawn < 0)[:, None], certain, q)


def accept_or_redraw(scores: Tensor, draws: Draws, guesses: Tensor, q: Tensor) -> Tensor:
    """scores [N, V] of the target, guesses [N] drawn from q [N, V] -> token ids [N] int64, -1 in a bad row.

    A guess was accepted where it comes out again: what replaces it is always another token.
    """
    p = probabilities(scores, draws.temperature)  # [N, V]
    at_guess = guesses[:, None]
    accepted = uniform(draws.seeds, draws.indices) * q.gather(1, at_guess)[:, 0] < p.gather(1, at_guess)[:, 0]
    residual = (p - q).clamp_(min=0)  # [N, V]
    # Nothing is left where p and q are the same but for rounding.
    weights = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    token_ids = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    redrawn = choose(weights.log_().add_(gumbel(draws.seeds, draws.indices, token_ids)))
    tokens = torch.where(accepted, guesses, redrawn)
    return torch.where(draws.temperature > 0, tokens, choose(scores))


def probabilities(scores: Tensor, temperature: Tensor) -> Tensor:
    """scores [N, V], temperature [N] -> what is drawn from [N, V]; of greedy rows, whose draw needs none, at 1."""
    relative = scores - scores.amax(-1, keepdim=True)  # so that no temperature can overflow
    return relative.div_(torch.where(temperature > 0, temperature, 1)[:, None]).softmax(-1)


def uniform(seeds: Tensor, indices: Tensor) -> Tensor:
    """seeds [N] int64, indices [N] -> [N] float32 strictly between 0 and 1: the noise of token -1, which is none."""
    bits = random_bits(row_keys(seeds, indices), torch.full((1,), -1, dtype=torch.int32, device=seeds.device))[:, 0]
    return (((bits >> 1) & 0x7FFFFFFF).float().add_(0.5) * 2.0**-31).clamp_(max=LARGEST_BELOW_1)
