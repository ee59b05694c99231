"""Training a mixture of experts without a loop: every expert computes every token, and most of it counts for nothing.

That is eight experts' arithmetic for two, but it is a few large products without a wait for the router's choice, which
a small model on a GPU is trained with several times faster. A token's result, and every gradient, is the same.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock, load_balancing_loss_func

BALANCE: Final = 0.01  # of the balancing loss, for one nat of the other (Fedus et al., 2021, section 2.2)


class AllExperts(Qwen3MoeSparseMoeBlock):
    """The block of a layer as training computes it. It keeps what its router said last."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, L, H] -> [B, L, H]. The experts are one MLP of E x I neurons; each expert's are times its weight."""
        logits = F.linear(hidden.flatten(0, 1), self.gate.weight)  # [N, E]
        self.router_logits = logits
        weights, chosen = logits.float().softmax(-1).topk(self.gate.top_k)  # [N, K] each
        if self.gate.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        weight_of = torch.zeros_like(logits, dtype=torch.float32).scatter(1, chosen, weights)  # [N, E]

        num_experts, twice, _ = self.experts.gate_up_proj.shape  # [E, 2 * I, H]
        gate_up = F.linear(hidden, self.experts.gate_up_proj.flatten(0, 1))  # [B, L, E * 2 * I]
        gate, up = gate_up.view(*logits.shape, 2, twice // 2).unbind(2)  # [N, E, I] each
        neurons = F.silu(gate) * up * weight_of.to(gate.dtype)[:, :, None]  # [N, E, I]
        down = self.experts.down_proj.transpose(0, 1).flatten(1)  # [H, E * I]
        return F.linear(neurons.view(*hidden.shape[:2], num_experts * twice // 2), down)


def layers_of_experts(model: Any) -> list[Any]:
    """The blocks of experts of a Qwen3-MoE model, one for each layer; none of any other model."""
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def compute_all_experts(model: Any) -> None:
    """From now on `model` computes all experts for all tokens."""
    for block in layers_of_experts(model):
        block.__class__ = AllExperts  # not an object around the block: the names of its parameters stay


def balancing_loss(model: Any, real: Tensor) -> Tensor:
    """Hugging Face's load-balancing loss of the last forward pass over the tokens `real` [B, L], times BALANCE.

    It is taken layer by layer: over all layers at once, what one neglects would make up for what another overloads.
    Returns 0 for a model without experts.
    """
    losses = [
        load_balancing_loss_func((block.router_logits.float(),), block.gate.num_experts, block.gate.top_k, real.float())
        for block in layers_of_experts(model)
    ]
    return BALANCE * sum(losses) / len(losses) if losses else torch.zeros((), device=real.device)


def counts_of_experts(model: Any, real: Tensor) -> Tensor:
    """For how many of the tokens `real` [B, L] the last forward pass chose each expert: [layers, E]."""
    counts = []
    for block in layers_of_experts(model):
        chosen = block.router_logits[real.flatten()].topk(block.gate.top_k).indices  # [R, K]
        counts.append(torch.bincount(chosen.flatten(), minlength=block.gate.num_experts))
    return torch.stack(counts)
