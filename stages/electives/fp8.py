"""Elective: FP8.

What hurts:   a decode step takes at least as long as reading weights and cache takes, which have two bytes per number.
The idea:     give a number one byte: a sign, four bits of exponent, three of mantissa (e4m3; Micikevicius et al., "FP8
              Formats for Deep Learning", 2022). There are 253 such numbers, up to 448, and the small ones lie dense. So
              weights that are neighbours share a scale, which makes the largest of them 448. They are read as bytes,
              widened and multiplied by their scale on the way into the product. Linear layers change, and nothing else;
              activations and the KV cache can be rounded in the same way.
Still hurts:  PyTorch writes the widened weight to memory, so that bytes are saved and time is not. A kernel widens in
              registers, or multiplies bytes by bytes on tensor cores (nanovllm/kernels/fp8).
"""

from dataclasses import replace
from functools import cache
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.checkpoint import load_model
from stages.core import OnEvent, Trace, check_options
from stages.model import ModelConfig, Transformer
from stages.stage_3_paged_blocks import Batch, PagedKVCache
from stages.stage_4_prefix_caching import PrefixCachingPool
from stages.stage_5_continuous_batching import ContinuousBatchingEngine, Scheduler

E4M3 = torch.float8_e4m3fn  # "fn": finite, with NaN but without infinity
LARGEST = 448.0  # of its numbers
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # so that a block of zeros is not divided by zero

Scales = Literal["tensor", "channel", "block"]
KVCacheDtype = Literal["auto", "fp8"]
Block = tuple[int, int]  # how many rows and columns of a matrix share a scale


# --- numbers ---------------------------------------------------------------------------------------------------------


def e4m3_values() -> Tensor:
    """The number of each of the 256 bytes -> float32 [256]."""
    # exercise fp8.1: a byte is a sign (1 bit), an exponent (4 bits) and a mantissa (3 bits). An exponent e > 0 means
    #   (1 + mantissa / 8) * 2**(e - 7), and e = 0 means mantissa / 8 * 2**-6. The bytes 127 and 255 are NaN.
    byte = torch.arange(256)
    sign, exponent, mantissa = 1 - 2 * (byte >> 7), (byte >> 3) & 15, byte & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    subnormal = mantissa / 8 * 2.0**-6
    values = sign * torch.where(exponent > 0, normal, subnormal)
    values[[127, 255]] = torch.nan
    return values
    # end exercise


@cache
def e4m3_table(device: torch.device) -> Tensor:
    """`e4m3_values` on a device, where they stay."""
    return e4m3_values().to(device)


def to_e4m3(x: Tensor) -> Tensor:
    """The nearest of the 253 numbers for each of x, in a byte each; beyond the largest, that is the largest."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def from_e4m3(x: Tensor) -> Tensor:
    """The numbers in float32: a byte says where in a table of 256 its number stands."""
    rows = x.view(torch.uint8).flatten().int()
    return e4m3_table(x.device).index_select(0, rows).view(x.shape)


# --- scales ----------------------------------------------------------------------------------------------------------


def block_of(scales: Scales, weight: Tensor) -> Block:
    """Which part of a weight [out, in] shares a scale: all of it, the row of an output channel, or a block."""
    rows, columns = weight.shape
    return {"tensor": (rows, columns), "channel": (1, columns), "block": (128, 128)}[scales]


def in_blocks(matrix: Tensor, block: Block) -> Tensor:
    """A matrix [rows, columns] as [R, block rows, C, block columns]. Zeros fill up the last blocks."""
    rows, columns = block
    full = F.pad(matrix, (0, -matrix.shape[1] % columns, 0, -matrix.shape[0] % rows))
    return full.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))


def out_of_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    """The way back: [R, block rows, C, block columns] -> [rows, columns]."""
    return blocks.flatten(2).flatten(0, 1)[: shape[0], : shape[1]]


def quantize(matrix: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """A matrix [rows, columns] in bytes of the same shape, and a scale for each of its blocks, float32 [R, C].

    Checkpoints call the scales `weight_scale` [out, 1] (compressed-tensors), or `weight_scale_inv` [R, C] (DeepSeek and
    Qwen, in blocks of 128 x 128). The bytes are multiplied by both.
    """
    blocks = in_blocks(matrix.float(), block)  # [R, block rows, C, block columns]
    # exercise fp8.2: the scale of a block is what its largest magnitude must be divided by to become LARGEST, but no
    #   less than SMALLEST_SCALE. Divide every block by its own scale.
    largest = blocks.abs().amax(dim=(1, 3))  # [R, C]
    scale = (largest / LARGEST).clamp(min=SMALLEST_SCALE)
    blocks = blocks / scale[:, None, :, None]
    # end exercise
    return to_e4m3(out_of_blocks(blocks, matrix.shape)), scale


def widen(weight: Tensor, scale: Tensor, block: Block) -> Tensor:
    """What `quantize` has left of a matrix -> float32 [rows, columns]."""
    blocks = in_blocks(from_e4m3(weight), block)
    return out_of_blocks(blocks * scale[:, None, :, None], weight.shape)


# --- layers ----------------------------------------------------------------------------------------------------------


class FP8Linear(nn.Module):
    """What a layer has in the place of a linear layer: its weight in bytes, with scales."""

    weight: Tensor  # [out, in] in e4m3
    weight_scale: Tensor  # [R, C] in float32

    def __init__(self, linear: nn.Linear, scales: Scales, quantize_activations: bool) -> None:
        super().__init__()
        self.block, self.quantize_activations = block_of(scales, linear.weight), quantize_activations
        weight, scale = quantize(linear.weight, self.block)
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", scale)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        # exercise fp8.3: widen the weight, and multiply x by it in the dtype of x; do not forget the bias. If
        #   self.quantize_activations, first quantise and widen x: each token has a scale of its own for as many columns
        #   as a block of the weight has.
        if self.quantize_activations:
            block = 1, self.block[1]
            x = widen(*quantize(x, block), block).to(x.dtype)
        weight = widen(self.weight, self.weight_scale, self.block)
        return F.linear(x, weight.to(x.dtype), self.bias)
        # end exercise


def quantize_linears(model: Transformer, scales: Scales, quantize_activations: bool) -> None:
    """Put an FP8Linear in the place of every linear layer within `model.layers`.

    Embedding, head and norms stay as they are, as in published checkpoints: the head chooses the token, and its errors
    are smoothed by no later layer.
    """
    for part in list(model.layers.modules()):
        for name, linear in part.named_children():
            if isinstance(linear, nn.Linear):
                part.register_module(name, FP8Linear(linear, scales, quantize_activations))


class FP8KVCache(PagedKVCache):
    """Keys and values in one byte each, without scales: in most models they lie well within the range of e4m3."""

    def __init__(self, c: ModelConfig, num_blocks: int, block_size: int, device: torch.device) -> None:
        super().__init__(replace(c, dtype=E4M3), num_blocks, block_size, device)

    def attend(self, batch: Batch, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As stage 3 does: q [T, Hq, D] -> [T, Hq, D]. All blocks of the layer are widened, in use or not."""
        self.k[layer].flatten(0, 1)[batch.slots] = to_e4m3(k)
        self.v[layer].flatten(0, 1)[batch.slots] = to_e4m3(v)
        return batch.attention(q, from_e4m3(self.k[layer]).to(q.dtype), from_e4m3(self.v[layer]).to(q.dtype))


class FP8Engine(ContinuousBatchingEngine):
    """Stage 5 with weights of one byte, quantised when they are loaded.

    scales:                which weights share a scale: those of a "tensor", of an output "channel", or of a "block" of
                           128 x 128.
    quantize_activations:  the inputs of linear layers are rounded to e4m3, too (W8A8).
    kv_cache_dtype:        "fp8" for keys and values of one byte; "auto" for those of the model.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        on_event: OnEvent | None = None,
        block_size: int = 16,
        num_blocks: int = 512,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        scales: Scales = "block",
        quantize_activations: bool = False,
        kv_cache_dtype: KVCacheDtype = "auto",
        attention: Literal["gather", "triton"] = "gather",
    ) -> None:
        sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        check_options(block_size=block_size, num_blocks=num_blocks, **sizes, attention=attention)
        if scales not in get_args(Scales):
            raise ValueError(f"scales must be 'tensor', 'channel' or 'block', got {scales!r}")
        if kv_cache_dtype not in get_args(KVCacheDtype):
            raise ValueError(f"kv_cache_dtype must be 'auto' or 'fp8', got {kv_cache_dtype!r}")
        self.model, self.config, self.eos_token_ids, _ = load_model(model, device=device, dtype=dtype)
        quantize_linears(self.model, scales, quantize_activations)
        self.device, self.trace, self.attention = torch.device(device), Trace(on_event), attention
        self.pool = PrefixCachingPool(num_blocks, block_size)
        kv_cache = FP8KVCache if kv_cache_dtype == "fp8" else PagedKVCache
        self.cache = kv_cache(self.config, num_blocks, block_size, self.device)
        self.scheduler = Scheduler(self.pool, max_num_seqs, max_num_batched_tokens, self.trace)
