"""Exercise 5a: who is chosen, and that it sometimes costs less than stage 5's choice and sometimes more."""

import random
from types import ModuleType
from typing import Any

import pytest

from stages.core import Event, SamplingParams, Sequence
from stages.stage_5_continuous_batching import ContinuousBatchingEngine

SMALL: dict[str, Any] = {"block_size": 4, "num_blocks": 14, "max_num_seqs": 4, "max_num_batched_tokens": 32}


def sequence(request: int, computed: int) -> Sequence:
    return Sequence(request, [1] * 9, 9, SamplingParams(), 0, num_computed=computed)


def test_the_cheapest_and_of_equals_the_latest(answers: ModuleType) -> None:
    a, b, c, d = (sequence(i, computed) for i, computed in enumerate((9, 3, 7, 3)))
    assert answers.choose_victim([a, b, c, d]) is d
    assert answers.choose_victim([a, b, c]) is b
    assert answers.choose_victim([a]) is a


def served(engine_class: Any, model: str, seed: int) -> tuple[list[list[int]], list[Event]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(300, 1000) for _ in range(rng.randrange(2, 28))] for _ in range(6)]
    params = [SamplingParams(temperature=0, max_tokens=rng.randrange(4, 24), ignore_eos=True) for _ in prompts]
    events: list[Event] = []
    engine = engine_class(model, on_event=events.append, **SMALL)
    return engine.generate(prompts, params), events


@pytest.mark.parametrize(("seed", "pays"), [(278, True), (28, False)])
def test_the_same_tokens_and_what_they_cost(answers: ModuleType, story_model: str, seed: int, pays: bool) -> None:
    theirs, before = served(ContinuousBatchingEngine, story_model, seed)
    ours, after = served(answers.CheapestVictimEngine, story_model, seed)
    assert ours == theirs
    expected = sum(e["tokens"] for e in after if e["type"] == "scheduled")
    assert answers.tokens_computed(after) == expected
    print(f"workload {seed}: {answers.tokens_computed(before)} tokens in stage 5, {expected} with the cheapest victim")
    assert (expected < answers.tokens_computed(before)) == pays
