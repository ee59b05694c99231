"""Experts: many small MLPs, of which every token goes through a few (Shazeer et al., "Outrageously Large Neural
Networks: The Sparsely-Gated Mixture-of-Experts Layer", 2017).

T tokens, H hidden size, E experts, K experts of a token, I neurons of an expert.
"""

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm import kernels
from nanovllm.kernels import FP8
from nanovllm.layers.fp8_linear import GRAIN, widen
from nanovllm.layers.linear import silu_and_mul


class Routing(NamedTuple):
    """Where each token goes."""

    experts: Tensor  # [T, K] int64, all different within a token
    weights: Tensor  # [T, K] float32


def route(logits: Tensor, num_chosen: int, *, normalise: bool) -> Routing:
    """The likeliest experts of each token, and their probabilities, or their shares of the sum of these.

    logits: [T, E], or what `Linear.product` gives with partial=True. A token whose logits are not finite goes to some
    experts, like any other.
    """
    fused = kernels.fused_kernels(logits.device).route
    if fused is not None:
        return Routing(*fused(logits, num_chosen, normalise=normalise))
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(num_chosen)  # [T, K] each
    return Routing(experts, weights / weights.sum(-1, keepdim=True) if normalise else weights)


class Experts(nn.Module):
    """The MLPs of all experts. gate_up_proj [E, 2 I, H], down_proj [E, H, I], uninitialised: the loader fills them.

    With several ranks, each has some neurons of every expert, or some whole experts, and gives its part of a sum.

    place: (rank, ranks) if ranks have whole experts: of E * ranks experts this rank has E, those from rank * E on. If
        each rank has a part of every expert, (0, 1).
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype,
        place: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__()
        self.place = place
        gate_up = torch.empty(num_experts, 2 * intermediate_size, hidden_size, dtype=dtype)
        down = torch.empty(num_experts, hidden_size, intermediate_size, dtype=dtype)
        self.gate_up_proj = nn.Parameter(gate_up, requires_grad=False)
        self.down_proj = nn.Parameter(down, requires_grad=False)

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """Of weights in FP8, those of `gate_up_proj` and those of `down_proj`."""
        return None

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        """The name of each tensor of a checkpoint ("0.gate_proj.weight"), and the part of a parameter that it fills.

        The scales of that weight are called "0.gate_proj.scale" here, whatever the checkpoint calls them.

        Checkpoints that have the parameters as they are here (transformers 5 can write them) name them as we do.
        """
        first = self.place[0] * len(self.down_proj)
        matrices = {"weight": (self.gate_up_proj, self.down_proj)}
        for kind, of_all in (matrices if self.scales is None else matrices | {"scale": self.scales}).items():
            for expert, (gate_up, down) in enumerate(zip(*of_all, strict=True), first):
                gate, up = gate_up.chunk(2)  # [I, H] each
                yield f"{expert}.gate_proj.{kind}", gate
                yield f"{expert}.up_proj.{kind}", up
                yield f"{expert}.down_proj.{kind}", down

    def forward(self, x: Tensor, routing: Routing, *, partial: bool = False) -> Tensor:
        """x [T, H] -> [T, H]: the weighted sum of the outputs of each token's experts, those of this rank alone. With
        partial=True the result may be [S, T, H], to be summed over S."""
        fused = kernels.fused_kernels(x.device)
        kernel, partial = fused.grouped_mlp or grouped_mlp, partial and fused.add_rms_norm is not None
        return kernel(x, self.gate_up_proj, self.down_proj, *routing, self.place, self.scales, partial=partial)

    def can_stay(self) -> bool:
        """Whether the kernel can read the weights in FP8, by their sizes."""
        return all(size % GRAIN[0] == 0 for size in self.down_proj.shape[1:])


class Fp8Experts(Experts):
    """Experts with weights in FP8. gate_up_proj_scale [E, 2 I / R, H / C], down_proj_scale [E, H / R, I / C] float32.

    R and C are for each of the two what they are for an `Fp8Linear`.
    """

    def __init__(self, experts: Experts, block: tuple[int, int] | None) -> None:
        """Make what takes the place of `experts`, on its device. The values of its weights do not matter."""
        nn.Module.__init__(self)
        self.place = experts.place
        hidden, intermediate = experts.down_proj.shape[1:]
        self.gate_up_proj, self.gate_up_proj_scale = in_fp8(experts.gate_up_proj, intermediate, block)
        self.down_proj, self.down_proj_scale = in_fp8(experts.down_proj, hidden, block)

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        return self.gate_up_proj_scale, self.down_proj_scale


def in_fp8(weight: Tensor, outputs: int, block: tuple[int, int] | None) -> tuple[nn.Parameter, nn.Parameter]:
    """What takes the place of weight [E, out, in], in FP8, and its scales [E, out / R, in / C]; both uninitialised.

    outputs: of each part; two parts may be merged."""
    num_experts, rows, inputs = weight.shape
    r, c = (1, inputs) if block is None else (gcd(block[0], outputs), gcd(block[1], inputs))
    scale = weight.new_empty(num_experts, rows // r, inputs // c, dtype=torch.float32)
    values = torch.empty_like(weight, dtype=FP8)
    return nn.Parameter(values, requires_grad=False), nn.Parameter(scale, requires_grad=False)


def grouped_mlp(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    experts: Tensor,
    weights: Tensor,
    place: tuple[int, int] = (0, 1),
    scales: tuple[Tensor, Tensor] | None = None,
    *,
    partial: bool = False,
) -> Tensor:
    """`Experts.forward` in plain PyTorch: one expert after another, each with all its tokens. Waits for the device.
    `partial` makes no difference.

    A token's result does not depend on its company, but for the rounding of larger or smaller matrix products.
    """
    (rank, ranks), num_experts, num_chosen = place, len(down_proj), experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # [T K], pairs of a token and an expert of it, by expert
    counts = torch.bincount(experts.flatten(), minlength=num_experts * ranks).tolist()  # pairs of each expert
    out = x.new_zeros(len(order), x.shape[1])  # [T K, H]
    own = order.split(counts)[rank * num_experts : (rank + 1) * num_experts]
    for expert, pairs in enumerate(own):
        if len(pairs):
            gate_up, down = gate_up_proj[expert], down_proj[expert]  # [2 I, H], [H, I]
            if scales is not None:
                gate_up, down = (
                    widen(gate_up, scales[0][expert]).to(x.dtype),
                    widen(down, scales[1][expert]).to(x.dtype),
                )
            hidden = silu_and_mul(F.linear(x[pairs // num_chosen], gate_up))  # [pairs, I]
            out[pairs] = F.linear(hidden, down)
    return (out.view(*experts.shape, -1) * weights[..., None]).sum(1).to(x.dtype)
