"""Guesses of a chosen quality, through the ordinary verification: as many are accepted as are right, and no token
changes, whatever is counted, ruled out or drawn at each position."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.speculation import ReplayProposer, acceptance, tokens_per_step
from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput, SpeculationStats
from tests.weights import VOCAB, lively_qwen3

PROMPTS = [[(37 * i + j) % 500 for j in range(3 * i + 1)] for i in range(5)]
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "kvcache_block_size": 4, "num_kv_blocks": 120}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_qwen3(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def plain(path: Path) -> LLM:
    return LLM(path, **OPTIONS)


@pytest.fixture(scope="module")
def guessing(path: Path) -> LLM:
    return LLM(path, **OPTIONS, speculative={"method": "ngram", "k": 6})


def generate(llm: LLM, params: Any) -> list[RequestOutput]:
    return llm.generate(PROMPTS, params, use_tqdm=False)


def replayed(
    llm: LLM, known: list[list[int]], params: Any, right: float
) -> tuple[list[RequestOutput], SpeculationStats]:
    """What comes out when this share of the guesses at `known` is right, and how guessing went."""
    scheduler = llm.engine.scheduler
    llm._ids = count()  # the requests are called "0", "1", ... again
    scheduler.proposer = ReplayProposer({str(i): ids for i, ids in enumerate(known)}, right, VOCAB)
    scheduler.speculation = SpeculationStats()
    return generate(llm, params), scheduler.speculation


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


@pytest.mark.parametrize(("right", "tolerance"), [(0.0, 0), (1.0, 0), (0.6, 0.06)])
def test_as_many_are_accepted_as_was_chosen(plain: LLM, guessing: LLM, right: float, tolerance: float) -> None:
    params = SamplingParams(temperature=0, max_tokens=36, ignore_eos=True)
    expected = tokens(generate(plain, params))
    found, stats = replayed(guessing, expected, params, right)
    assert tokens(found) == expected
    assert acceptance(stats) == pytest.approx(right, abs=tolerance)
    assert stats.mean_accepted_length == pytest.approx(tokens_per_step(right, 6), rel=0.15)


# At each of them, what is drawn depends on the guesses before it.
DEPENDENT: dict[str, dict[str, Any]] = {
    "repetition": {"temperature": 0, "repetition_penalty": 3.0},
    "rewarded repetition": {"temperature": 0, "repetition_penalty": 0.5},
    "presence and frequency": {"temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    "rewarded frequency": {"temperature": 0, "frequency_penalty": -1.0, "logprobs": 2},
    "drawn": {"temperature": 4.0, "seed": 3, "frequency_penalty": 2.0, "top_k": 4},
    "drawn from few": {"temperature": 2.0, "seed": 4, "top_p": 0.5, "min_p": 0.01, "presence_penalty": -2.0},
}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [name if i % 2 == 0 else slow(name) for i, name in enumerate(DEPENDENT)])
def test_penalties_count_the_guesses_before_each_position(plain: LLM, guessing: LLM, name: str) -> None:
    """All guesses are right: with one count missing, or one too many, some would be rejected."""
    params = SamplingParams(**DEPENDENT[name], max_tokens=30, ignore_eos=True)
    expected = generate(plain, params)
    found, stats = replayed(guessing, tokens(expected), params, 1.0)
    assert tokens(found) == tokens(expected)
    assert stats.accepted == stats.proposed
    for a, b in zip(expected, found, strict=True):
        assert (a.outputs[0].logprobs is None) == (b.outputs[0].logprobs is None)
        for x, y in zip(a.outputs[0].logprobs or [], b.outputs[0].logprobs or [], strict=True):
            assert list(x) == list(y) and all(x[t].logprob == pytest.approx(y[t].logprob, abs=1e-3) for t in x)


@pytest.mark.parametrize("right", [1.0, slow(0.7)])
def test_an_accepted_run_is_cut_at_its_end(plain: LLM, guessing: LLM, right: float) -> None:
    """By a stop token at every place of a run, by max_tokens, by min_tokens that rules the stop out before."""
    free = tokens(generate(plain, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)))
    for place in (0, 1, 3, 6):
        params = [
            SamplingParams(temperature=0, max_tokens=24 - place, stop_token_ids=[t[place]], min_tokens=m, logprobs=1)
            for t, m in zip(free, [0, 1, place, place + 1, place + 3], strict=True)
        ]
        expected = generate(plain, params)
        # Guesses go on behind the end, as a draft's do.
        known = [a + b[len(a) :] for a, b in zip(tokens(expected), free, strict=True)]
        found, _ = replayed(guessing, known, params, right)
        for a, b in zip(expected, found, strict=True):
            x, y = a.outputs[0], b.outputs[0]
            assert (x.token_ids, x.finish_reason, x.stop_reason) == (y.token_ids, y.finish_reason, y.stop_reason)
            assert y.logprobs is not None and len(y.logprobs) == len(y.token_ids)


@pytest.mark.parametrize("tight", [slow(False), True])
def test_a_draft_equal_to_the_target_is_always_right(path: Path, plain: LLM, tight: bool) -> None:
    """Its distribution is filtered and penalised as the target's is, position by position, or they would differ; and
    its cache holds what the target's does, after prefix hits, in chunks, and after preemptions."""
    params = [SamplingParams(**p, max_tokens=20, ignore_eos=True) for p in list(DEPENDENT.values())[1:]]
    small = {"num_kv_blocks": 16, "max_num_batched_tokens": 9} if tight else {}
    llm = LLM(path, **OPTIONS | small, speculative={"model": path, "k": 4})
    found, again = generate(llm, params), generate(llm, params)
    assert tokens(found) == tokens(again)
    stats = llm.engine.scheduler.speculation
    assert stats.accepted == stats.proposed and stats.mean_accepted_length > 2
    assert tight == any(output.metrics.num_preemptions for output in found)
    assert tight or any(output.metrics.num_cached_tokens for output in again)
    greedy = [i for i, p in enumerate(params) if p.temperature == 0]
    expected = generate(plain, params)
    assert [tokens(found)[i] for i in greedy] == [tokens(expected)[i] for i in greedy]
