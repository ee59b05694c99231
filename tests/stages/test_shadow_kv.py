"""Random batches on tiny pools under the shadow model: every slot read is checked, thousands of steps in seconds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.core import Event
from tests.stages.events import Listener
from tests.stages.requests import TIGHT, greedy
from tests.stages.shadow import ShadowModel, continuation
from tests.stages.subject import Subject, since

LONGEST_PROMPT, MOST_TOKENS = 14, 8

# Three ids only, so that prompts share beginnings and equal blocks turn up under different parents
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=LONGEST_PROMPT)
requests = st.tuples(prompts, st.integers(1, MOST_TOKENS), st.booleans())
rounds = st.lists(st.lists(requests, min_size=1, max_size=6), min_size=1, max_size=4)  # reuse needs history


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.sampled_from((1, 2, 3, 4, 8)))
    fewest = -(-(LONGEST_PROMPT + MOST_TOKENS - 1) // block_size)
    return {
        "block_size": block_size,
        "num_blocks": fewest + draw(st.integers(0, fewest)),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.sampled_from((1, 2, 3, 5, 8, 13, 64))),
    }


class Checked(Listener):
    """Also compares the pool's reference counts, where it has some, with the tables that the events tell of."""

    def __init__(self, engine: Any, keeps_kv: bool) -> None:
        super().__init__(keeps_kv)
        self.pool = getattr(engine, "pool", None)

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if event["type"] != "scheduled" or self.pool is None:
            return
        held = [block for table in self.tables.values() for block in table]
        assert len(self.pool.free_list) + len(set(held)) == self.pool.num_blocks, f"free and held: {event}"
        assert not self.pool.free_list.keys() & set(held), f"both free and held: {event}"
        if hasattr(self.pool, "ref_counts"):
            assert self.pool.ref_counts == [held.count(block) for block in range(self.pool.num_blocks)], event


@since(2)
@settings(max_examples=40)
@given(rounds=rounds, geometry=geometries())
def test_every_slot_that_is_read_is_right(
    subject: Subject, shadow: Path, rounds: list[list[tuple[list[int], int, bool]]], geometry: dict[str, Any]
) -> None:
    engine = subject.engine(shadow, **geometry)
    ShadowModel.on(engine)
    for requests in rounds:
        listener = Checked(engine, keeps_kv=not subject.recomputes)
        engine.trace.on_event = listener
        params = [greedy(max_tokens, ignore_eos) for _, max_tokens, ignore_eos in requests]
        batch = [prompt for prompt, _, _ in requests]
        outputs = engine.generate(batch, params)
        assert outputs == [continuation(*request) for request in requests]
        listener.check_end(batch, outputs, params, engine.eos_token_ids)
        subject.check_idle(engine)


@since(3)
def test_an_interruption_at_any_event_frees_everything(subject: Subject, shadow: Path) -> None:
    """Ctrl-C may strike between any two events: while adding, admitting, sharing, sampling, preempting, releasing."""
    engine = subject.engine(shadow, **TIGHT | {"num_blocks": 5})
    ShadowModel.on(engine)
    batch = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    params = [greedy(10, True), greedy(4, True), greedy(6, True)]
    expected = [continuation(p, q.max_tokens, True) for p, q in zip(batch, params, strict=True)]
    events_left = 0

    def interrupt(event: Event) -> None:
        nonlocal events_left
        events_left -= 1
        if events_left == 0:
            raise KeyboardInterrupt

    engine.trace.on_event = interrupt
    fatal_event, interrupted = 0, True
    while interrupted:
        fatal_event += 1
        events_left = fatal_event
        try:
            assert engine.generate(batch, params) == expected
            interrupted = events_left <= 0
        except KeyboardInterrupt:
            pass
        events_left = 0
        subject.check_idle(engine)
        assert engine.generate(batch[1:], params[1:]) == expected[1:]
    assert fatal_event > 50


def test_the_shadow_sees_what_it_should(subject: Subject, shadow: Path) -> None:
    """A wrong mask, slot or table cannot go unnoticed: the model itself refuses a context with a hole or a stranger."""
    engine = subject.engine(shadow)
    model = ShadowModel.on(engine)
    assert engine.generate([[5, 6, 7]], greedy(6)) == [continuation([5, 6, 7], 6)]
    assert model.num_tokens >= 3
    ids, positions = torch.tensor([5, 6, 7]), torch.arange(3)
    hidden = model(ids, positions, lambda layer, q, k, v: v.cumsum(0) / torch.arange(1, 4)[:, None, None])
    assert torch.equal(model.logits(hidden)[2], model.logits(hidden[2:])[0])
    stale = torch.zeros(1, 1, 128)
    stale[0, 0, 0] = 9  # right token, wrong beginning: only layer 1 can tell

    def another_beginning(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        v = torch.cat((stale, v[1:])) if layer == 1 else v
        return v.cumsum(0) / torch.arange(1, 4)[:, None, None]

    with pytest.raises(AssertionError, match=r"of which \[0\] were computed after another beginning"):
        model.logits(model(ids, positions, another_beginning)[2:])
    for wrong in (lambda v: v.sum(0, keepdim=True).expand(3, -1, -1) / 3, lambda v: v):
        hidden = model(ids, positions, lambda layer, q, k, v, wrong=wrong: wrong(v))
        with pytest.raises(AssertionError, match="sees"):
            model.logits(hidden)
