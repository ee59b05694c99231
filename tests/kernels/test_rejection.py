"""X1: what comes out of guessing, accepting and redrawing is distributed as the target alone, whatever the draft."""

import pytest
import torch
from torch import Tensor

from nanovllm.sampling import acceptance
from nanovllm.sampling.acceptance import accept_or_resample, probabilities, sample_guesses
from nanovllm.sampling.filters import constrain
from nanovllm.sampling.state import Needs, SamplingMetadata, SamplingState
from nanovllm.sampling_params import SamplingParams
from tests.engine.faults import Edit

DRAWS, VOCAB_SIZE = 50_000, 8
TARGET = torch.tensor([2.0, 1.0, 0.5, 0.3, 0.0, -0.5, -1.0, -2.0])
DRAFT = torch.tensor([0.5, 1.5, -0.5, 1.0, 0.2, 0.4, -3.0, 0.0])
LIMIT = 40.0  # chi-square of 7 degrees of freedom: exceeded by chance once in a million

PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.7),
    "top_p": SamplingParams(temperature=0.8, top_p=0.8),
    "top_k": SamplingParams(temperature=1.3, top_k=4),
    "min_p": SamplingParams(temperature=1.0, min_p=0.15),
}


def outcome(params: SamplingParams, same: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Of 50,000 seeds: what was guessed [N], what came out [N], and the target's own distribution [V]."""
    token_ids = torch.zeros(1, 4, dtype=torch.int32)
    state = SamplingState(token_ids, VOCAB_SIZE, ())
    state.install([0], [params.changed(seed=0)], [0])
    rows = torch.zeros(DRAWS, dtype=torch.int64)
    temperature = torch.full((DRAWS,), params.temperature)
    metadata = SamplingMetadata(
        temperature, torch.arange(DRAWS) * 7919 + 1, torch.full((DRAWS,), 3), params.temperature == 0
    )
    needs = state.needs([0]) or Needs()
    p = constrain(TARGET.expand(DRAWS, -1).clone(), metadata, rows, state, needs)
    q = constrain((TARGET if same else DRAFT).expand(DRAWS, -1).clone(), metadata, rows, state, needs)
    guesses, drawn_from = sample_guesses(q, metadata)
    assert drawn_from is not None
    return guesses, accept_or_resample(p, metadata, guesses, drawn_from), probabilities(p, temperature)[0]


def chi_square(tokens: Tensor, expected: Tensor) -> float:
    """Infinite if something came out that cannot."""
    counts = torch.bincount(tokens, minlength=VOCAB_SIZE)
    possible = expected > 0
    if counts[~possible].any():
        return float("inf")
    want = expected[possible] * len(tokens)
    return float(((counts[possible] - want) ** 2 / want).sum())


@pytest.mark.parametrize("name", PARAMS)
def test_x1_the_targets_distribution_comes_out(name: str) -> None:
    guesses, tokens, expected = outcome(PARAMS[name])
    assert chi_square(tokens, expected) < LIMIT < chi_square(guesses, expected)


@pytest.mark.parametrize("name", PARAMS)
def test_as_many_are_accepted_as_theory_allows(name: str) -> None:
    """The overlap of both distributions, which no rule can exceed."""
    guesses, tokens, expected = outcome(PARAMS[name])
    draft = torch.bincount(guesses, minlength=VOCAB_SIZE) / DRAWS
    overlap = float(torch.minimum(draft, expected).sum())
    assert float((guesses == tokens).float().mean()) == pytest.approx(overlap, abs=0.01)


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    guesses, tokens, _ = outcome(PARAMS["top_p"], same=True)
    assert torch.equal(guesses, tokens)


FAULTS = {
    "a softmax over the residual": Edit(
        acceptance, "accept_or_resample", "(p - q).clamp_(min=0)", "(p - q).clamp_(min=0).softmax(-1)"
    ),
    "an unfiltered draft": Edit(
        acceptance, "sample_guesses", "choose(add_noise(scores,", "choose(add_noise(scores.nan_to_num(neginf=1.0),"
    ),
    "acceptance on equality alone": Edit(
        acceptance,
        "accept_or_resample",
        "uniform(metadata.seeds, metadata.indices) * q.gather(1, at_guess)[:, 0] < p.gather(1, at_guess)[:, 0]",
        "guesses == choose(add_noise(scores, metadata))",
    ),
    "a redraw from the target": Edit(acceptance, "accept_or_resample", "(p - q).clamp_(min=0)", "p.clone()"),
    "noise shared by guess and redraw": Edit(acceptance, "sample_guesses", "metadata.seeds + GUESS", "metadata.seeds"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name].plant(monkeypatch)
    monkeypatch.setitem(globals(), "accept_or_resample", acceptance.accept_or_resample)
    monkeypatch.setitem(globals(), "sample_guesses", acceptance.sample_guesses)
    found = [chi_square(outcome(PARAMS[params])[1], outcome(PARAMS[params])[2]) for params in ("plain", "top_p")]
    assert max(found) > LIMIT, f"chi-square {found} does not notice {name}"


def test_greedy_and_bad_rows() -> None:
    """Temperature 0 is the target's argmax, beside rows that are drawn; a row that is not finite gives -1."""
    scores = TARGET.repeat(3, 1)
    scores[2] = torch.nan
    metadata = SamplingMetadata(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1, 2, 3]), torch.tensor([0, 0, 0]))
    guesses, q = sample_guesses(DRAFT.repeat(3, 1), metadata)
    assert q is not None and guesses[0] == 1
    tokens = accept_or_resample(scores, metadata, guesses, q)
    assert tokens[0] == 0 and tokens[1] >= 0 and tokens[2] == -1


def test_a_draft_that_is_not_finite_guesses_for_certain() -> None:
    metadata = SamplingMetadata(torch.ones(DRAWS), torch.arange(DRAWS), torch.zeros(DRAWS))
    guesses, q = sample_guesses(torch.full((DRAWS, VOCAB_SIZE), torch.nan), metadata)
    assert q is not None and not guesses.any()
    tokens = accept_or_resample(TARGET.repeat(DRAWS, 1), metadata, guesses, q)
    assert chi_square(tokens, TARGET.softmax(-1)) < LIMIT


def test_what_the_target_rules_out_is_never_accepted() -> None:
    """Not even where the draft gave it so little that u q is 0, as p is: the comparison is a strict one."""
    scores, q = TARGET.repeat(1000, 1), torch.zeros(1000, VOCAB_SIZE)
    scores[:, 1], q[:, 1] = -torch.inf, 1e-45
    metadata = SamplingMetadata(torch.ones(1000), torch.arange(1000), torch.zeros(1000))
    tokens = accept_or_resample(scores, metadata, torch.ones(1000, dtype=torch.int64), q)
    assert not (tokens == 1).any() and (tokens >= 0).all()
