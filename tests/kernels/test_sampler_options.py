"""Edits of single scores and log-probabilities, and what the host knows of them."""

import random
from dataclasses import replace

import pytest
import torch

from nanovllm.sampling.filters import constrain
from nanovllm.sampling.logprobs import log_probabilities
from nanovllm.sampling.sampler import sample_full
from nanovllm.sampling_params import SamplingParams
from tests.kernels.sampling import VOCAB, Rows, literal_edits, lively_logits, random_edits


def test_penalties_against_a_literal_reference() -> None:
    generator = torch.Generator().manual_seed(3)
    settings = [(1.0, 0.0, 0.0), (1.7, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, 0.9), (0.6, -1.0, -0.5), (1.2, 0.5, 0.4)]
    params, history = [], []
    for i in range(60):
        repetition, presence, frequency = settings[i % len(settings)]
        params.append(
            SamplingParams(
                temperature=0.0,
                repetition_penalty=repetition,
                presence_penalty=presence,
                frequency_penalty=frequency,
            )
        )
        tokens = torch.randint(0, 12, (20,), generator=generator).tolist()
        history.append((tokens[: 1 + i % 9], tokens[9 : 9 + i % 11]))
    logits = lively_logits(60, vocab_size=12)
    logits[::2] -= 6.0  # a penalty makes negative scores more negative
    expected = []
    for row, p, (prompt, output) in zip(logits, params, history, strict=True):
        scores = literal_edits(row, p, prompt, output)
        expected.append(scores.index(max(scores)))
    tokens = Rows(params, history, vocab_size=12).full(logits)
    assert tokens == expected
    assert tokens != logits.argmax(-1).tolist()  # the penalties did something


def test_min_tokens_holds_back_eos_and_stop_ids_until_then() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 9], logits[:, 8], logits[:, 7] = 3.0, 2.0, 1.0
    params = [
        SamplingParams(temperature=0.0, min_tokens=2),
        SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[8, 8, VOCAB + 5]),
        SamplingParams(temperature=0.0, min_tokens=2),
        SamplingParams(temperature=0.0),
    ]
    history = [([1], [5]), ([1], [5]), ([1], [5, 5]), ([1], [])]
    assert Rows(params, history, eos=[9, -1, VOCAB]).full(logits) == [8, 7, 9, 9]  # some files name such ids


EOS = [2, 5]


@pytest.mark.parametrize("seed", range(20))
def test_edits_against_a_literal_reference(seed: int) -> None:
    """All of them in one batch, where they meet at the same few tokens; rows that had other owners before."""
    rng = random.Random(seed)
    vocab_size = rng.choice((6, 31, 33, 70))
    cases = [random_edits(rng, vocab_size) for _ in range(24)]
    params, history = [p.changed(seed=0) for p, _, _ in cases], [(prompt, output) for _, prompt, output in cases]
    batch = Rows(params[::-1], history, vocab_size, EOS)
    rows = torch.arange(len(params))
    batch.state.install(rows.tolist(), params, [len(prompt) for prompt, _ in history])
    logits, needs = lively_logits(len(params), vocab_size, seed=seed), batch.state.needs(rows.tolist())
    assert needs is not None
    scores = constrain(logits, batch.metadata(rows), rows, batch.state, needs)
    for ours, row, (p, prompt, output) in zip(scores, logits, cases, strict=True):
        expected = literal_edits(row, p, prompt, output, [*EOS, *p.stop_token_ids])
        assert ours.tolist() == pytest.approx(expected, abs=1e-5), p
    assert scores.isinf().any() and not torch.equal(scores, logits)


def test_what_is_ruled_out_stays_so_whatever_speaks_for_it() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 9], logits[:, 12], logits[:, 6] = 3.0, 2.0, 1.0
    p = SamplingParams(temperature=0, logit_bias={3: 1000, 4: 99}, min_tokens=2, stop_token_ids=[3], logprobs=1)
    params = [p, replace(p, allowed_token_ids=[5, 6]), p.changed(bad_words_ids=((8, 4),))]
    tokens = Rows(params, [([1], []), ([1], [4]), ([8], [8])], eos=[9]).full(logits)
    assert tokens == [4, 6, 12]


def test_a_bad_word_may_not_begin_in_the_prompt() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 9] = 5.0
    p = SamplingParams(temperature=0).changed(bad_words_ids=((7, 8, 9), (1, 2, 3, 4, 5, 6)))
    histories = [([7, 8], []), ([7], [8]), ([7], [7, 8]), ([7], [7, 8, 8])]
    assert Rows([p] * 4, histories).full(logits) == [9, 9, 0, 9]


def test_logprobs_are_the_models_own() -> None:
    """Before temperature, penalties and filters; the sampled token with its rank, then the likeliest."""
    logits = lively_logits(3)
    truth = logits.double().log_softmax(-1)
    params = [
        SamplingParams(temperature=1.9, seed=4, logprobs=5, repetition_penalty=1.9),
        SamplingParams(temperature=1.9, seed=2, logprobs=0, top_k=20),
        SamplingParams(temperature=0.0),
    ]
    batch = Rows(params)
    rows = torch.arange(3)
    needs = batch.state.needs(rows.tolist())
    assert needs is not None
    tokens = sample_full(logits, batch.metadata(rows), rows, batch.state, needs)
    top = log_probabilities(logits, tokens, needs.num_logprobs or 0)
    reported = top.per_row([p.logprobs for p in params])
    assert reported[2] is None
    for row, n in ((0, 5), (1, 0)):
        got = reported[row]
        assert got is not None
        order = truth[row].argsort(descending=True).tolist()
        assert got.keys() == {tokens[row].item(), *order[:n]}
        for token, (logprob, rank) in got.items():
            assert logprob == pytest.approx(truth[row, token].item(), abs=1e-5)
            assert order[rank - 1] == token


def test_needs_names_only_what_is_asked_for() -> None:
    def needs(*params: SamplingParams) -> object:
        return Rows(params, eos=[1]).state.needs(range(len(params)))

    assert needs(SamplingParams(temperature=0.7), SamplingParams(top_k=-1, top_p=1.0), SamplingParams(top_k=99)) is None
    assert needs(SamplingParams(temperature=0.0, top_k=5, top_p=0.5)) is None  # filters mean nothing to greedy
    state = Rows([SamplingParams(top_k=5), SamplingParams(top_p=0.5, top_k=9), SamplingParams(top_p=0.5)]).state
    narrow, wide = state.needs([0, 1]), state.needs([0, 1, 2])
    assert narrow is not None and narrow.num_candidates == 9
    assert wide is not None and wide.num_candidates == VOCAB
    state.install([1, 2], [SamplingParams(seed=0)] * 2, [1, 1])  # rows change hands
    narrow = state.needs([0, 1, 2])
    assert narrow is not None and narrow.num_candidates == 5
    assert state.needs([1, 2]) is None
