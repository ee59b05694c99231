"""Gumbel noise that is a function of (seed, output index, token id), and of nothing else.

A sampled token is argmax(logit + temperature * noise), which has the distribution softmax(logit / temperature) (Gumbel,
1954; Maddison et al., "A* Sampling", 2014). The noise is computed from a counter, not taken from a stream. So neither
batch nor row nor preemption can change what a request gets, and no generator state is kept anywhere (Salmon et al.,
"Parallel Random Numbers: As Easy as 1, 2, 3", 2011).

The integer arithmetic wraps, and gives the same bits on every device.
"""

import torch
from torch import Tensor

from nanovllm.sampling.state import SamplingMetadata

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2**64 / golden ratio, as int64
MIX64 = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
MIX32 = (0x7FEB352D, 0x846CA68B - 2**32)  # Wellons, "Prospecting for Hash Functions", 2018
LARGEST_BELOW_1 = 1 - 2.0**-24


def add_noise(scores: Tensor, metadata: SamplingMetadata, first_id: int = 0) -> Tensor:
    """scores [N, V] float32 of the tokens from `first_id` on -> scores + temperature * Gumbel noise [N, V]"""
    if metadata.all_greedy:
        return scores
    token_ids = torch.arange(first_id, first_id + scores.shape[1], dtype=torch.int32, device=scores.device)
    noise = gumbel(metadata.seeds, metadata.indices, token_ids)
    return noise.mul_(metadata.temperature[:, None]).add_(scores)


def choose(scores: Tensor) -> Tensor:
    """The id of the largest score of each row [N] int64, the lowest among equals; -1 where that score is not finite."""
    largest, ids = scores.max(-1)
    return torch.where(largest.isfinite(), ids, -1)


def row_keys(seeds: Tensor, indices: Tensor) -> Tensor:
    """seeds [N] int64, indices [N] (the number of output tokens before) -> keys [N] int64: 64 well-mixed bits."""
    return _mix64(_mix64(seeds) + (indices.long() + 1) * GOLDEN)


def random_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """keys [N] int64, token_ids [V] -> [N, V] int32: 32 random bits for each pair.

    There are two rounds, each with half of the key. After one round, the rows of two keys would have the same numbers
    in another order.
    """
    low, high = keys & 0xFFFFFFFF, _shift(keys, 32, 64)
    bits = _mix32_(token_ids.int() ^ _as_int32(low)[:, None])  # [N, V]
    return _mix32_(bits.add_(_as_int32(high)[:, None]))


def gumbel(seeds: Tensor, indices: Tensor, token_ids: Tensor) -> Tensor:
    """seeds [N] int64, indices [N], token_ids [V] -> standard Gumbel noise [N, V] float32, always finite.

    With U uniform in (0, 1), the noise is -log(-log(1 - U)). Winners have a small U, and there float32 is fine-grained:
    values of U are 2**-31 apart, so that the noise reaches up to 22.2.
    """
    bits = random_bits(row_keys(seeds, indices), token_ids)
    uniform = bits.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)  # [N, V]
    return uniform.clamp_(max=LARGEST_BELOW_1).neg_().log1p_().neg_().log_().neg_()


def _shift(x: Tensor, by: int, width: int) -> Tensor:
    """Logical shift to the right. (torch's own shift copies the sign bit.)"""
    return (x >> by) & (2 ** (width - by) - 1)


def _mix64(x: Tensor) -> Tensor:
    """`nanovllm.sampling_params.mix64` on int64 tensors."""
    x = (x ^ _shift(x, 30, 64)) * MIX64[0]
    x = (x ^ _shift(x, 27, 64)) * MIX64[1]
    return x ^ _shift(x, 31, 64)


def _mix32_(x: Tensor) -> Tensor:
    """The same kind of bijection on int32, in place."""
    x.bitwise_xor_(_shift(x, 16, 32)).mul_(MIX32[0])
    x.bitwise_xor_(_shift(x, 15, 32)).mul_(MIX32[1])
    return x.bitwise_xor_(_shift(x, 16, 32))


def _as_int32(x: Tensor) -> Tensor:
    """int64 in [0, 2**32) -> the int32 of the same bits."""
    return torch.where(x >= 2**31, x - 2**32, x).int()
