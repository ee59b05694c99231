"""What config.json says of a mixture of experts.

The families Mixtral, Qwen2-MoE and Qwen3-MoE differ in the names of the numbers, in what the weights of a token's
experts sum to, in a shared expert, and in layers that have none. All that is data, in `models/families.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

COUNTS = "num_experts", "num_local_experts", "n_routed_experts"  # keys for the number of experts; 0 or null is none


class ExpertKeys(NamedTuple):
    """The keys of config.json in which a family has its numbers, and what is no key but part of the architecture."""

    intermediate_size: str = "moe_intermediate_size"  # of an expert
    shared_intermediate_size: str | None = None  # of the shared expert; None: there is none
    norm_topk_prob: bool | None = None  # None: norm_topk_prob in config.json, False where that is absent
    dense_layers: bool = True  # whether config.json may name layers without experts


@dataclass(frozen=True)
class MoEConfig:
    """The numbers of the layers with experts (the names are Hugging Face's)."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of an expert
    shared_intermediate_size: int  # of the expert that all tokens share; 0: there is none
    norm_topk_prob: bool  # whether the weights of a token's experts are divided by their sum
    dense_layers: frozenset[int]  # layers with a plain MLP in place of the experts
    expert_parallel: bool = False  # whether each rank has whole experts; if not, it has a part of every expert
    expert_ranks: int = 1  # of a rank's share: the ranks among which the experts are divided

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of neurons that ranks share."""
        of_expert = 0 if self.expert_parallel else self.intermediate_size
        return tuple(size for size in (of_expert, self.shared_intermediate_size) if size)

    def divides(self, ranks: int) -> bool:
        """Whether so many ranks can have as many experts each, if they have whole experts."""
        return not (self.expert_parallel and self.num_experts % ranks)

    @property
    def num_own_experts(self) -> int:
        """The experts of a rank."""
        return self.num_experts // self.expert_ranks

    @property
    def neurons_of_token(self) -> int:
        """The neurons that a token goes through in a layer with experts; on a rank with whole experts, on average."""
        return self.num_experts_per_tok * self.intermediate_size // self.expert_ranks + self.shared_intermediate_size

    def share(self, ranks: int) -> Self:
        """What each of so many ranks has: some whole experts, or a part of every expert; and a part of the shared one.

        ranks: as many as divide what they share, see `shard_config`.
        """
        return replace(
            self,
            intermediate_size=self.intermediate_size // (1 if self.expert_parallel else ranks),
            shared_intermediate_size=self.shared_intermediate_size // ranks,
            expert_ranks=ranks if self.expert_parallel else 1,
        )


def has_experts(raw: Mapping[str, Any]) -> bool:
    return any(raw.get(key) for key in COUNTS)


def parse_experts(raw: Mapping[str, Any], keys: ExpertKeys) -> MoEConfig:
    """Raises ValueError for numbers that are missing, or contradict each other."""
    counts = {key: raw[key] for key in COUNTS if raw.get(key) is not None}
    if any(value != number for value in counts.values() for number in counts.values()):
        said = " and ".join(f"{key}={value!r}" for key, value in counts.items())
        raise ValueError(f"{said} contradict each other; keep the number of experts that the weights have")
    numbers = {
        "num_experts": next(iter(counts.values()), None),
        "num_experts_per_tok": raw.get("num_experts_per_tok"),
        keys.intermediate_size: raw.get(keys.intermediate_size),
    }
    if keys.shared_intermediate_size is not None:
        numbers[keys.shared_intermediate_size] = raw.get(keys.shared_intermediate_size)
    bad = [key for key, value in numbers.items() if type(value) is not int or value < 1]
    if bad:
        raise ValueError(f"lacks a positive number for {', '.join(bad)}")
    num_experts, chosen = numbers["num_experts"], numbers["num_experts_per_tok"]
    assert num_experts is not None and chosen is not None  # they are among the positive numbers
    if chosen > num_experts:
        raise ValueError(f"num_experts_per_tok={chosen} is more than the number of experts, {num_experts}; lower it")
    norm_topk_prob = raw.get("norm_topk_prob", False) if keys.norm_topk_prob is None else keys.norm_topk_prob
    if not isinstance(norm_topk_prob, bool):
        raise ValueError(f"norm_topk_prob must be bool; got {norm_topk_prob!r}; mend it, or leave it out")
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        intermediate_size=raw[keys.intermediate_size],
        shared_intermediate_size=0 if keys.shared_intermediate_size is None else raw[keys.shared_intermediate_size],
        norm_topk_prob=norm_topk_prob,
        dense_layers=parse_dense_layers(raw) if keys.dense_layers else frozenset(),
    )


def parse_dense_layers(raw: Mapping[str, Any]) -> frozenset[int]:
    """The layers that `mlp_only_layers` names, and all but every `decoder_sparse_step`-th."""
    step, named = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers")
    if type(step) is not int or step < 1:
        raise ValueError(f"decoder_sparse_step must be a positive number; got {step!r}; mend it, or leave it out")
    named = [] if named is None else named
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise ValueError(f"mlp_only_layers must be a list of layers; got {named!r}; mend it, or leave it out")
    return frozenset(layer for layer in range(raw["num_hidden_layers"]) if layer in named or (layer + 1) % step)
