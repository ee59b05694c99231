"""The noise of `sampling/noise.py` in a kernel. Integers are the same bit for bit; logarithms differ by some 1e-6."""

import triton
import triton.language as tl


@triton.jit
def mix64(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def log2(x, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The binary logarithm. A GPU's instruction for this is exact to 2**-22; a library's logf takes ten times as long.
    All arguments are 0 or normal numbers, so ".ftz" (subnormal numbers count as 0) changes nothing."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(tl.maximum(x, 1e-30))  # NumPy warns of 0


@triton.jit
def log(x, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    if FAST:
        return log2(x, FAST) * 0.6931471805599453
    else:
        return tl.log(x)


@triton.jit
def fold(token_ids):  # type: ignore[no-untyped-def]
    return token_ids ^ (token_ids >> 16)


@triton.jit
def hash_bits(folded, high):  # type: ignore[no-untyped-def]
    """`mix32(mix32(token_ids ^ low) + high)` without its last `fold`. folded: `fold(token_ids ^ low)`, uint32."""
    x = folded * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = fold(x) + high
    x = fold(x) * 0x7FEB352D
    return (x ^ (x >> 15)) * 0x846CA68B


@triton.jit
def uniform_of(x):  # type: ignore[no-untyped-def]
    """A uniform number in (0, 1] from the result of `hash_bits`. For an even integer, "plus a half, times 2**-31" is a
    single multiply-add, because powers of two round nothing."""
    even = fold(x) & 0xFFFFFFFE
    return tl.fma(even.to(tl.float32), 2.3283064365386963e-10, 2.3283064365386963e-10)  # 2**-32


@triton.jit
def gumbel(uniform, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    uniform = tl.minimum(uniform, 0.99999994)
    # -log(1 - u). Winners have a small u, and where u is small, 1 - u would round u away.
    series = 1 + uniform * (0.5 + uniform * (0.33333333 + uniform * (0.25 + uniform * (0.2 + uniform * 0.16666667))))
    exponential = tl.where(uniform < 0.0625, uniform * series, -log(1 - uniform, FAST))
    return -log(exponential, FAST)


@triton.jit
def row_key(seed, index):  # type: ignore[no-untyped-def]
    """The lower and the upper half of a row's key, uint32, from its seed and the number of output tokens before."""
    key = mix64(mix64(seed.to(tl.uint64)) + (index.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    return (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
