"""The noise of the sampling kernel, before its logarithms, is that of `sampling/noise.py` bit for bit."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from nanovllm.kernels.fused.gumbel import fold, hash_bits, uniform_of
from tests.kernels.test_gumbel import MASK32, mix32


def unmix32(y: int) -> int:
    """What `mix32` maps to y."""

    def unshift(y: int, by: int) -> int:
        x = y
        for _ in range(32 // by):
            x = y ^ (x >> by)
        return x

    y = unshift(y, 16) * pow(0x846CA68B, -1, 2**32) & MASK32
    return unshift(unshift(y, 15) * pow(0x7FEB352D, -1, 2**32) & MASK32, 16)


@triton.jit
def kernel(low_ptr, high_ptr, token_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, SIZE)
    low, high = tl.load(low_ptr).to(tl.uint32), tl.load(high_ptr).to(tl.uint32)
    token_ids = tl.load(token_ptr + i).to(tl.uint32)
    tl.store(out_ptr + i, uniform_of(hash_bits(fold(token_ids) ^ fold(low), high)))


EDGES = [0, 1, 2, 3, *(2**k + d for k in (24, 25, 26, 31) for d in range(-3, 7)), *(2**32 - d for d in range(1, 260))]


@pytest.mark.parametrize(("low", "high"), [(0, 0), (MASK32, MASK32), (0x80000000, 0x7FFFFFFF), (12345, 678910)])
def test_the_kernel_has_the_same_number_for_all_bits(low: int, high: int) -> None:
    """`kernels/fused/sample.py` comes to it in fewer instructions. The numbers here lie where something is rounded."""
    bits = EDGES + [mix32(i) for i in range(512 - len(EDGES))]
    token_ids = [unmix32((unmix32(b) - high) & MASK32) ^ low for b in bits]
    assert [mix32((mix32(i ^ low) + high) & MASK32) for i in token_ids] == bits
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = torch.empty(512, device=device)
    kernel[(1,)](*(torch.tensor(x, device=device) for x in ([low], [high], token_ids)), out, SIZE=512)
    expected = [(torch.tensor(b >> 1, dtype=torch.int32).float() + 0.5) * 2.0**-31 for b in bits]
    assert torch.equal(out.cpu(), torch.stack(expected))
