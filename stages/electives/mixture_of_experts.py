"""Elective: mixture of experts.

What hurts:   a larger MLP knows more, but every token must read and compute all of it.
The idea:     have many smaller MLPs in its place, the experts, and a router, which is one small matrix, to choose a few
              of them for each token (Shazeer et al., 2017). A token and one of its experts are a pair. Sort the pairs
              by expert, and the tokens of an expert are neighbours: one run of the expert serves them all. Then each
              token adds up what its experts said, by the router's weights. All of this is one layer that takes the
              place of the MLP. Scheduler, blocks and attention are those of stage 5, which never notice.
Still hurts:  all experts lie in memory, and a batch of many tokens reads nearly all of them. On a GPU the loop waits
              for the counts and launches small kernels; the engine has large ones instead (nanovllm/kernels/moe).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from stages.checkpoint import find_checkpoint, load_model, read_json
from stages.core import OnEvent, Trace, check_options
from stages.model import MLP, ModelConfig, Transformer
from stages.stage_3_paged_blocks import PagedKVCache
from stages.stage_4_prefix_caching import PrefixCachingPool
from stages.stage_5_continuous_batching import ContinuousBatchingEngine, Scheduler


@dataclass(frozen=True)
class ExpertConfig:
    """What config.json of a Qwen3-MoE says beside a dense model's numbers (the names are Hugging Face's)."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int  # neurons of an expert
    norm_topk_prob: bool  # whether the weights of a token's experts are divided by their sum
    mlp_only_layers: frozenset[int]  # layers that have a dense MLP all the same


def read_expert_config(path: Path) -> ExpertConfig:
    """Raises ValueError for numbers that are missing or make no sense."""
    raw = read_json(path / "config.json")
    raw |= {"num_experts": raw.get("num_experts", raw.get("num_local_experts"))}  # the second is transformers 5's
    names = "num_experts", "num_experts_per_tok", "moe_intermediate_size"
    bad = [f"{name}={raw.get(name)!r}" for name in names if type(raw.get(name)) is not int or raw[name] < 1]
    if bad:
        raise ValueError(f"{path}: config.json of a mixture of experts needs positive numbers; got {', '.join(bad)}")
    if raw["num_experts_per_tok"] > raw["num_experts"]:
        raise ValueError(
            f"{path}: num_experts_per_tok {raw['num_experts_per_tok']} is more than num_experts {raw['num_experts']}"
        )
    step, named = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    dense = {layer for layer in range(raw["num_hidden_layers"]) if layer in named or (layer + 1) % step}
    numbers = {name: raw[name] for name in names}
    return ExpertConfig(
        **numbers, norm_topk_prob=bool(raw.get("norm_topk_prob", False)), mlp_only_layers=frozenset(dense)
    )


def route(logits: Tensor, num_chosen: int, norm: bool) -> tuple[Tensor, Tensor]:
    """Which experts each token goes to: logits [T, E] -> their weights [T, K] in float32, and their indices [T, K]."""
    # exercise moe.1: softmax over all experts, in float32. The most likely num_chosen are chosen, and their weights are
    #   their probabilities; with `norm` divided by their sum, so that the weights of each token sum to one.
    probabilities = logits.float().softmax(dim=-1)  # [T, E]
    weights, experts = probabilities.topk(num_chosen, dim=-1)  # [T, K] each
    if norm:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts
    # end exercise


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, list[int]]:
    """The numbers of all pairs, sorted by their experts: experts [T, K] -> [T * K]. Also a list of how many pairs
    each expert has, [E].

    A pair is a token and one of its experts. Pair p is choice p % K of token p // K.
    """
    # exercise moe.2: lay the experts of all pairs end to end, and sort the pairs by them (argsort, stable, so that an
    #   expert has its tokens in their order). The second result has a count for every expert, 0 where nobody chose it.
    chosen = experts.flatten()  # [T * K], the expert of each pair
    order = chosen.argsort(stable=True)  # [T * K], pairs
    counts = chosen.bincount(minlength=num_experts)  # [E]
    return order, counts.tolist()
    # end exercise


def combine(answers: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """What each token gets: answers [T * K, H], row i for pair order[i], and weights [T, K] by token -> [T, H]."""
    # exercise moe.3: row i of `answers` is of pair order[i]: put each where its pair was before the sort, so that the K
    #   answers of a token are neighbours. Multiply by the weights, in the dtype of the answers, and sum over the K.
    by_pair = torch.empty_like(answers)
    by_pair[order] = answers  # [T * K, H]
    by_token = by_pair.unflatten(0, weights.shape)  # [T, K, H]
    return (by_token * weights[:, :, None].to(answers.dtype)).sum(dim=1)
    # end exercise


class MixtureOfExperts(nn.Module):
    """What a layer has in the place of its MLP."""

    def __init__(self, c: ModelConfig, e: ExpertConfig) -> None:
        super().__init__()
        self.num_chosen, self.norm = e.num_experts_per_tok, e.norm_topk_prob
        self.gate = nn.Linear(c.hidden_size, e.num_experts, bias=False)  # the router, as checkpoints call it
        self.experts = nn.ModuleList(
            MLP(replace(c, intermediate_size=e.moe_intermediate_size)) for _ in range(e.num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]. An expert without tokens is not even read."""
        weights, experts = route(self.gate(x), self.num_chosen, self.norm)  # [T, K] each
        order, counts = sort_by_expert(experts, len(self.experts))
        parts = x[order // self.num_chosen].split(counts)  # of each expert, [its tokens, H]
        answers = [expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)]
        return combine(torch.cat(answers), order, weights)


def build_mixture(c: ModelConfig, e: ExpertConfig) -> Transformer:
    """A dense model whose MLPs make way for experts, in all layers but those that are to keep theirs."""
    model = Transformer(c)
    for i, layer in enumerate(model.layers):
        if i not in e.mlp_only_layers:
            layer.register_module("mlp", MixtureOfExperts(c, e))
    return model


class MixtureOfExpertsEngine(ContinuousBatchingEngine):
    """Stage 5 for models of the type qwen3_moe, such as "Qwen/Qwen3-30B-A3B"."""

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
        attention: Literal["gather", "triton"] = "gather",
    ) -> None:
        sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        check_options(block_size=block_size, num_blocks=num_blocks, **sizes, attention=attention)
        path = find_checkpoint(model)
        self.model, self.config, self.eos_token_ids, _ = load_model(
            path,
            device=device,
            dtype=dtype,
            model_types=("qwen3_moe",),
            build=lambda config: build_mixture(config, read_expert_config(path)),
        )
        self.device, self.trace, self.attention = torch.device(device), Trace(on_event), attention
        self.pool = PrefixCachingPool(num_blocks, block_size)
        self.cache = PagedKVCache(self.config, num_blocks, block_size, self.device)
        self.scheduler = Scheduler(self.pool, max_num_seqs, max_num_batched_tokens, self.trace)
