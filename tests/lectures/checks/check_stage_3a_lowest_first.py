"""Exercise 3a: the promises of stage 3's pool, and one more."""

import random
from types import ModuleType

from stages.core import Event, SamplingParams, Sequence
from stages.stage_3_paged_blocks import PagedEngine

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def sequence(request: int = 0) -> Sequence:
    return Sequence(request, [1], 1, GREEDY, 0)


def test_the_lowest_go_first_and_come_back(answers: ModuleType) -> None:
    pool = answers.LowestFirstPool(num_blocks=6, block_size=4)
    a, b, c = sequence(), sequence(), sequence()
    assert pool.allocate(a, 8) and pool.allocate(b, 5) and a.block_table + b.block_table == [0, 1, 2, 3]
    assert sorted(pool.release(a)) == [0, 1] and a.block_table == []
    assert pool.allocate(c, 9) and c.block_table == [0, 1, 4], "the lowest that are free: 0, 1 and 4"
    assert pool.allocate(b, 9) and b.block_table == [2, 3, 5], "what a sequence has stays in front"


def test_all_or_nothing(answers: ModuleType) -> None:
    pool = answers.LowestFirstPool(num_blocks=2, block_size=4)
    a = sequence()
    assert not pool.allocate(a, 9) and a.block_table == []
    assert pool.allocate(a, 8) and not pool.allocate(a, 9) and a.block_table == [0, 1]


def test_no_more_is_touched_than_was_ever_in_use_at_once(answers: ModuleType) -> None:
    rng = random.Random(0)
    pool = answers.LowestFirstPool(num_blocks=400, block_size=4)
    running: list[Sequence] = []
    most = highest = 0
    for i in range(1000):
        if running and rng.random() < 0.5:
            pool.release(running.pop(rng.randrange(len(running))))
        else:
            running.append(sequence(i))
            assert pool.allocate(running[-1], rng.randrange(1, 30))
        taken = [block for seq in running for block in seq.block_table]
        assert len(set(taken)) == len(taken), "a block with two owners"
        most, highest = max(most, len(taken)), max([highest, *taken])
    assert highest == most - 1 < 399


def test_the_text_is_the_same_in_less_memory(answers: ModuleType, story_model: str) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(300, 1000) for _ in range(rng.randrange(4, 40))] for _ in range(6)]
    outputs, touched = [], []
    for engine_class in (PagedEngine, answers.LowestFirstEngine):
        events: list[Event] = []
        engine = engine_class(story_model, num_blocks=64, block_size=4, max_num_seqs=2, on_event=events.append)
        outputs.append(engine.generate(prompts, GREEDY))
        touched.append(len({block for e in events if e["type"] == "blocks" for block in e["taken"]}))
    assert outputs[0] == outputs[1]
    print(f"blocks touched: {touched[0]} in stage 3, {touched[1]} with the lowest first")
    assert touched[1] < touched[0]
