"""From a KV cache in FP8 to the operands of tensor cores, in registers of a Hopper GPU, in Gluon.

An operand of `mma_v2` has its numbers in pairs: a register holds two neighbours along the dimension that is summed up.
An instruction (ldmatrix) loads numbers of 16 bits from shared memory in this layout, but not numbers of 8 bits. So two
numbers in FP8 that are neighbours in memory count as one word while they are loaded. One instruction widens both halves
of a word to a register of two numbers in fp16. This is exact.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WIDEN = gl.constexpr("""{
.reg .b16 first, second;
mov.b32 {first, second}, $2;
cvt.rn.f16x2.e4m3x2 $0, first;
cvt.rn.f16x2.e4m3x2 $1, second;
}""")
WIDEN_AND_SORT = gl.constexpr("""{
.reg .b16 first, second;
.reg .b32 a, b;
mov.b32 {first, second}, $2;
cvt.rn.f16x2.e4m3x2 a, first;
cvt.rn.f16x2.e4m3x2 b, second;
prmt.b32 $0, a, b, 0x5410;
prmt.b32 $1, a, b, 0x7632;
}""")


@gluon.jit
def widen_keys(words):  # type: ignore[no-untyped-def]
    """words [HEADS, D / 2, KEYS] int16, an operand on the right -> two operands of this shape in fp16.

    A register of `words` has the dimensions 4 i to 4 i + 3 of a key. Its first half becomes a register of the first
    operand, its second half one of the second. So row j of the first operand is dimension j // 2 * 4 + j % 2, and row j
    of the second is the dimension two further. The queries are loaded in the same order, so the sums are the same.
    """
    return gl.inline_asm_elementwise(WIDEN, "=r,=r,r", [words], [gl.float16, gl.float16], is_pure=True, pack=2)


@gluon.jit
def widen_values(words):  # type: ignore[no-untyped-def]
    """words [HEADS, KEYS, D / 2] int16, an operand on the right -> two operands of this shape in fp16: the even
    dimensions of the values, and the odd ones.

    A register of `words` has two dimensions of two keys, and a register of an operand has one dimension of two keys.
    """
    return gl.inline_asm_elementwise(WIDEN_AND_SORT, "=r,=r,r", [words], [gl.float16, gl.float16], is_pure=True, pack=2)


@gluon.jit
def in_fp16(q):  # type: ignore[no-untyped-def]
    """Queries in fp16. What is too large becomes the largest number, and NaN stays NaN."""
    q = q.to(gl.float32)
    return gl.where(q > 65504.0, 65504.0, gl.where(q < -65504.0, -65504.0, q)).to(gl.float16)
