"""Exercise 3b: the formula agrees with what the engine takes, and finds the best size."""

import random
from types import ModuleType

import pytest

from stages.core import Event, SamplingParams
from stages.stage_3_paged_blocks import PagedEngine


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_it_wastes_what_the_engine_wastes(answers: ModuleType, story_model: str, block_size: int) -> None:
    rng = random.Random(block_size)
    prompts = [[rng.randrange(300, 1000) for _ in range(rng.randrange(1, 50))] for _ in range(8)]
    params = [SamplingParams(temperature=0, max_tokens=rng.randrange(1, 6), ignore_eos=True) for _ in prompts]
    events: list[Event] = []
    PagedEngine(story_model, num_blocks=1024, block_size=block_size, on_event=events.append).generate(prompts, params)
    taken = sum(len(e["taken"]) for e in events if e["type"] == "blocks")
    # The last token of each is never fed back, so it never gets a slot
    lengths = [len(prompt) + p.max_tokens - 1 for prompt, p in zip(prompts, params, strict=True)]
    assert answers.wasted_slots(lengths, block_size) == taken * block_size - sum(lengths)


def test_both_sides_have_their_price(answers: ModuleType) -> None:
    assert answers.overhead([5, 8], 4, slot_bytes=100) == 3 * 100 + 4 * 4
    assert answers.overhead([5, 8], 1, slot_bytes=100) == 13 * 4
    assert answers.overhead([5, 8], 8, slot_bytes=100, entry_bytes=2) == 3 * 100 + 2 * 2


def test_the_best_size(answers: ModuleType) -> None:
    rng = random.Random(0)
    for _ in range(50):
        lengths = [rng.randrange(1, 2000) for _ in range(20)]
        slot_bytes = rng.choice([1, 8, 64, 1024])
        best = answers.best_block_size(lengths, slot_bytes)
        prices = {2**p: answers.overhead(lengths, 2**p, slot_bytes) for p in range(11)}
        assert best == max(size for size, price in prices.items() if price == min(prices.values()))
    assert answers.best_block_size([1024] * 4, 10) == 1024, "texts that fill their blocks waste nothing"
