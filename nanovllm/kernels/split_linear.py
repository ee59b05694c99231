"""A linear layer with few columns and many inputs, for the tens of tokens of a middling batch.

The two layers of a decoder that add to the residual stream (`o_proj`, `down_proj`) are narrow: at 1,024 columns there
are not enough tiles of output for all multiprocessors of a large GPU. So the inputs are cut in two among programs as
well (split-K), and the sums are left to the norm that follows, which reads the result anyway. Otherwise this is the
tiled matrix product of every textbook, but for its beginning: while the kernel before it still runs, it asks for the
weights that it will need (see `launch.py`), which the library's kernels do not do.

Fewer tokens are better served by `skinny_linear`, more or wider layers by the library: `layers/linear.py` chooses.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import CACHE_LINE, overlaps_launches
from nanovllm.kernels.prefetch import prefetch

TOKENS, COLUMNS, INNER, SPLITS = 64, 32, 128, 2  # of a program: its tile, the inputs of a step; parts of the inputs
AHEAD = 1024  # inputs, of each column, whose weights are asked for before the predecessor has finished


@triton.jit(do_not_specialize=["num_tokens"])
def _split_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, num_tokens,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    is_token = (token < num_tokens)[:, None]
    inner = part * DEPTH + tl.arange(0, INNER)
    row = weight_ptr + column[:, None] * INPUTS
    if PDL:
        gdc_launch_dependents()
        prefetch(row + part * DEPTH + (tl.arange(0, LINES) * LINE)[None, :])
        gdc_wait()
    x_ptr += token[:, None] * INPUTS + inner[None, :]
    weight_ptr = row + inner[None, :]
    acc = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for start in range(0, DEPTH, INNER):
        x = tl.load(x_ptr + start, mask=is_token, other=0.0)  # [TOKENS, INNER]
        w = tl.load(weight_ptr + start)  # [COLUMNS, INNER]
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    out_ptr += (part * num_tokens + token)[:, None] * OUTPUTS + column[None, :]
    tl.store(out_ptr, acc, mask=is_token)


def split_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, in], contiguous; weight [out, in] -> [S, T, out] float32, to be summed over S. In 16 bits.

    in is a multiple of 128, out of 32: there are no masks for the ends of weights.
    """
    num_tokens, inputs = x.shape
    outputs = weight.shape[0]
    splits = SPLITS if inputs % (SPLITS * INNER) == 0 else 1
    depth = inputs // splits
    line = CACHE_LINE // x.element_size()
    out = x.new_empty(splits, num_tokens, outputs, dtype=torch.float32)
    pdl = overlaps_launches(x.device)
    _split_linear_kernel[(outputs // COLUMNS, splits, triton.cdiv(num_tokens, TOKENS))](
        x, weight, out, num_tokens, INPUTS=inputs, OUTPUTS=outputs, DEPTH=depth, TOKENS=TOKENS, COLUMNS=COLUMNS,
        INNER=INNER, LINES=min(depth & -depth, AHEAD) // line, LINE=line, PDL=pdl,
        num_warps=4, num_stages=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
