"""What a step of a model cannot do without: bytes to read and operations to do, counted from its config.json.

Torch-free, so that a model can be simulated where it could never be loaded. The benchmarks' rooflines count here too.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from nanovllm.models.checkpoint import read_json
from nanovllm.models.families import FAMILIES, shape_of
from nanovllm.models.moe_config import parse_experts

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The families that have no sliding window unless config.json asks for one
KINDS = {
    kind: family
    for kind, family in FAMILIES.items()
    if family.windows is None or family.windows.has_switch or family.windows.default is None
}


@dataclass(frozen=True)
class Architecture:
    """The numbers of a decoder that its parameters and its KV cache follow from (the names are Hugging Face's)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    # Of a mixture of experts; without experts all of these are 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # of an expert
    shared_intermediate_size: int = 0  # of the expert that all tokens share
    num_expert_layers: int = 0  # layers with experts; the others have an MLP

    def share(self, ranks: int) -> Self:
        """What each of so many ranks has: see models/sharding.py.

        Raises ValueError if the model cannot be cut into that many parts.
        """
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        sizes = self.intermediate_size, self.moe_intermediate_size, self.shared_intermediate_size
        if heads % ranks or any(size % ranks for size in sizes) or (kv_heads % ranks and ranks % kv_heads):
            neurons = " and ".join(str(size) for size in sizes if size)
            raise ValueError(
                f"tensor_parallel_size={ranks} does not fit a model of {heads} heads, {kv_heads} key/value heads and "
                f"{neurons} neurons; choose a number that divides all of them"
            )
        return replace(
            self,
            num_attention_heads=heads // ranks,
            num_key_value_heads=max(1, kv_heads // ranks),
            intermediate_size=self.intermediate_size // ranks,
            moe_intermediate_size=self.moe_intermediate_size // ranks,
            shared_intermediate_size=self.shared_intermediate_size // ranks,
            vocab_size=-(-self.vocab_size // ranks),
        )

    @property
    def num_all_reduces(self) -> int:
        """Sums over the ranks in a step: behind the embedding, and behind attention and MLP of each layer."""
        return 2 * self.num_hidden_layers + 1

    @property
    def num_matrix_parameters(self) -> int:
        """Of the matrices of all layers."""
        heads, layers = 2 * self.num_attention_heads + 2 * self.num_key_value_heads, self.num_expert_layers
        dense = self.num_hidden_layers * heads * self.head_dim
        dense += 3 * (self.num_hidden_layers - layers) * self.intermediate_size
        shared = 3 * self.shared_intermediate_size + (self.shared_intermediate_size > 0)  # its gate has one output
        return self.hidden_size * (dense + layers * (self.num_experts + shared)) + self.num_expert_parameters

    @property
    def num_expert_parameters(self) -> int:
        """Of those, the parameters of the experts among which a token chooses."""
        return 3 * self.num_expert_layers * self.num_experts * self.hidden_size * self.moe_intermediate_size

    @property
    def chosen_share(self) -> float:
        """The part of the experts that a token goes through; 0 without experts."""
        return self.num_experts_per_tok / self.num_experts if self.num_experts else 0.0

    @property
    def num_active_parameters(self) -> float:
        """Of the matrices of all layers, those that a token goes through."""
        return self.num_matrix_parameters - (1 - self.chosen_share) * self.num_expert_parameters

    @property
    def num_head_parameters(self) -> int:
        """Of the output head."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All of them; an embedding that is the output head as well counts once."""
        hidden, qkv = self.hidden_size, self.num_attention_heads + 2 * self.num_key_value_heads
        biases = self.qkv_bias * qkv * self.head_dim + self.o_bias * hidden
        biases += self.mlp_bias * (2 * self.intermediate_size + hidden)
        norms = 2 * hidden + self.qk_norm * 2 * self.head_dim
        heads = (1 if self.tie_word_embeddings else 2) * self.num_head_parameters
        return self.num_matrix_parameters + self.num_hidden_layers * (biases + norms) + hidden + heads


def read_architecture(path: Path) -> tuple[Architecture, int]:
    """From the config.json in the directory `path`; and the bytes of a number, by the dtype that config.json names.

    Raises ValueError for a file without the numbers, and for a model_type that is not counted here. Sliding windows are
    not: a decode is counted as if every layer read the whole context.
    """
    raw = read_json(path / "config.json")
    family = KINDS.get(str(raw.get("model_type")))
    if family is None:
        known = ", ".join(KINDS)
        raise ValueError(
            f"{path / 'config.json'}: model_type {raw.get('model_type')!r} is not supported; choose a model of {known}"
        )
    if raw.get("quantization_config") is not None:
        raise ValueError(
            f"{path / 'config.json'}: quantization_config is not supported; choose the same model in 16 bits"
        )
    has_switch = family.windows is None or family.windows.has_switch
    for key in ("use_sliding_window", *(() if has_switch else ("sliding_window",))):
        if raw.get(key):
            raise ValueError(f"{path / 'config.json'}: {key} is not supported; choose a model without windows")
    try:
        architecture = Architecture(**shape_of(raw, family))
        if family.experts is not None:
            moe = parse_experts(raw, family.experts)
            architecture = replace(
                architecture,
                num_experts=moe.num_experts,
                num_experts_per_tok=moe.num_experts_per_tok,
                moe_intermediate_size=moe.intermediate_size,
                shared_intermediate_size=moe.shared_intermediate_size,
                num_expert_layers=architecture.num_hidden_layers - len(moe.dense_layers),
            )
    except KeyError as error:
        raise ValueError(f"{path / 'config.json'} lacks {error}, without which no step can be counted") from None
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return architecture, ITEMSIZES.get(name, 2)


class Needs:
    """What the parts of a step of `model` cannot do without, in bytes to read and operations to do.

    itemsize: bytes of a number.
    """

    def __init__(self, model: Architecture, itemsize: int) -> None:
        c, head = model, model.num_head_parameters
        self.memory_bytes = itemsize * c.num_parameters  # of the weights
        # The embedding is looked up row by row: it is read whole only where it is the output head as well.
        self.weight_bytes = self.memory_bytes - (0 if c.tie_word_embeddings else itemsize * head)
        self.expert_bytes = itemsize * c.num_expert_parameters  # among these: a step reads what its tokens go through
        self.chosen_share = c.chosen_share
        self.key_bytes = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * itemsize  # of a token
        self.pair_operations = 4 * c.num_hidden_layers * c.num_attention_heads * c.head_dim  # of a query and a key
        self.token_operations, self.sample_operations = round(2 * c.num_active_parameters), 2 * head

    def read_bytes(self, num_tokens: int) -> int:
        """Of the weights, the bytes that a step of so many tokens reads.

        If each token chooses k of E experts at random, an expert is chosen by none of T tokens with the probability
        (1 - k / E)^T.
        """
        return self.weight_bytes - round(self.expert_bytes * (1 - self.chosen_share) ** num_tokens)
