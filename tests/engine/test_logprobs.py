"""Log-probabilities on their way to the caller: nothing is made of them before they are read."""

import copy
import gc
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain

import pytest
import torch

from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.logprobs import GrowingLogprobs, OutputLogprobs
from nanovllm.engine.plan import StepPlan, StepResult, TokenLogprobs
from nanovllm.outputs import CompletionOutput, Logprob
from nanovllm.runner.step_output import StepOutput
from nanovllm.sampling.logprobs import TopLogprobs, top_logprobs
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.test_scheduler_cost import NullExecutor, NullHandle

ROWS, VOCAB = 32, 100


def entry(chosen: int, found: TokenLogprobs) -> dict[int, Logprob]:
    return {token: Logprob(value, rank, str(chosen)) for token, (value, rank) in found.items()}


def some(n: int) -> Iterator[tuple[int, TokenLogprobs]]:
    return ((i, {i: (-0.5 * i, 1), i + 1: (-0.25, 2)}) for i in range(n))


def grown(n: int, entry_of: Callable[[int, TokenLogprobs], dict[int, Logprob]] = entry) -> GrowingLogprobs:
    growing = GrowingLogprobs(entry_of)
    for chosen, found in some(n):
        growing.add([chosen], [found])
    return growing


def test_an_output_is_read_like_a_list() -> None:
    found, expected = OutputLogprobs(grown(5)), [entry(*one) for one in some(5)]
    assert found == expected and expected == found and found != expected[:4] and found == OutputLogprobs(grown(5))
    assert [*found] == expected and len(found) == 5 and repr(found) == repr(expected)
    assert found[2] == expected[2] and found[-1] == expected[-1] and found[1:4] == expected[1:4]
    assert found[::-2] == expected[::-2] and expected[1] in found
    for wrong in (5, -6):
        with pytest.raises(IndexError):
            found[wrong]
    assert found[3][4].logprob == -0.25 and found[3][3].rank == 1
    assert not OutputLogprobs(grown(0))


def test_copies_are_lists() -> None:
    output = CompletionOutput(0, "", [0, 1, 2], logprobs=OutputLogprobs(grown(3)))
    for copied in pickle.loads(pickle.dumps(output)), copy.deepcopy(output):
        assert copied == output and type(copied.logprobs) is list
    assert asdict(output)["logprobs"][1][1].logprob == -0.5


def test_an_output_does_not_grow() -> None:
    growing = grown(0)
    outputs = []
    for chosen, found in some(6):
        growing.add([chosen], [found])
        outputs.append(OutputLogprobs(growing))
    for i in (3, 0, 5, 1, 4, 2):
        assert outputs[i] == [entry(*one) for one in some(i + 1)]


def test_each_entry_is_made_once_and_in_order_whoever_reads() -> None:
    made: list[int] = []

    def slowly(chosen: int, found: TokenLogprobs) -> dict[int, Logprob]:
        time.sleep(0)  # lets another reader go on
        made.append(chosen)
        return entry(chosen, found)

    growing = grown(300, slowly)
    assert made == []
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda _: list(OutputLogprobs(growing)), range(16)))
    assert made == [*range(300)] and all(one == read[0] for one in read)


def test_a_row_is_a_mapping_of_what_was_found() -> None:
    """The sampled token is one of the likeliest in some rows and not in others, and rows want different numbers."""
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
    sampled = torch.cat((logits[:4].float().argmax(-1), torch.arange(40, 44)))
    wanted = [0, 3, None, 5, 0, 3, None, 5]
    columns = top_logprobs(logits, sampled, 5)
    for row, n, found in zip(range(8), wanted, columns.per_row(wanted), strict=True):
        assert (found is None) == (n is None)
        if found is None or n is None:
            continue
        ids, values = columns.token_ids[row].tolist(), columns.values[row].tolist()
        expected = {ids[0]: (values[0], int(columns.ranks[row]))}
        expected |= {ids[i]: (values[i], i) for i in range(1, n + 1) if ids[i] != ids[0]}
        assert found == expected and list(found) == list(expected) and len(found) == len(expected)
        assert [found[token] for token in expected] == list(expected.values()) and -1 not in found


class Handle(NullHandle):
    """What the executor makes of a step: real log-probabilities of made-up columns."""

    columns = TopLogprobs(torch.randint(VOCAB, (ROWS, 6)), -torch.rand(ROWS, 6), torch.randint(1, VOCAB, (ROWS,)))

    def result(self) -> StepResult:
        keys = [s.key for s in self.plan.scheduled if s.sample]
        some = TopLogprobs(*(column[: len(keys)] for column in self.columns))
        output = StepOutput(some.token_ids[:, 0], None, [1] * len(keys), some, [5] * len(keys))
        return StepResult(dict(zip(keys, output.read(), strict=True)))


class Executor(NullExecutor):
    def submit(self, plan: StepPlan) -> Handle:
        return Handle(plan)


@pytest.mark.slow
def test_unread_log_probabilities_are_no_burden_to_garbage_collections() -> None:
    """A collection looks at every object that holds others, while the GPU waits: one per token, and not one for each of
    its log-probabilities."""
    config = EngineConfig(num_kv_blocks=600, kvcache_block_size=16, max_model_len=400, max_num_seqs=ROWS)
    engine = LLMEngine(Executor(), config, vocab_size=VOCAB)
    params = SamplingParams(logprobs=5, max_tokens=50, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    for i in range(ROWS):
        engine.add_request(str(i), [1, 2, 3], params)
    engine.step()
    gc.collect()
    before = len(gc.get_objects())
    outputs = list(chain.from_iterable(engine.step() for _ in range(50)))
    gc.collect()
    assert len(outputs) == ROWS and (len(gc.get_objects()) - before) / (ROWS * 50) < 1.5
    found = outputs[0].outputs[0]
    assert found.logprobs is not None and len(found.logprobs) == 50
    chosen = [entry[token].logprob for entry, token in zip(found.logprobs, found.token_ids, strict=True)]
    assert found.cumulative_logprob == pytest.approx(sum(chosen))
