"""Accept a guessed token or sample another one, so that the result is distributed as if nobody had guessed.

A guess sampled from q is accepted with probability min(1, p / q). Otherwise it is replaced by a sample from
max(p - q, 0), normalised. Together the two give p, whatever q was (Leviathan et al., "Fast Inference from Transformers
via Speculative Decoding", 2023; Chen et al., 2023). p is the target's distribution after penalties and filters, and q
the distribution that the guess was in fact sampled from.

Guesses may also be deterministic (n-grams): then q has all its probability on a single token, and none of this is
needed. A token that is sampled from p as usual is the guess with probability p(guess). Otherwise the token is
distributed as p without the guess: the same rule.

Either way, a step samples a token after every guess. `runner/step_output.py` keeps these tokens up to the first that is
not the guess, and `Scheduler._roll_back` takes back what was computed after that token.

All randomness is a function of (seed, output index), with one stream per purpose. The last position of a step has no
guess to verify. Its token is sampled in the same way, from a guess that was never shown to the target. So the token at
an output index does not depend on where steps begin, on k, or on preemptions.
"""

from dataclasses import replace

import torch
from torch import Tensor

from nanovllm.sampling.noise import LARGEST_BELOW_1, add_noise, choose, gumbel, random_bits, row_keys
from nanovllm.sampling.state import SamplingMetadata

GUESS = -(2**63)  # added to a seed (from 0 to 2**63 - 1) gives one that no request has


def sample_guesses(scores: Tensor, metadata: SamplingMetadata) -> tuple[Tensor, Tensor | None]:
    """scores [N, V] of the draft, after penalties and filters -> guesses [N] int64 and q [N, V] (None: all greedy)."""
    token_ids = choose(add_noise(scores, replace(metadata, seeds=metadata.seeds + GUESS)))
    guesses = token_ids.clamp(min=0)
    if metadata.all_greedy:
        return guesses, None
    q = probabilities(scores, metadata.temperature)
    # Where the draft's logits are not finite, token 0 is guessed for certain.
    certain = torch.zeros_like(q).scatter_(1, guesses[:, None], 1)
    return guesses, torch.where((token_ids < 0)[:, None], certain, q)


def accept_or_resample(scores: Tensor, metadata: SamplingMetadata, guesses: Tensor, q: Tensor) -> Tensor:
    """scores [N, V] of the target, guesses [N] sampled from q [N, V] -> token ids [N] int64, -1 in a bad row.

    A guess was accepted where the result is the guess: a replacement is always another token.
    """
    p = probabilities(scores, metadata.temperature)  # [N, V]
    at_guess = guesses[:, None]
    accepted = uniform(metadata.seeds, metadata.indices) * q.gather(1, at_guess)[:, 0] < p.gather(1, at_guess)[:, 0]
    residual = (p - q).clamp_(min=0)  # [N, V]
    # Nothing is left where p and q differ by no more than rounding.
    weights = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    token_ids = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    resampled = choose(weights.log_().add_(gumbel(metadata.seeds, metadata.indices, token_ids)))
    tokens = torch.where(accepted, guesses, resampled)
    return torch.where(metadata.temperature > 0, tokens, choose(scores))


def probabilities(scores: Tensor, temperature: Tensor) -> Tensor:
    """scores [N, V], temperature [N] -> the distribution that is sampled from [N, V]; greedy rows get temperature 1."""
    relative = scores - scores.amax(-1, keepdim=True)  # so that no temperature can overflow
    return relative.div_(torch.where(temperature > 0, temperature, 1)[:, None]).softmax(-1)


def uniform(seeds: Tensor, indices: Tensor) -> Tensor:
    """seeds [N] int64, indices [N] -> [N] float32 strictly between 0 and 1: the noise of id -1, which no token has."""
    bits = random_bits(row_keys(seeds, indices), torch.full((1,), -1, dtype=torch.int32, device=seeds.device))[:, 0]
    return (((bits >> 1) & 0x7FFFFFFF).float().add_(0.5) * 2.0**-31).clamp_(max=LARGEST_BELOW_1)
