"""Thousands of random histories against the shadow KV, synchronous and asynchronous, and proof that they bite."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from nanovllm.engine import block_manager
from tests.engine.faults import FAULTS, FAULTS_OF_WINDOWS
from tests.engine.shadow import VOCAB_SIZE
from tests.engine.world import World, random_history

HISTORIES = 250


@pytest.mark.parametrize("shard", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 8))])
def test_random_histories(shard: int) -> None:
    for seed in range(shard * HISTORIES, (shard + 1) * HISTORIES):
        try:
            random_history(seed)
        except Exception as error:
            error.add_note(f"random_history({seed})")
            raise


@pytest.mark.parametrize("num_histories", [30, *(pytest.param(n, marks=pytest.mark.slow) for n in (500, 1000))])
def test_random_histories_in_windows(num_histories: int) -> None:
    """Blocks that no window reaches any more are given back, and may be anybody's."""
    for seed in range(num_histories, 2 * num_histories):
        speculative, window = seed % 3 == 0, (1, 2, 3, 5, 9)[seed % 5]
        try:
            random_history(seed, speculative, window)
        except Exception as error:
            error.add_note(f"random_history({seed}, {speculative}, {window})")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(100, 180))
def test_many_more_random_histories(shard: int) -> None:
    test_random_histories(shard)


def test_p5_histories_in_which_every_digest_collides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "chained_digest", lambda parent, token_ids: b"same")
    for seed in range(50):
        random_history(seed)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for edit in FAULTS[name]:
        edit.plant(monkeypatch)
    for seed in range(2 * HISTORIES):
        try:
            random_history(seed)
        except Exception:
            return
    pytest.fail(f"{2 * HISTORIES} random histories do not notice that {name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS_OF_WINDOWS)
def test_planted_faults_of_windows_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for edit in FAULTS_OF_WINDOWS[name]:
        edit.plant(monkeypatch)
    for seed in range(HISTORIES):
        try:
            random_history(seed, window=3 if seed % 2 else 1)
        except Exception:
            return
    pytest.fail(f"{HISTORIES} random histories do not notice that {name}")


class ShadowMachine(RuleBasedStateMachine):
    """The same world under Hypothesis, which shrinks a failure to the few calls that it takes."""

    @initialize(
        block_size=st.sampled_from((1, 2, 4)),
        slots=st.sampled_from((8, 12, 24)),
        max_num_seqs=st.integers(1, 4),
        budget=st.sampled_from((1, 3, 8, 64)),
        chunked=st.booleans(),
        asynchronous=st.booleans(),
    )
    def start(
        self, block_size: int, slots: int, max_num_seqs: int, budget: int, chunked: bool, asynchronous: bool
    ) -> None:
        self.world = World(
            kvcache_block_size=block_size,
            num_kv_blocks=slots // block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_chunked_prefill=chunked,
            async_scheduling=asynchronous,
        )

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=9),  # few ids, so that beginnings are shared
        params=st.fixed_dictionaries(
            {
                "max_tokens": st.integers(1, 8),
                "ignore_eos": st.booleans(),
                "temperature": st.sampled_from((0.0, 1.0)),
                "seed": st.integers(0, 1),
                "n": st.sampled_from((1, 1, 2)),
                "stop_token_ids": st.sampled_from(((), (2, VOCAB_SIZE - 2))),
            }
        ),
        priority=st.integers(0, 1),
        cache_salt=st.sampled_from((None, None, "a")),
    )
    def add(self, prompt: list[int], params: dict[str, Any], priority: int, cache_salt: str | None) -> None:
        try:
            self.world.add(prompt, priority, cache_salt, **params)
        except ValueError as refusal:
            assert "the prompt has" in str(refusal)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.world.requests:
            self.world.abort(data.draw(st.sampled_from(sorted(self.world.requests))))

    @rule()
    def drain(self) -> None:
        self.world.drain()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


def test_shadow_machine() -> None:
    run_state_machine_as_test(ShadowMachine, settings=settings(max_examples=40, stateful_step_count=30))


@pytest.mark.slow
def test_shadow_machine_at_length() -> None:
    run_state_machine_as_test(ShadowMachine, settings=settings(max_examples=2000, stateful_step_count=60))
