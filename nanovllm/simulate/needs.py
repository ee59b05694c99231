"""What a step of a model cannot do without: bytes to read and operations to do, counted from its config.json.

Torch-free, so that a model can be simulated where it could never be loaded. The benchmarks' rooflines count here too.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from nanovllm.models.checkpoint import read_json

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Those of models/config.py that have no experts, and no sliding window unless it is switched on; it imports torch, and
# a test compares the two
KINDS = "llama", "qwen2", "qwen3"


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

    def share(self, ranks: int) -> Self:
        """What each of so many ranks has: see models/sharding.py.

        Raises ValueError if the model cannot be cut into that many parts.
        """
        heads, kv_heads, neurons = self.num_attention_heads, self.num_key_value_heads, self.intermediate_size
        if heads % ranks or neurons % ranks or (kv_heads % ranks and ranks % kv_heads):
            raise ValueError(
                f"tensor_parallel_size={ranks} does not fit a model of {heads} heads, {kv_heads} key/value heads and "
                f"{neurons} neurons; choose a number that divides all three"
            )
        return replace(
            self,
            num_attention_heads=heads // ranks,
            num_key_value_heads=max(1, kv_heads // ranks),
            intermediate_size=neurons // ranks,
            vocab_size=-(-self.vocab_size // ranks),
        )

    @property
    def num_all_reduces(self) -> int:
        """Sums over the ranks in a step: behind the embedding, and behind attention and MLP of each layer."""
        return 2 * self.num_hidden_layers + 1

    @property
    def num_matrix_parameters(self) -> int:
        """Of the matrices of all layers."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        return self.num_hidden_layers * self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)

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

    Raises ValueError for a file without the numbers, and for a model_type that is not counted here. Mixtures of experts
    are not: which of their weights a step reads depends on its tokens. Nor are sliding windows: a decode is counted as
    if every layer read the whole context.
    """
    raw = read_json(path / "config.json")
    if raw.get("model_type") not in KINDS:
        known = ", ".join(KINDS)
        raise ValueError(
            f"{path / 'config.json'}: model_type {raw.get('model_type')!r} is not supported; choose a model of {known}"
        )
    if raw.get("quantization_config") is not None:
        raise ValueError(
            f"{path / 'config.json'}: quantization_config is not supported; choose the same model in 16 bits"
        )
    if raw.get("use_sliding_window"):
        raise ValueError(f"{path / 'config.json'}: use_sliding_window is not supported; choose a model without windows")
    try:
        hidden, heads, kind = raw["hidden_size"], raw["num_attention_heads"], raw["model_type"]
        bias = bool(raw.get("attention_bias", False))
        architecture = Architecture(
            vocab_size=raw["vocab_size"],
            hidden_size=hidden,
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or (128 if kind == "qwen3" else hidden // heads),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=kind == "qwen3",
            qkv_bias=bias or kind == "qwen2",
            o_bias=bias and kind != "qwen2",
            mlp_bias=bool(raw.get("mlp_bias", False)) and kind == "llama",
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
        # The embedding is looked up row by row: it is read whole only where it is the output head as well.
        self.weight_bytes = itemsize * (c.num_parameters - (0 if c.tie_word_embeddings else head))
        self.key_bytes = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * itemsize  # of a token
        self.pair_operations = 4 * c.num_hidden_layers * c.num_attention_heads * c.head_dim  # of a query and a key
        self.token_operations, self.sample_operations = 2 * c.num_matrix_parameters, 2 * head
