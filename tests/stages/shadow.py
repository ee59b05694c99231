"""A stand-in for the model under which the tokens themselves prove that every cache slot was right.

*Shadow KV*: in layer 0 the value of a token is a vector that is zero but for its position, where it holds its id.
Queries are zero, so attention is a plain mean of the values that a query sees, from which the whole prefix can be read
back, token by token. In layer 1 the value holds, at the same place, a hash of that prefix: so a slot whose token is
right but which was computed after another beginning is noticed as well. The next token is a hash of the prefix. One
slot that is stale, swapped, missing or someone else's, one key too many or too few, and the model itself objects.
A step takes about a millisecond, so thousands of random batches can be tried.
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
CODES = 2048  # hashes small enough to survive a mean in float32
WEIGHTS = torch.randint(1, 2**20, (LONGEST,), generator=torch.Generator().manual_seed(0)) | 1
EOS = frozenset({VOCAB - 2, VOCAB - 1})


def shadow_checkpoint(directory: Path) -> Path:
    """A checkpoint of the shape that the shadow needs; its weights are never used."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    return lively_qwen3(directory, **shape, num_hidden_layers=2, head_dim=LONGEST, vocab_size=VOCAB)


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
        """-> hidden [T, 2 * LONGEST + 1]: the prefix that each token sees, the beginnings it sees, its position."""
        self.num_tokens += len(input_ids)

        def see(layer: int, codes: Tensor) -> Tensor:
            """Store a code at each token's place; read back the codes of all that it sees -> [T, LONGEST]."""
            values = torch.zeros(len(codes), 1, LONGEST)  # [T, Hkv, D]
            values[torch.arange(len(codes)), 0, positions] = codes.float()
            nothing = torch.zeros_like(values)
            return attend(layer, nothing, nothing, values)[:, 0] * (positions + 1)[:, None]

        prefix = see(0, input_ids + 1)
        beginnings = see(1, (prefix.round().long() @ WEIGHTS) % CODES + 1)
        return torch.cat((prefix, beginnings, positions[:, None]), dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Raises AssertionError if a sampled token did not see exactly its own prefix, computed as such."""
        rows = []
        for row in hidden:
            position = int(row[-1])
            codes, beginnings = row[:-1].round().long().split(LONGEST)
            prefix = tuple((codes[: position + 1] - 1).tolist())
            sees = f"the token at position {position} sees {row[: position + 3].tolist()} (ids + 1)"
            assert (row - row.round()).abs().max() < 0.05 and min(prefix) >= 0 and not codes[position + 1 :].any(), sees
            expected = (codes * WEIGHTS).cumsum(0) % CODES + 1
            expected[position + 1 :] = 0
            wrong = (beginnings != expected).nonzero().flatten().tolist()
            assert not wrong, f"{sees}, of which {wrong} were computed after another beginning"
            rows.append(scores(prefix))
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)
