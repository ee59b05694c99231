"""Exercise 1b: stage 1's tokens from as many passes as the longest output has tokens."""

from types import ModuleType
from typing import Any

import torch

from stages.core import SamplingParams, Sequence
from stages.stage_1_naive import NaiveEngine

PROMPTS = [list(range(400, 412)), [500], list(range(600, 605))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True, seed=7),
    SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
]


def served(engine_class: Any, model: str) -> tuple[list[list[int]], list[int]]:
    """The outputs, and how many tokens went into each pass through the model."""
    engine = engine_class(model)
    passes: list[int] = []
    engine.model.register_forward_pre_hook(lambda _, inputs: passes.append(len(inputs[0])))
    return engine.generate(PROMPTS, PARAMS), passes


def test_the_same_tokens_in_fewer_passes(answers: ModuleType, story_model: str) -> None:
    theirs, before = served(NaiveEngine, story_model)
    ours, after = served(answers.TogetherEngine, story_model)
    assert ours == theirs, "a text must get the same tokens beside others as alone"
    print(f"passes: {len(before)} one after another, {len(after)} together; tokens: {sum(before)} and {sum(after)}")
    assert len(after) == 5, "one pass for each token of the longest output"
    assert after == [18, 21, 17, 4, 5], "all tokens of the texts that still run, and no others (no padding)"


@torch.inference_mode()
def test_every_text_begins_at_position_0(answers: ModuleType, story_model: str) -> None:
    engine = answers.TogetherEngine(story_model)
    seen: list[list[int]] = []
    engine.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1].tolist()))
    engine.scores([Sequence(0, [400] * length, length, SamplingParams(), 0) for length in (3, 1, 2)])
    assert seen == [[0, 1, 2, 0, 0, 1]], "rotary embeddings see differences alone, but a table may end"


@torch.inference_mode()
def test_neighbours_cannot_be_seen(answers: ModuleType, story_model: str) -> None:
    engine = answers.TogetherEngine(story_model)

    def text(tokens: list[int]) -> Sequence:
        return Sequence(0, tokens, len(tokens), SamplingParams(), 0)

    mine = text(list(range(700, 709)))
    alone = engine.scores([mine])
    for neighbour in (text([5]), text(list(range(800, 840)))):
        first, last = engine.scores([mine, neighbour]), engine.scores([neighbour, mine])
        torch.testing.assert_close(first[:1], alone, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(last[1:], alone, atol=1e-3, rtol=1e-3)
