"""What the tests ask engines for: prompts, parameters, a geometry that hurts, and a model that fails on demand."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stages.core import SamplingParams

# Small blocks, few seats and a small budget: many borders, a queue and chunks in every test
TIGHT: dict[str, Any] = {"block_size": 4, "num_blocks": 96, "max_num_seqs": 3, "max_num_batched_tokens": 10}


def greedy(max_tokens: int, ignore_eos: bool = False) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(500) for _ in range(length)] for length in lengths]


PROMPTS = random_prompts(1, 4, 5, 8, 13, 24)  # around the borders of blocks of 4 and chunks of 10


def story_prompts(path: Path) -> list[list[int]]:
    """The openings of 20 stories that the embedded model has not seen, in its tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = json.loads((Path(__file__).parents[1] / "data" / "story_prompts.json").read_text(encoding="utf-8"))
    return [tokenizer.encode(text) for text in texts["prompts"]]


class Failing:
    """A model that raises in its last layer, with the keys and values of the others written already."""

    def __init__(self, model: Any, fatal_step: int, error: type[BaseException]) -> None:
        self.model, self.error = model, error
        self.steps_left = fatal_step

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Callable[..., torch.Tensor]) -> Any:
        self.steps_left -= 1

        def fail_in_last_layer(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
            if self.steps_left == 0 and layer == self.model.config.num_hidden_layers - 1:
                raise self.error("planted")
            return attend(layer, *qkv)

        return self.model(input_ids, positions, fail_in_last_layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
