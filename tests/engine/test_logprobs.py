"""Log-probabilities on their way to the caller: nothing is made of them before they are read."""

import copy
import gc
import json
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import chain

import pytest
import torch

from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.logprobs import GrowingLogprobs, OutputLogprobs
from nanovllm.engine.plan import StepPlan, StepResult, TokenLogprobs
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprob, logprobs_from
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


def test_an_output_has_a_list() -> None:
    output, expected = CompletionOutput(0, "", [0], logprobs=OutputLogprobs(grown(5))), [entry(*one) for one in some(5)]
    assert output.logprobs == expected and output == CompletionOutput(0, "", [0], logprobs=expected)
    assert type(output.logprobs) is list and output.logprobs is output.logprobs
    assert CompletionOutput(0, "", [0], logprobs=OutputLogprobs(grown(0))).logprobs == []
    unread = CompletionOutput(0, "", [0], logprobs=OutputLogprobs(grown(5)))
    assert logprobs_from(unread, 3) == logprobs_from(output, 3) == expected[3:]
    assert logprobs_from(CompletionOutput(0, "", [0]), 0) is None


def test_nothing_is_made_before_somebody_reads() -> None:
    made: list[int] = []
    growing = grown(3, lambda chosen, found: made.append(chosen) or entry(chosen, found))  # type: ignore[func-returns-value]
    output = CompletionOutput(0, "", [0, 1, 2], logprobs=OutputLogprobs(growing))
    assert output.token_ids == [0, 1, 2] and not output.finished() and made == []
    assert output.logprobs and made == [0, 1, 2]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, replace, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_have_lists(copied: Callable[[CompletionOutput], CompletionOutput]) -> None:
    output = CompletionOutput(0, "", [0, 1, 2], logprobs=OutputLogprobs(grown(3)))
    other = copied(output)
    assert type(other.logprobs) is list and other == output


def test_an_output_with_log_probabilities_becomes_json() -> None:
    scored = TokenLogprob(-0.5, 1, " é", tuple(" é".encode()), 4)
    choice = CompletionOutput(0, " é", [7], -0.5, OutputLogprobs(grown(2)), "stop")
    output = RequestOutput("0", "a", [1, 7], [None, {7: scored}], [choice], True, RequestMetrics(0.0))
    found = json.loads(json.dumps(asdict(output)))
    assert found["outputs"][0]["logprobs"][1]["2"] == {"logprob": -0.25, "rank": 2, "decoded_token": "1"}
    more = {"raw": [0x20, 0xC3, 0xA9], "text_offset": 4}
    assert found["prompt_logprobs"] == [None, {"7": {"logprob": -0.5, "rank": 1, "decoded_token": " é"} | more}]


def test_an_output_does_not_grow() -> None:
    growing = grown(0)
    outputs = []
    for chosen, found in some(6):
        growing.add([chosen], [found])
        outputs.append(OutputLogprobs(growing))
    for i in (3, 0, 5, 1, 4, 2):
        assert list(outputs[i]) == [entry(*one) for one in some(i + 1)]


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
