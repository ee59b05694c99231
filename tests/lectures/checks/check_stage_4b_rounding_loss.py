"""Exercise 4b: the estimate says what stage 4 really finds."""

import random
from types import ModuleType

import pytest

from stages.core import Event, SamplingParams
from stages.stage_4_prefix_caching import PrefixCachingEngine


def related_prompts(seed: int) -> list[list[int]]:
    """Prompts that often begin as an earlier one does, some of them equal to one."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(12):
        old = rng.choice(prompts) if prompts else []
        kept = old[: rng.randrange(len(old) + 1)]
        prompts.append(kept + [rng.randrange(300, 1000) for _ in range(rng.randrange(1, 20))])
    return [*prompts, prompts[3], prompts[3]]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_it_agrees_with_the_engine(answers: ModuleType, story_model: str, block_size: int) -> None:
    prompts = related_prompts(block_size)
    events: list[Event] = []
    engine = PrefixCachingEngine(story_model, block_size=block_size, num_blocks=2048, on_event=events.append)
    for prompt in prompts:
        engine.generate([prompt], SamplingParams(temperature=0, max_tokens=1))
    assert answers.cached_tokens(prompts, block_size) == [e["cached"] for e in events if e["type"] == "admitted"]


def test_one_token_is_always_computed(answers: ModuleType) -> None:
    assert answers.cached_tokens([[1, 2, 3, 4]] * 2, 2) == [0, 2]
    assert answers.cached_tokens([[1, 2, 3, 4]] * 2, 1) == [0, 3]


def test_what_is_lost(answers: ModuleType) -> None:
    shared = list(range(50))
    prompts = [[*shared, 101, 102], [*shared, 201, 202, 203], [7, 8]]
    assert answers.lost_to_rounding(prompts, 16) == pytest.approx(2 / 107)
    assert answers.lost_to_rounding(prompts, 64) == pytest.approx(50 / 107)
    assert answers.lost_to_rounding(prompts, 1) == 0
