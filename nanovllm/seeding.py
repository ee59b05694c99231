"""Seeds as 64-bit keys, in plain Python, so that the control plane can derive them without torch."""

MASK = 2**64 - 1


def mix64(x: int) -> int:
    """A bijection of 64-bit integers in which every input bit flips half of the output bits (SplitMix64's finaliser:
    Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators", 2014)."""
    x &= MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def derive_seed(seed: int, choice: int) -> int:
    """The seed of choice `choice` (from 0) of a request whose seed is `seed`.

    In [0, 2**63), as `SamplingParams.seed`. Choices of one request, and of requests with neighbouring seeds, are as
    good as independent.
    """
    return mix64(mix64(seed) + choice + 1) >> 1
