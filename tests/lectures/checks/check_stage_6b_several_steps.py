"""Exercise 6b: on tape, where a new tensor is not noticed and nobody may ask, the tokens are those of stage 5."""

import random
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from stages.core import Event, SamplingParams
from stages.stage_5_continuous_batching import ContinuousBatchingEngine
from stages.stage_6_cuda_graphs import Rows
from tools.pictures.decode_profile import TapeGraph

SMALL: dict[str, Any] = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def taped(answers: ModuleType, model: str, num_steps: int, **more: Any) -> tuple[Any, list[int]]:
    """The engine with every bucket on tape before a request comes, and the buckets that it replays from now on."""
    engine = answers.SeveralStepsEngine(model, num_steps=num_steps, **SMALL | more)
    engine.graphs = {bucket: TapeGraph(partial(engine.decode_step, bucket)) for bucket in engine.buckets}
    replays: list[int] = []
    original = engine.replay

    def replay(bucket: int, batch: list[Any]) -> list[list[int]]:
        replays.append(bucket)
        tokens: list[list[int]] = original(bucket, batch)
        return tokens

    engine.replay = replay
    return engine, replays


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(300, 1000) for _ in range(length)] for length in lengths]


def greedy(max_tokens: int, ignore_eos: bool = True) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)


def test_the_input_memory_moves_on_by_a_token(answers: ModuleType) -> None:
    memory = torch.zeros(3 * (5 + 3), dtype=torch.int64)
    rows = Rows.of(memory, 3)
    rows.positions.copy_(torch.tensor([2, 3, 0]))
    rows.context_lens.copy_(torch.tensor([3, 4, 1]))
    rows.slots.copy_(torch.tensor([22, 27, 36]))
    rows.block_tables.copy_(torch.tensor([[5, 9, 9], [6, 1, 9], [9, 9, 9]]))  # the last row is padding, in block 9
    answers.advance(rows, torch.tensor([70, 71, 72]), 4)
    rows = Rows.of(memory, 3)
    assert rows.input_ids.tolist() == [70, 71, 72], "in the memory itself, not in new tensors"
    assert rows.positions.tolist() == [3, 4, 1] and rows.context_lens.tolist() == [4, 5, 2]
    assert rows.slots.tolist() == [23, 4, 37], "the second row goes on in its next block, padding stays in its own"
    assert rows.block_tables.tolist() == [[5, 9, 9], [6, 1, 9], [9, 9, 9]]


@pytest.mark.parametrize("num_steps", [1, 3, 4])
def test_the_same_tokens_with_fewer_replays(answers: ModuleType, story_model: str, num_steps: int) -> None:
    prompts = prompts_of(5, 1, 7)
    expected = ContinuousBatchingEngine(story_model, **SMALL).generate(prompts, greedy(13))
    engine, replays = taped(answers, story_model, num_steps)
    assert engine.generate(prompts, greedy(13)) == expected
    assert replays == [4] * (12 // num_steps), "one token comes from the prompts, twelve from replays"
    print(f"{num_steps} steps recorded: the CPU is asked {len(replays)} times for 12 tokens each")


def test_requests_join_and_leave_and_blocks_run_out(answers: ModuleType, story_model: str) -> None:
    prompts = prompts_of(3, 9, 2, 6, 1, 4)
    params = [greedy(n) for n in (11, 5, 14, 1, 8, 2)]
    for num_blocks in (40, 7):
        expected = ContinuousBatchingEngine(story_model, **SMALL | {"num_blocks": num_blocks}).generate(prompts, params)
        engine, replays = taped(answers, story_model, 3, num_blocks=num_blocks)
        assert engine.generate(prompts, params) == expected
        assert replays and len(engine.pool.free_list) == num_blocks


def test_an_end_in_the_middle_of_a_replay(answers: ModuleType, story_model: str) -> None:
    [text] = ContinuousBatchingEngine(story_model, **SMALL).generate(prompts_of(4), greedy(9))
    end = next(i for i in range(2, 9) if text[i] not in text[:i] and i % 4 != 0)
    engine, replays = taped(answers, story_model, 4)
    engine.eos_token_ids = frozenset({text[end]})
    assert engine.generate(prompts_of(4), greedy(9, ignore_eos=False)) == [text[: end + 1]]
    assert replays and len(engine.pool.free_list) == SMALL["num_blocks"]
    # What was computed behind the end must not be found by the next request
    assert engine.generate([prompts_of(4)[0] + text[:end]], greedy(1)) == [[text[end]]]


def test_padding_writes_to_the_scratch_block_only(answers: ModuleType, story_model: str) -> None:
    engine, replays = taped(answers, story_model, 4)
    taken: set[int] = set()

    def listen(event: Event) -> None:
        taken.update(event.get("taken", ()))

    engine.trace.on_event = listen
    for cache in (engine.cache.k, engine.cache.v):
        cache.fill_(7.0)
    engine.generate(prompts_of(2, 3, 4), greedy(9))
    assert replays == [4, 4]
    untouched = sorted(set(range(SMALL["num_blocks"])) - taken)
    assert len(untouched) > 20
    for cache in (engine.cache.k, engine.cache.v):
        assert (cache[:, untouched] == 7.0).all()
        assert (cache[:, engine.scratch_block] != 7.0).any()
