"""Layers with a weight matrix: linear layers, whole or a part of them, by PyTorch or our kernels; and the embedding."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm import kernels
from nanovllm.distributed.group import Group


@dataclass(frozen=True)
class PendingAllReduce:
    """This rank's part of a sum over the ranks that has not been taken yet. `RMSNorm.add` takes it, with the norm.

    parts: [T, H], or [S, T, H] float32, which is to be summed over S first.
    """

    parts: Tensor
    group: Group


SubLayerOutput = Tensor | PendingAllReduce  # what attention or the MLP adds to the residual stream


class Linear(nn.Module):
    """y = x W^T + b. Unlike `nn.Linear` it leaves its parameters uninitialised: the loader fills every one of them.

    weight [out, in], bias [out] or None. With a group of several ranks the layer is row-parallel: each rank has some of
    the inputs, and the products are summed over the ranks.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, group: Group | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        self.group = group if group is not None and group.size > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]"""
        if self.group is None:
            return self.product(x, self.bias)
        y = self.group.all_reduce(self.product(x))
        return y if self.bias is None else y + self.bias  # after the sum, or every rank would add it

    def partial(self, x: Tensor) -> SubLayerOutput:
        """`forward`, but sums may be left to `RMSNorm.add`: x [T, in] -> [T, out], or [S, T, out] float32, to be summed
        over S. Where one exchange can sum over the ranks, the norm does that too: then a `PendingAllReduce`."""
        group, shape = self.group, (len(x), len(self.weight))
        if self.bias is not None or (group is not None and not group.can_fuse_all_reduce(shape, x.dtype)):
            return self(x)
        y = self.product(x, partial=True)
        return y if group is None else PendingAllReduce(y, group)

    def product(self, x: Tensor, bias: Tensor | None = None, *, partial: bool = False) -> Tensor:
        """x W^T + b for this rank's inputs: x [T, in] -> [T, out]. With partial=True the result may be [S, T, out]
        float32, to be summed over S."""
        kernel = linear_kernel(x, self.weight, partial=partial)
        return F.linear(x, self.weight, bias) if kernel is None else kernel(x, self.weight, bias)


class MergedLinear(Linear):
    """Several linear layers of one input as a single matrix product, their outputs side by side.

    Small batches are bound by reading weights and by launching kernels, and one large product does both better than
    three small ones. `parts` maps the name that each layer has in a checkpoint ("q_proj") to its number of outputs.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, dtype=dtype)
        self.parts = dict(parts)

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        """The name of each tensor of the checkpoint ("q_proj.weight"), and the rows of our parameter that it fills. The
        scales of a weight in FP8 are called "q_proj.scale" here, whatever the checkpoint calls them."""
        for kind, parameter in self.named_parameters():
            share = len(self.weight) // len(parameter)  # rows of the weight that share a scale
            rows = parameter.split([outputs // share for outputs in self.parts.values()])
            yield from ((f"{name}.{kind}", part) for name, part in zip(self.parts, rows, strict=True))

    def gated(self, x: Tensor) -> Tensor:
        """`silu_and_mul` of the product, where the parts are a gate and an up projection: x [T, in] -> [T, out / 2]"""
        kernel = linear_kernel(x, self.weight, gated=True) if self.bias is None else None
        return silu_and_mul(self(x)) if kernel is None else kernel(x, self.weight)

    def norm_kernel(self, residual: Tensor, *, gated: bool) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """The kernel for the layer, or for `gated`, together with the norm before it, for a residual stream [T, in];
        None: there is none."""
        choose = kernels.fused_kernels(self.weight.device).choose_norm_linear
        if choose is None or (gated and self.bias is not None):
            return None
        return choose(len(residual), self.weight, gated=gated)


class Embedding(nn.Module):
    """weight [V, H], uninitialised: the loader fills it.

    Of several ranks each has V rows, from the token rank * V on. For all other tokens a rank gives zeros, so that the
    sum over the ranks is the vector.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, group: Group | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype), requires_grad=False)
        self.group = group

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] -> [T, H]"""
        if self.group is None or self.group.size == 1:
            return F.embedding(input_ids, self.weight)
        rows = input_ids - self.group.rank * self.weight.shape[0]
        own = (rows >= 0) & (rows < self.weight.shape[0])
        vectors = F.embedding(rows.where(own, 0), self.weight)  # [T, H]
        return self.group.all_reduce(vectors.where(own[:, None], 0))


class ScaledEmbedding(Embedding):
    """The embedding of Gemma: every vector is multiplied by `scale`, which is rounded to the dtype of the weights."""

    def __init__(
        self, vocab_size: int, hidden_size: int, scale: float, *, dtype: torch.dtype, group: Group | None = None
    ) -> None:
        super().__init__(vocab_size, hidden_size, dtype=dtype, group=group)
        self.scale = torch.tensor(scale, dtype=dtype, device="cpu").item()

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.scale


def linear_kernel(
    x: Tensor, weight: Tensor, *, gated: bool = False, partial: bool = False
) -> Callable[..., Tensor] | None:
    """Our kernel for x [T, in] and weight [out, in]; None where the library's is faster, or ours cannot run.

    gated, partial: as in `nanovllm/kernels/linear/choice.py`.
    """
    fused = kernels.fused_kernels(x.device)
    if fused.choose_linear is None or fused.add_rms_norm is None:  # the norm sums what is partial
        return None
    return fused.choose_linear(x.shape[0], weight, gated=gated, partial=partial)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer, "GLU Variants Improve Transformer", 2020). gate_up [T, 2 I] -> [T, I]"""
    fused = kernels.fused_kernels(gate_up.device).silu_and_mul
    if fused is not None:
        return fused(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)  # [T, I] each
    return F.silu(gate) * up


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with the approximation of GELU by tanh. gate_up [T, 2 I] -> [T, I]"""
    fused = kernels.fused_kernels(gate_up.device).gelu_and_mul
    if fused is not None:
        return fused(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)  # [T, I] each
    return F.gelu(gate, approximate="tanh") * up
