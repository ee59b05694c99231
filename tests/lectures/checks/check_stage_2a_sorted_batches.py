"""Exercise 2a: the same tokens in the same order, and fewer through the model."""

import random
from types import ModuleType
from typing import Any

import pytest

from stages.core import SamplingParams, Sequence
from stages.stage_2_kv_cache import KVCacheEngine


def mixed(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Four requests of each of four kinds, well shuffled: the prompt short or long, the output short or long."""
    rng = random.Random(seed)
    kinds = [(prompt, output) for prompt in (3, 24) for output in (2, 9)] * 4
    rng.shuffle(kinds)
    prompts = [[rng.randrange(300, 1000) for _ in range(length)] for length, _ in kinds]
    return prompts, [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in kinds]


def served(engine_class: Any, model: str, prompts: Any, params: Any) -> tuple[list[list[int]], int]:
    """The outputs, and how many tokens went through the model, padding and dead weight included."""
    engine = engine_class(model, max_num_seqs=4)
    given: list[int] = []
    engine.model.register_forward_pre_hook(lambda _, inputs: given.append(len(inputs[0])))
    return engine.generate(prompts, params), sum(given)


def test_the_same_tokens_for_less(answers: ModuleType, story_model: str) -> None:
    prompts, params = mixed(0)
    theirs, before = served(KVCacheEngine, story_model, prompts, params)
    ours, after = served(answers.SortedEngine, story_model, prompts, params)
    assert ours == theirs, "results must come back in the order of the prompts"
    print(f"tokens through the model: {before} before, {after} sorted")
    assert after < 0.7 * before


def test_one_for_all_and_wrong_numbers(answers: ModuleType, story_model: str) -> None:
    engine = answers.SortedEngine(story_model, max_num_seqs=1)
    one = SamplingParams(temperature=0, max_tokens=2)
    prompts = [[400, 401, 402, 403], [500]]
    assert engine.generate(prompts, one) == [engine.generate([p], one)[0] for p in prompts]
    with pytest.raises(ValueError, match="params has 1 entries for 2 prompts"):
        engine.generate(prompts, [one])
    order: list[int] = []

    def run_batch(batch: list[Sequence]) -> None:
        order.append(len(batch[0].token_ids))
        KVCacheEngine.run_batch(engine, batch)

    engine.run_batch = run_batch
    engine.generate(prompts, one)
    assert order == [1, 4], "of two that ask for equally much, the shorter goes first"
