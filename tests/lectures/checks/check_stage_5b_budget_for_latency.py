"""Exercise 5b: waits by hand, and in real runs."""

import random
from types import ModuleType
from typing import Any

from stages.core import Event, SamplingParams
from stages.stage_5_continuous_batching import ContinuousBatchingEngine


def scheduled(step: int, request: int, tokens: int) -> Event:
    return {"t": 0.0, "step": step, "type": "scheduled", "request": request, "tokens": tokens, "cached": 0}


def token(step: int, request: int) -> Event:
    return {"t": 0.0, "step": step, "type": "token", "request": request, "ids": [1]}


def test_by_hand(answers: ModuleType) -> None:
    events = [scheduled(1, 0, 5), token(1, 0), scheduled(2, 0, 1), scheduled(2, 1, 7), token(2, 0)]
    assert answers.longest_waits(events) == {0: 8}
    events += [scheduled(3, 1, 3), token(3, 1), scheduled(4, 0, 1), scheduled(4, 1, 1), token(4, 0), token(4, 1)]
    assert answers.longest_waits(events) == {0: 8, 1: 2}
    events += [scheduled(5, 1, 9), scheduled(6, 0, 1), token(6, 0), token(6, 1)]
    assert answers.longest_waits(events) == {0: 10, 1: 10}


def workload(story_model: str) -> Any:
    rng = random.Random(0)
    prompts = [[rng.randrange(300, 1000) for _ in range(n)] for n in (4, 5, 6, 120)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (14, 4, 6, 2)]

    def run(budget: int) -> list[Event]:
        events: list[Event] = []
        engine = ContinuousBatchingEngine(
            story_model, max_num_seqs=3, max_num_batched_tokens=budget, on_event=events.append
        )
        engine.generate(prompts, params)
        return events

    return run


def test_a_promise_is_kept_with_the_largest_budget(answers: ModuleType, story_model: str) -> None:
    run = workload(story_model)
    waits = {budget: max(answers.longest_waits(run(budget)).values()) for budget in (4, 32, 256)}
    print("longest wait by budget:", waits)
    assert waits[4] <= 8 and waits[32] == 32 and waits[256] > 100
    assert answers.largest_budget(run, 40, [256, 4, 32]) == 32
    assert answers.largest_budget(run, 1000, [4, 256]) == 256
    assert answers.largest_budget(run, 1, [4, 32]) is None


def test_not_every_budget_is_tried(answers: ModuleType) -> None:
    tried: list[int] = []

    def run(budget: int) -> list[Event]:
        tried.append(budget)
        return [scheduled(1, 0, 1), token(1, 0), scheduled(2, 0, budget), token(2, 0)]

    assert answers.largest_budget(run, 7, range(1, 10)) == 7
    assert len(tried) <= 4, "a run costs time: begin with the largest, or search by halves"
