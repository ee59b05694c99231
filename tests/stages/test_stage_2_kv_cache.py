"""Stage 2's parts: the rectangle of keys and values, and its batch."""

from dataclasses import replace
from pathlib import Path

import torch

from stages.checkpoint import read_config
from tests.oracle_record import Recorder
from tests.stages.requests import greedy, random_prompts
from tests.stages.subject import Subject, since
from tests.weights import lively_qwen3


@since(2, 2)
def test_new_keys_and_values_land_in_their_row_and_column(subject: Subject, checkpoints: Path) -> None:
    config = replace(read_config(lively_qwen3(checkpoints)), dtype=torch.float32)
    cache = subject.part("KVCache")(config, 2, 6, torch.device("cpu"))
    k, v = (torch.randn(2, 2, 32) for _ in range(2))  # one new token for each of two rows
    q = torch.randn(2, 4, 32)
    positions = torch.tensor([[3], [1]])
    mask = torch.arange(4) <= positions[:, None, :, None]
    cache.attend(positions, mask, 1, q, k, v)
    assert torch.equal(cache.k[1, 0, 3], k[0]) and torch.equal(cache.k[1, 1, 1], k[1])
    assert torch.equal(cache.v[1, 0, 3], v[0]) and torch.equal(cache.v[1, 1, 1], v[1])
    cache.k[1, 0, 3] = cache.k[1, 1, 1] = cache.v[1, 0, 3] = cache.v[1, 1, 1] = 0
    assert not cache.k.any() and not cache.v.any()  # nothing else was written, in no other layer either


@since(2, 2)
def test_a_row_sees_its_own_past_and_nothing_else(subject: Subject, checkpoints: Path) -> None:
    """Everything that must be invisible is poisoned with NaN or huge values; the answer is that of attention alone."""
    config = replace(read_config(lively_qwen3(checkpoints)), dtype=torch.float32)
    cache = subject.part("KVCache")(config, 2, 6, torch.device("cpu"))
    cache.k.fill_(1e4)
    cache.v.fill_(1e4)
    lengths = [4, 2]
    past = [torch.randn(2, n, 2, 32) for n in lengths]
    for row, kv in enumerate(past):
        cache.k[0, row, : lengths[row]], cache.v[0, row, : lengths[row]] = kv
    positions = torch.tensor([[n - 1] for n in lengths])
    q, k, v = torch.randn(2, 4, 32), *(torch.stack([kv[i, -1] for kv in past]) for i in (0, 1))
    out = cache.attend(positions, torch.arange(4) <= positions[:, None, :, None], 0, q, k, v)
    for row, (keys, values) in enumerate(past):
        for head in range(4):
            weights = (keys[:, head // 2] @ q[row, head] * 32**-0.5).softmax(0)
            torch.testing.assert_close(out[row, head], weights @ values[:, head // 2])


@since(2, 2)
def test_a_token_is_computed_once(subject: Subject, checkpoints: Path) -> None:
    """One prefill of the prompt, then one token a step: that is the whole gain of the cache."""
    engine = subject.engine(lively_qwen3(checkpoints))
    recorder = Recorder.on(engine)
    [prompt] = random_prompts(7)
    [output] = engine.generate([prompt], greedy(5, ignore_eos=True))
    assert [step.input_ids for step in recorder.steps] == [prompt, *([token] for token in output[:-1])]
    assert [step.positions for step in recorder.steps] == [list(range(7)), [7], [8], [9], [10]]


@since(2, 2)
def test_a_batch_waits_for_its_slowest_sequence(subject: Subject, checkpoints: Path) -> None:
    """Static batches of max_num_seqs: that is what still hurts."""
    engine = subject.engine(lively_qwen3(checkpoints), max_num_seqs=2)
    recorder = Recorder.on(engine)
    params = [greedy(n, ignore_eos=True) for n in (2, 6, 3)]
    engine.generate(random_prompts(3, 5, 4), params)
    assert [len(step.input_ids) for step in recorder.steps] == [10, 2, 2, 2, 2, 2, 4, 1, 1]
