"""Asking for memory ahead of time, while nobody else uses the way to it.

Between two attentions a decode step multiplies: half a dozen short kernels, each of which waits for the one before it
and then for its weights. Meanwhile the memory is mostly idle. So a small kernel on a second stream asks for the
weights of all of them at once, as soon as attention is done: they fit into the L2 cache of a large GPU, and each
multiplication finds its own there.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import CACHE_LINE

LINES = 512  # cache lines that a program asks for
MIN_TOKENS, MAX_TOKENS = 17, 512


@triton.jit
def prefetch(pointer):  # type: ignore[no-untyped-def]
    """Have the cache lines of all pointers brought to L2, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointer], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["num_lines"])
def _prefetch_kernel(ptr, num_lines, LINE: tl.constexpr, LINES: tl.constexpr):  # type: ignore[no-untyped-def]
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    prefetch(ptr + tl.where(line < num_lines, line, 0).to(tl.int64) * LINE)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def prefetch_weights(weights: list[torch.Tensor], num_tokens: int) -> None:
    """Ask for `weights`, in this order, beside what the current stream does next. `join_prefetch` must follow.

    Does nothing outside of a recording, where the launches would cost more than they bring, nor for so few tokens that
    the layers fetch their own weights early (see `skinny_linear`), nor for so many that reading weights is a trifle.
    """
    device = weights[0].device
    if not (MIN_TOKENS <= num_tokens <= MAX_TOKENS and torch.cuda.is_current_stream_capturing()):
        return
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for weight in weights:
            num_lines = weight.numel() * weight.element_size() // CACHE_LINE
            _prefetch_kernel[(triton.cdiv(num_lines, LINES),)](
                weight, num_lines, LINE=CACHE_LINE // weight.element_size(), LINES=LINES
            )


def join_prefetch(num_tokens: int, device: torch.device) -> None:
    """Let the current stream wait for what `prefetch_weights` has started: a recording must not end before."""
    if MIN_TOKENS <= num_tokens <= MAX_TOKENS and torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().wait_stream(_side_stream(device))
