"""Asking for memory ahead of time."""

import triton
import triton.language as tl


@triton.jit
def prefetch_l2(pointer):  # type: ignore[no-untyped-def]
    """Have the cache lines of all pointers brought to the L2 cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointer], dtype=tl.int32, is_pure=False, pack=1
    )
