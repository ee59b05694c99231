"""What follows attention in a layer: an MLP, or the mixture of experts of Mixtral, Qwen2-MoE and Qwen3-MoE.

In a mixture of experts a linear layer, the gate, scores the experts for each token. The token goes through the best few
of them (`layers/experts.py`). In Qwen2-MoE it also goes through a shared expert, as much as a gate of its own allows.
"""

from torch import Tensor, nn

from nanovllm.distributed.group import Group
from nanovllm.layers.experts import Experts, route
from nanovllm.layers.linear import Linear, MergedLinear, PendingAllReduce, SubLayerOutput, gelu_and_mul
from nanovllm.models.config import ModelConfig
from nanovllm.models.moe_config import MoEConfig


class MLP(nn.Module):
    def __init__(self, c: ModelConfig, intermediate_size: int, group: Group | None) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(c.hidden_size, parts, bias=c.mlp_bias, dtype=c.dtype)
        self.down_proj = Linear(intermediate_size, c.hidden_size, bias=c.mlp_bias, dtype=c.dtype, group=group)

    def forward(self, x: Tensor) -> SubLayerOutput:
        return self.down_proj.partial(self.gate_up_proj.gated(x))


class GeluMLP(MLP):
    """The MLP of Gemma. A norm follows before the addition, so that no sum over ranks can be left to the addition."""

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(gelu_and_mul(self.gate_up_proj(x)))
        return down


class MoE(nn.Module):
    """The names of its parts are those of Qwen's checkpoints. Each rank has some neurons of every expert, or some whole
    experts, and some neurons of the shared one."""

    def __init__(self, c: ModelConfig, moe: MoEConfig, group: Group | None) -> None:
        super().__init__()
        self.num_chosen, self.normalise = moe.num_experts_per_tok, moe.norm_topk_prob
        self.gate = Linear(c.hidden_size, moe.num_experts, bias=False, dtype=c.dtype)
        place = (0, 1) if group is None or moe.expert_ranks == 1 else (group.rank, group.size)
        self.experts = Experts(moe.num_own_experts, c.hidden_size, moe.intermediate_size, dtype=c.dtype, place=place)
        self.shared_expert: MLP | None = None
        if moe.shared_intermediate_size:
            self.shared_expert = MLP(c, moe.shared_intermediate_size, group=None)  # its gate comes before the sum
            self.shared_expert_gate = Linear(c.hidden_size, 1, bias=False, dtype=c.dtype)
        self.group = group if group is not None and group.size > 1 else None

    def forward(self, x: Tensor) -> SubLayerOutput:
        """x [T, H] -> [T, H], or what is left to the norm that follows: see `Linear.partial`."""
        routing = route(self.gate.product(x, partial=True), self.num_chosen, normalise=self.normalise)
        if self.shared_expert is None and self.group is None:
            return self.experts(x, routing, partial=True)
        y = self.experts(x, routing)  # [T, H]
        if self.shared_expert is not None:
            shared = self.shared_expert.down_proj(self.shared_expert.gate_up_proj.gated(x))  # [T, H], not in parts
            y = y + self.shared_expert_gate(x).sigmoid() * shared
        if self.group is None:
            return y
        if self.group.can_fuse_all_reduce(tuple(y.shape), y.dtype):
            return PendingAllReduce(y, self.group)
        return self.group.all_reduce(y)
