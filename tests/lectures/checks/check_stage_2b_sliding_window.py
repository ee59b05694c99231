"""Exercise 2b: against a window that is written out, token by token, without a cache."""

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stages.core import SamplingParams
from stages.stage_1_naive import NaiveEngine
from stages.stage_2_kv_cache import KVCacheEngine

PROMPTS = [list(range(400, 420)), [500, 501, 502]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def windowed_text(model: str, prompt: list[int], window: int) -> list[int]:
    """The whole text through the model for every token, each token attending to its window."""
    engine = NaiveEngine(model)
    tokens = list(prompt)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        here = torch.arange(len(tokens))
        mask = (here[None] <= here[:, None]) & (here[None] > here[:, None] - window)  # [T, T]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, T, D]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    with torch.inference_mode():
        for _ in range(GREEDY.max_tokens):
            hidden = engine.model(torch.tensor(tokens), torch.arange(len(tokens)), attend)
            tokens.append(int(engine.model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("window", [1, 5])
def test_every_token_sees_its_window(answers: ModuleType, story_model: str, window: int) -> None:
    outputs = answers.WindowedEngine(story_model, window=window).generate(PROMPTS, GREEDY)
    for prompt, tokens in zip(PROMPTS, outputs, strict=True):
        assert tokens == windowed_text(story_model, prompt, window), f"prompt of {len(prompt)} tokens"


def test_a_window_as_long_as_the_text_changes_nothing(answers: ModuleType, story_model: str) -> None:
    full = KVCacheEngine(story_model).generate(PROMPTS, GREEDY)
    assert answers.WindowedEngine(story_model, window=26).generate(PROMPTS, GREEDY) == full
    assert answers.WindowedEngine(story_model, window=2).generate(PROMPTS, GREEDY) != full
