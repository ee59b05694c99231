"""The gate of the MLP in one pass."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.launch import overlaps_launches

BLOCK = 1024


@triton.jit
def _activate_and_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < SIZE
    gate = tl.load(gate_up_ptr + row * (2 * SIZE) + column, mask=exists, other=0.0)
    up = tl.load(gate_up_ptr + row * (2 * SIZE) + SIZE + column, mask=exists, other=0.0)
    gate32 = gate.to(tl.float32)
    # gelu(x) is x / 2 * (1 + tanh(z)), which is x * sigmoid(2 z)
    argument = 1.5957691216057308 * (gate32 + 0.044715 * gate32 * gate32 * gate32) if GELU else gate32
    activated = (gate32 * tl.sigmoid(argument)).to(gate.dtype)
    tl.store(out_ptr + row * SIZE + column, activated * up, mask=exists)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I], contiguous -> silu(gate) * up [T, I]"""
    return _activate_and_mul(gate_up, gelu=False)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I], contiguous -> gelu(gate) * up [T, I], with the approximation of GELU by tanh."""
    return _activate_and_mul(gate_up, gelu=True)


def _activate_and_mul(gate_up: Tensor, gelu: bool) -> Tensor:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    pdl = overlaps_launches(gate_up.device)
    _activate_and_mul_kernel[(num_tokens, triton.cdiv(size, BLOCK))](
        gate_up, out, SIZE=size, BLOCK=BLOCK, GELU=gelu, PDL=pdl, launch_pdl=pdl
    )
    return out
