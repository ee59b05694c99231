"""A stand-in for the model under which the tokens themselves prove that every cache slot was right.

*Shadow KV*: the value of a token is a vector that is zero but for its position, where it holds its id. Queries are
zero, so attention is a plain mean of the values that a query sees, from which the whole prefix can be read back, token
by token. The next token is a hash of that prefix. One slot that is stale, swapped, missing or someone else's, one key
too many or too few, and the tokens differ from `continuation`, which never saw a cache. A step takes well under a
millisecond, so thousands of random batches can be tried.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from tests.weights import lively_qwen3

VOCAB = 64
LONGEST = 128  # positions, one a dimension of the head
EOS = frozenset({VOCAB - 2, VOCAB - 1})


def shadow_checkpoint(directory: Path) -> Path:
    """A checkpoint of the shape that the shadow needs; its weights are never used."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    return lively_qwen3(directory, **shape, num_hidden_layers=1, head_dim=LONGEST, vocab_size=VOCAB)


@lru_cache(maxsize=100_000)
def scores(prefix: tuple[int, ...]) -> Tensor:
    """The logits [V] of the token after `prefix`, a pure function of every token of it."""
    seed = xxhash.xxh64_intdigest(",".join(map(str, prefix)).encode())
    return 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def continuation(prompt: list[int], max_tokens: int, ignore_eos: bool = False) -> list[int]:
    """What a right engine answers, greedily."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(int(scores(tuple(tokens)).argmax()))
        if tokens[-1] in EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


class ShadowModel:
    """Takes the place of `engine.model`."""

    def __init__(self) -> None:
        self.num_tokens = 0

    @classmethod
    def on(cls, engine: Any) -> "ShadowModel":
        engine.model = cls()
        return engine.model

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """-> hidden [T, LONGEST + 1]: for each token the prefix that it sees, and its position."""
        self.num_tokens += len(input_ids)
        rows = torch.arange(len(input_ids))
        values = torch.zeros(len(input_ids), 1, LONGEST)  # [T, Hkv, D]
        values[rows, 0, positions] = input_ids.float() + 1
        nothing = torch.zeros_like(values)
        mean = attend(0, nothing, nothing, values)[:, 0]  # [T, D]
        return torch.cat((mean * (positions + 1)[:, None], positions[:, None]), dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Raises AssertionError if a sampled token did not see exactly one token at each position up to its own."""
        rows = []
        for row in hidden:
            position = int(row[-1])
            seen = row[:-1].round().long().tolist()
            prefix = [code - 1 for code in seen[: position + 1]]
            exact = bool(((row[:-1] - row[:-1].round()).abs() < 0.01).all())
            if not exact or -1 in prefix or any(seen[position + 1 :]):
                raise AssertionError(f"the token at position {position} sees {row[: position + 3].tolist()} (ids + 1)")
            rows.append(scores(tuple(prefix)))
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)
