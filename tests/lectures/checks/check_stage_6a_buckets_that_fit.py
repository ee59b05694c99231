"""Exercise 6a: counted as stage 6 replays, by hand, against all choices, and in an engine that records these sizes."""

import random
from collections import Counter
from itertools import combinations
from types import ModuleType
from typing import Any

import pytest

from stages.core import Event, SamplingParams
from stages.stage_6_cuda_graphs import CUDAGraphEngine, bucket_ladder

SEATS = 11


def served(model: str, buckets: list[int] | None = None, **options: Any) -> tuple[list[list[int]], list[Event], Any]:
    """Eighteen requests in eleven seats -> their tokens, the events, and for each replay (sequences, rows)."""
    rng = random.Random(5)
    prompts = [[rng.randrange(300, 1000) for _ in range(rng.randrange(1, 12))] for _ in range(18)]
    params = [SamplingParams(temperature=0, max_tokens=rng.randrange(1, 20), ignore_eos=True) for _ in prompts]
    events: list[Event] = []
    engine: Any = CUDAGraphEngine(model, max_num_seqs=SEATS, num_blocks=48, on_event=events.append, **options)
    if buckets is not None:
        engine.buckets = buckets
        engine.graphs = engine.record()
    replays: list[tuple[int, int]] = []
    original = engine.replay

    def replay(bucket: int, batch: list[Any]) -> list[int]:
        replays.append((len(batch), bucket))
        tokens: list[int] = original(bucket, batch)
        return tokens

    engine.replay = replay
    return engine.generate(prompts, params), events, replays


@pytest.mark.parametrize("budget", [512, 7], ids=lambda budget: f"budget of {budget}")
def test_it_counts_the_steps_that_are_replayed(answers: ModuleType, story_model: str, budget: int) -> None:
    _, events, replays = served(story_model, max_num_batched_tokens=budget)
    counts = answers.batch_sizes(events)
    assert counts == Counter(size for size, _ in replays)
    assert answers.padded_rows(counts, bucket_ladder(SEATS)) == sum(rows - size for size, rows in replays)


def test_padding_by_hand(answers: ModuleType) -> None:
    assert answers.padded_rows({3: 10, 4: 1, 5: 2}, [1, 2, 4, 8]) == 10 * 1 + 2 * 3
    assert answers.padded_rows({}, [4]) == 0
    assert answers.padded_rows({1: 2, 4: 7}, [4]) == 6


def test_no_other_choice_has_less_padding(answers: ModuleType) -> None:
    rng = random.Random(0)
    for _ in range(60):
        largest, num_buckets = rng.randrange(1, 12), rng.randrange(1, 6)
        counts = {size: rng.choice([0, 1, 3, 30]) for size in range(1, largest + 1) if rng.random() < 0.7}
        found = answers.best_buckets(counts, num_buckets, largest)
        assert found == sorted(set(found)) and found[-1] == largest and found[0] >= 1 and len(found) <= num_buckets
        least = min(
            answers.padded_rows(counts, [*below, largest])
            for n in range(min(num_buckets, largest))
            for below in combinations(range(1, largest), n)
        )
        assert answers.padded_rows(counts, found) == least, f"{found} for {counts}, {num_buckets} recordings"


def test_it_is_found_without_trying_all(answers: ModuleType) -> None:
    rng = random.Random(1)
    counts = {size: rng.randrange(100) for size in range(1, 257, 2)}
    padding = [answers.padded_rows(counts, answers.best_buckets(counts, n, 256)) for n in (2, 10, 20)]
    assert padding == sorted(padding, reverse=True) and len(set(padding)) == 3


def test_the_text_is_the_same_with_less_padding(answers: ModuleType, story_model: str) -> None:
    outputs, events, replays = served(story_model)
    fitted = answers.best_buckets(answers.batch_sizes(events), 5, SEATS)
    again, _, fewer = served(story_model, fitted)
    assert again == outputs
    before, after = (sum(rows - size for size, rows in steps) for steps in (replays, fewer))
    print(f"rows of padding: {before} with {bucket_ladder(SEATS)}, {after} with {fitted}")
    assert after < before
