"""Linear layers that know which tensors of a checkpoint fill them."""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm import kernels
from nanovllm.distributed.group import Group

# Tokens up to which our kernels beat the library's on an H200: of narrow layers that need not add up their parts, of
# wide ones, and of those that give the sum.
MAX_FEW_NARROW, NARROW = 128, 2048
MAX_FEW_PARTIAL = 32
MAX_FEW = 16


class Linear(nn.Module):
    """y = x W^T + b. Unlike `nn.Linear` it leaves its parameters uninitialised: the loader fills every one of them.

    weight [out, in], bias [out] or None. With a group of several ranks it is row-parallel: each rank has some of the
    inputs, and the products are summed over the ranks.
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
        skinny = few_tokens_kernel(x, self.weight)
        bias = self.bias if self.group is None else None
        y = F.linear(x, self.weight, bias) if skinny is None else skinny(x, self.weight, bias)
        if self.group is None:
            return y
        y = self.group.all_reduce(y)
        return y if self.bias is None else y + self.bias  # after the sum, or every rank would add it

    def partial(self, x: Tensor) -> Tensor:
        """The same for `RMSNorm.add` to read: x [T, in] -> [T, out], or parts to be summed [S, T, out] float32."""
        if self.bias is not None or self.group is not None:
            return self(x)
        skinny = few_tokens_kernel(x, self.weight, partial=True)
        return self(x) if skinny is None else skinny(x, self.weight, partial=True)


class MergedLinear(Linear):
    """Several linear layers of one input as a single matrix product, their outputs side by side.

    Small batches are bound by reading weights and by launching kernels: one large product does both better than three
    small ones. `parts` maps the name that each layer has in a checkpoint ("q_proj") to its number of outputs.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(in_features, sum(parts.values()), bias=bias, dtype=dtype)
        self.parts = dict(parts)

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        """For each tensor of the checkpoint ("q_proj.weight"), the rows of our parameter that it fills."""
        for kind, parameter in self.named_parameters():
            for name, rows in zip(self.parts, parameter.split(list(self.parts.values())), strict=True):
                yield f"{name}.{kind}", rows


def few_tokens_kernel(x: Tensor, weight: Tensor, partial: bool = False) -> Callable[..., Tensor] | None:
    """The linear kernel for few tokens, where x [T, in] has so few and it can serve such a layer."""
    fused = kernels.fused_kernels(x.device)
    outputs, inputs = weight.shape
    most = (MAX_FEW_NARROW if outputs <= NARROW else MAX_FEW_PARTIAL) if partial else MAX_FEW
    fits = x.shape[0] <= most and x.dtype != torch.float32 and inputs % 128 == 0 and outputs % 64 == 0
    return fused.skinny_linear if fits and fused.add_rms_norm is not None else None  # the norm sums the parts
