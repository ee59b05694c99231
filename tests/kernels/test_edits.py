"""The kernel that edits single scores in place, against the reference that edits whole rows."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nanovllm.kernels.fused import edits
from nanovllm.kernels.fused.edits import Edits, edit_logits, longest_list, restore_logits, scratch_bytes
from nanovllm.sampling.filters import allowed, constrain
from nanovllm.sampling.state import SamplingMetadata, SamplingState
from nanovllm.sampling_params import SamplingParams
from tests.kernels.sampling import Rows, lively_logits, random_edits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EOS = [2, 5]
P = SamplingParams


def state_of(
    params: list[SamplingParams], history: list[tuple[list[int], list[int]]], vocab_size: int
) -> SamplingState:
    """Their rows, which other sequences with the same parameters in another order had before."""
    old = Rows(params[::-1], history, vocab_size, EOS).state
    state = SamplingState(old.token_ids.to(DEVICE), vocab_size, EOS)
    seeded = [p.changed(seed=0) for p in params]
    state.install(range(len(params)), seeded[::-1], [1] * len(params))
    state.install(range(len(params)), seeded, [len(prompt) for prompt, _ in history])
    return state


def reference(logits: Tensor, rows: Tensor, positions: Tensor, state: SamplingState) -> Tensor:
    needs = state.needs(rows.tolist())
    if needs is None:
        return logits.float()
    metadata = SamplingMetadata(*state.metadata(rows, positions).__dict__.values())
    return constrain(logits.float(), metadata, rows, state, needs)


def check(
    logits: Tensor,
    rows: list[int],
    positions: list[int],
    state: SamplingState,
    first: int = 0,
    num_ids: int | None = None,
) -> Edits:
    """The list, and the row without it, are the reference's scores, bit for bit; then all is as it was before."""
    raw, num_ids = logits.to(DEVICE), num_ids or logits.shape[1]
    whole = torch.full((len(rows), state.vocab_size), -1.0, device=DEVICE)
    whole[:, first : first + num_ids] = raw[:, :num_ids].float()
    on_device = torch.tensor(rows, device=DEVICE), torch.tensor(positions, dtype=torch.int32, device=DEVICE)
    expected = reference(whole, *on_device, state)[:, first : first + num_ids]
    left = raw.clone()
    rows32 = on_device[0].int()
    found = edit_logits(left, rows32, on_device[1], state, first, num_ids)
    scores = (
        left[:, :num_ids]
        .float()
        .masked_fill(~allowed(on_device[0], state, state.vocab_size)[:, first : first + num_ids], -math.inf)
    )
    for n, count in enumerate(found.counts.tolist()):
        ids = found.ids[n, :count].long()
        assert ids.tolist() == sorted(set(ids.tolist()))
        assert torch.equal(found.raw[n, :count], raw[n, ids - first].float())
        assert (left[n, ids - first] == -math.inf).all()
        scores[n, ids - first] = found.scores[n, :count]
    bad = ~raw[:, :num_ids].float().amax(-1).isfinite()  # of which only that much has to show
    assert torch.equal(~scores.amax(-1).isfinite() & bad, bad)
    assert torch.equal(scores[~bad], expected[~bad])
    restore_logits(left, found, first)
    assert torch.equal(left.view(torch.uint8), raw.view(torch.uint8))
    return found


@pytest.mark.parametrize("vocab_size", [6, 33, 64, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_the_reference_has_it(vocab_size: int, dtype: torch.dtype) -> None:
    """Rows of all kinds, each at its newest token and, as if the last tokens were guesses, at those before."""
    rng = random.Random(vocab_size)
    cases = [random_edits(rng, vocab_size) for _ in range(16)]
    cases[3] = SamplingParams(), *cases[3][1:]
    state = state_of([p for p, _, _ in cases], [(prompt, output) for _, prompt, output in cases], vocab_size)
    places = [(i, len(c[1]) + len(c[2]) - back) for i, c in enumerate(cases) for back in range(min(3, len(c[2]) + 1))]
    rng.shuffle(places)
    rows, positions = map(list, zip(*places, strict=True))
    found = check(lively_logits(len(rows), vocab_size).to(dtype), rows, positions, state)
    assert all((count == 0) == (not state.edited[row]) for row, count in zip(rows, found.counts.tolist()) if row == 3)
    assert found.counts.max() > 3
