"""The kernel that edits single scores in place, against the reference that edits whole rows."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nanovllm.config import EngineConfig
from nanovllm.kernels.fused import edits
from nanovllm.kernels.fused.edits import Edits, edit_logits, restore_logits
from nanovllm.runner.memory import CANDIDATES, sampling_bytes
from nanovllm.sampling.filters import constrain, unpacked
from nanovllm.sampling.state import SamplingState
from nanovllm.sampling_params import MAX_BAD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams
from tests.engine.test_memory import MODEL
from tests.kernels.sampling import Rows, lively_logits, random_edits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EOS = [2, 5]
Case = tuple[SamplingParams, list[int], list[int]]  # parameters, prompt, output
DTYPES = [torch.float32, torch.bfloat16]


def state_of(cases: list[Case], vocab_size: int) -> SamplingState:
    """Their rows, whose lists hold what sequences that were there before have left."""
    params, history = [p.changed(seed=0) for p, _, _ in cases], [(prompt, output) for _, prompt, output in cases]
    state = SamplingState(Rows(params, history, vocab_size).state.token_ids.to(DEVICE), vocab_size, EOS)
    state.install(range(len(params)), params[::-1], [1] * len(params))
    state.install(range(len(params)), params, [len(prompt) for prompt, _ in history])
    return state


def check(logits: Tensor, state: SamplingState, places: list[tuple[int, int]], first: int = 0, own: int = -1) -> Edits:
    """The list, and the row without it, are the reference's scores, bit for bit; afterwards the logits are restored.

    logits [N, V]: of the tokens from `first` on; `own` of them are real. places: the rows and positions [N].
    """
    own = logits.shape[1] if own < 0 else own
    shard = slice(first, first + own)
    raw, rows = logits.to(DEVICE), torch.tensor([row for row, _ in places], device=DEVICE)
    positions = torch.tensor([position for _, position in places], dtype=torch.int32, device=DEVICE)
    whole = torch.zeros(len(places), state.vocab_size, device=DEVICE)
    whole[:, shard] = raw[:, :own].float()
    needs = state.needs(rows.tolist())
    if needs is not None:
        needs = needs._replace(min_p=False, num_candidates=0)  # filters are for others
        whole = constrain(whole, state.metadata(rows, positions), rows, state, needs)

    left = raw.clone()
    found = edit_logits(left, rows.int(), positions, state, first, own)
    scores = left[:, :own].float()
    allowed = unpacked(state.mask[rows], state.vocab_size) | (state.masked[rows] == 0)[:, None]
    scores = scores.masked_fill(~allowed[:, shard], -math.inf)  # left to others
    for n, count in enumerate(found.counts.tolist()):
        ids = found.ids[n, :count].long() - first
        assert ids.tolist() == sorted(set(ids.tolist())) and (left[n, ids] == -math.inf).all()
        assert torch.equal(found.raw[n, :count].nan_to_num(7), raw[n, ids].float().nan_to_num(7))
        scores[n, ids] = found.scores[n, :count]
    good = raw[:, :own].amax(-1).isfinite()
    assert torch.equal(scores[good], whole[:, shard][good])
    restore_logits(left, found, first)
    assert torch.equal(left.view(torch.uint8), raw.view(torch.uint8))
    return found


def newest(cases: list[Case]) -> list[tuple[int, int]]:
    return [(row, len(prompt) + len(output)) for row, (_, prompt, output) in enumerate(cases)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [6, 33, 64, 200])
def test_as_the_reference_has_it(vocab_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all kinds, each at its newest token and, as if the last tokens were guesses, at those before; in one tile
    and in several."""
    monkeypatch.setattr(edits, "TILE", 1024 if dtype == torch.float32 else 4)
    rng = random.Random(vocab_size)
    cases = [random_edits(rng, vocab_size) for _ in range(10)]
    cases[3] = SamplingParams(top_k=3, temperature=0.5), [1, 2], [3, 3]
    state = state_of(cases, vocab_size)
    places = [
        (row, position - back) for row, position in newest(cases) for back in range(min(3, len(cases[row][2]) + 1))
    ]
    rng.shuffle(places)
    found = check(lively_logits(len(places), vocab_size).to(dtype), state, places)
    assert {count for (row, _), count in zip(places, found.counts.tolist(), strict=True) if row == 3} == {0}
    assert found.counts.max() > 3


def edited(*words: tuple[int, ...], **params: Any) -> SamplingParams:
    return SamplingParams(**params).changed(bad_words_ids=words)


ALL: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": -0.4}
V = 70
ADVERSARIAL: dict[str, Case] = {
    "one token again and again": (edited(**ALL), [7] * 5, [7] * 40),
    "all of the vocabulary is known": (edited(**ALL), list(range(V)), [*range(V - 1, -1, -1), 0, V - 1]),
    "no output": (edited(**ALL), [3, 3, 4], []),
    "only the output counts": (edited(presence_penalty=1), [3, 4, 5], [4, 6]),
    "no prompt counts and there is no output": (edited(presence_penalty=1), [3, 4, 5], []),
    "a bias for known tokens": (edited(**ALL, logit_bias={7: 2.0, 8: -100.0, 9: 0.0}), [7, 8], [8, 9]),
    "a bias for a stop id": (edited(logit_bias={2: 100.0, 6: 3.0}, min_tokens=3, stop_token_ids=[6]), [1], [2, 2]),
    "no longer too early": (edited(logit_bias={2: 100.0}, min_tokens=2, stop_token_ids=[6]), [1], [2, 2]),
    "as many biases as fit": (edited(logit_bias=dict.fromkeys(range(V), 1.5)), [1], []),
    "words of one token, and twice": (edited((4,), (4,), (69,)), [1], [4]),
    "a word that the text is too short for": (edited((3, 4, 5), (9, 3, 4, 6), (4, 7)), [9], [3, 4]),
    "the same last token, ruled out or not": (edited((1, 9), (4, 9), (5, 9), (4, 4, 9)), [1], [3, 4]),
    "a word that is all of the output": (edited((3, 4, 5), (8, 3, 4, 6), (8, 4, 10)), [8], [3, 4]),
    "nothing allowed": (edited((6,), allowed_token_ids=[6], **ALL), [6], [6]),
    "known tokens that are not allowed": (edited(allowed_token_ids=[31, 32, 63, 64, 69], **ALL), [31, 30], [64, 33]),
    "allowed tokens and nothing else": (edited(allowed_token_ids=range(0, V, 3)), [1], [2]),
}


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_adversarial_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "TILE", 16)
    cases = list(ADVERSARIAL.values())
    logits = lively_logits(len(cases), V).to(dtype)
    logits[:, 5], logits[:, 6], logits[:, 7] = 0.0, -0.0, -math.inf
    found = check(logits, state_of(cases, V), newest(cases))
    counts = dict(zip(ADVERSARIAL, found.counts.tolist(), strict=True))
    assert counts["all of the vocabulary is known"] == counts["as many biases as fit"] == V
    assert counts["one token again and again"] == 1 and counts["only the output counts"] == 2
    assert counts["no prompt counts and there is no output"] == counts["allowed tokens and nothing else"] == 0
    assert counts["a word that the text is too short for"] == 2 and counts["a word that is all of the output"] == 1
    assert counts["nothing allowed"] == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_logit_shows_even_where_it_is_ruled_out(bad: float) -> None:
    cases: list[Case] = [(edited((6,), **ALL, allowed_token_ids=[5]), [6], [6]), (edited(logit_bias={3: 1}), [1], [])]
    logits = lively_logits(2, V)
    logits[0, 6] = bad
    found = check(logits, state_of(cases, V), newest(cases))
    assert found.counts.tolist() == [1, 1] and not found.scores[0, 0] < math.inf


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.slow), 40, 80])
def test_a_rank_edits_the_tokens_that_it_has(first: int) -> None:
    """Of 100 tokens each of three ranks has 40 at most; the last one's row is padded, with what no token is."""
    rng = random.Random(first)
    cases = [random_edits(rng, 100) for _ in range(6)]
    own = min(40, 100 - first)
    logits = lively_logits(len(cases), 40)
    logits[:, own:] = math.nan
    found = check(logits, state_of(cases, 100), newest(cases), first, own)
    assert found.counts.sum() > 2


def test_lists_as_long_as_can_be() -> None:
    """Everything is full, and the list has room for all of it."""
    biased, stops = range(0, 2 * MAX_LOGIT_BIAS, 2), range(1001, 1001 + 2 * MAX_STOP_IDS, 2)
    words: list[tuple[int, ...]] = [(i,) for i in range(1, 2 * MAX_BAD_WORDS - 1, 2)]
    words += [(1800, *[7] * (MAX_BAD_TOKENS - len(words) - 2), 9)]  # longer than the output
    params = edited(*words, logit_bias=dict.fromkeys(biased, -1.0), min_tokens=3, stop_token_ids=stops, **ALL)
    cases: list[Case] = [(params, [1501], [1503]), (SamplingParams(), [1], [2])]
    found = check(lively_logits(2, 2100), state_of(cases, 2100), newest(cases))
    named = {*biased, *stops, *EOS, 1501, 1503, *(word[0] for word in words[:-1])}
    assert found.counts.tolist() == [len(named), 0]


@pytest.mark.parametrize("vocab_size", [40, 5000])
def test_what_it_takes_was_set_aside(vocab_size: int) -> None:
    """But for the counts, and room for EOS ids among those that min_tokens holds back."""
    config, model = EngineConfig(max_num_seqs=3, max_model_len=30), replace(MODEL, vocab_size=vocab_size)
    state = SamplingState(torch.zeros(4, 31, dtype=torch.int32, device=DEVICE), vocab_size, ())
    rows = torch.arange(3, device=DEVICE)
    found = edit_logits(lively_logits(3, vocab_size).to(DEVICE), rows, rows + 3, state)
    taken = 4 * (sum(tensor.numel() for tensor in found[:3]) + 2 * 3 * -(-vocab_size // 32))
    others = 4 * 3 * (3 * CANDIDATES + -(-vocab_size // 32))
    assert taken + others == sampling_bytes(config, model, 3) - sampling_bytes(config, model, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_vocabulary_of_real_size(dtype: torch.dtype) -> None:
    """Long texts of a few hundred and of many different tokens, and lists of thousands."""
    rng = random.Random(0)
    cases: list[Case] = []
    for few in (300, 151_936) * 12:
        prompt, output = ([rng.randrange(few) for _ in range(rng.randrange(1, 3000))] for _ in range(2))
        params, _, _ = random_edits(rng, 400)
        words = [(*output[-length:], rng.randrange(few)) for length in range(1, 9)]
        bias = {rng.randrange(151_936): rng.uniform(-9, 9) for _ in range(900)}
        cases.append((replace(params, logit_bias=bias).changed(bad_words_ids=tuple(words)), prompt, output))
    state = state_of(cases, 151_936)
    places = [(row, position - back) for row, position in newest(cases) for back in range(2)]
    for seed in range(3):
        check(lively_logits(len(places), 151_936, seed=seed).to(dtype), state, places)
