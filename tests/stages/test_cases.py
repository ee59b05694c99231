"""Faults that engines of this kind really had (each test is named after its class), under the shadow model.

The shadow's tokens are right only if every slot that was read held what it should (see shadow.py), so "the same tokens"
below means: the very same keys and values.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.core import Event, SamplingParams
from tests import oracle
from tests.oracle_record import record_alone
from tests.stages.events import Listener
from tests.stages.requests import greedy, random_prompts
from tests.stages.shadow import ShadowModel, continuation
from tests.stages.subject import Subject, needs, since
from tests.weights import lively_qwen3


@pytest.fixture
def serve(subject: Subject, shadow: Path) -> Any:
    """serve(engine options) -> an engine on the shadow model."""

    def make(**options: Any) -> Any:
        engine = subject.engine(shadow, **options)
        ShadowModel.on(engine)
        return engine

    return make


def ask(engine: Any, prompts: list[list[int]], max_tokens: int = 4, params: Any = None) -> Listener:
    """Serve greedily with a fresh listener, check tokens, events and that nothing is left. Returns the listener."""
    listener = Listener()
    engine.trace.on_event = listener
    all_params = params or [greedy(max_tokens)] * len(prompts)
    outputs = engine.generate(prompts, all_params)
    for prompt, output, p in zip(prompts, outputs, all_params, strict=True):
        assert output == continuation(prompt, p.max_tokens, p.ignore_eos), prompt
    listener.check_end(prompts, outputs, all_params, engine.eos_token_ids)
    assert len(engine.pool.free_list) == engine.pool.num_blocks
    return listener


def cached(listener: Listener) -> list[int]:
    """Tokens that each request did not have to compute when it was first admitted."""
    return [listener.requests[i].cached[0] for i in range(len(listener.requests))]


# --- prefix cache ---


@since(4)
def test_prefix_p1_the_whole_prompt_is_cached(serve: Any) -> None:
    """At least the last token is computed again, or there would be nothing to sample from."""
    engine = serve(block_size=2, num_blocks=16)
    assert cached(ask(engine, [[1, 2, 3, 4]])) == [0]
    assert cached(ask(engine, [[1, 2, 3, 4]])) == [2]
    assert cached(ask(engine, [[1, 2, 3, 4]] * 3)) == [2, 2, 2]
    assert cached(ask(engine, [[1, 2, 3, 4, 5]])) == [4]


@since(4)
def test_prefix_p2_a_refilled_block_is_forgotten(serve: Any) -> None:
    """A name dies with the reuse of its block."""
    for num_blocks in (5, 6):
        engine = serve(block_size=2, num_blocks=num_blocks)
        for prompt in ([1, 2, 5, 6, 1, 2, 9], [5, 6, 5, 6, 9], [5, 6, 1, 2, 1, 2, 9], [1, 2, 5, 6, 9]) * 3:
            ask(engine, [prompt], max_tokens=2)
            known = [engine.pool.contents[block] for block in engine.pool.block_by_digest.values()]
            assert all(content is not None for content in known)


@needs("max_num_batched_tokens")
def test_prefix_p4_only_computed_blocks_can_be_hit(serve: Any) -> None:
    """Two long prompts that differ at the end, in chunks: the second shares what is computed by then, no more."""
    engine = serve(block_size=2, num_blocks=32, max_num_batched_tokens=4)
    a, b = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 10]
    listener = ask(engine, [a, b])
    started = next(e for e in listener.events if e["type"] == "admitted" and e["request"] == 1)
    before = [e for e in listener.events if e["type"] == "scheduled" and e["step"] < started["step"]]
    assert cached(listener)[1] <= sum(e["tokens"] for e in before)
    together = serve(block_size=2, num_blocks=32, max_num_batched_tokens=64)
    assert cached(ask(together, [a, b])) == [0, 0]  # in one step neither can use what the other is computing


@needs("max_num_batched_tokens")
def test_prefix_p4_the_first_is_interrupted_in_mid_prefill(serve: Any) -> None:
    engine = serve(block_size=2, num_blocks=32, max_num_batched_tokens=4)
    a, b = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 10]

    def interrupt(event: Event) -> None:
        if event["type"] == "scheduled" and event["step"] == engine.trace.step and event["cached"] == 4:
            raise KeyboardInterrupt

    engine.trace.on_event = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.generate([a], greedy(4))
    assert cached(ask(engine, [b])) == [4]


COLLISIONS: dict[str, Callable[[int, tuple[int, ...]], int]] = {
    "a constant": lambda parent, tokens: 7,
    "first blocks collide": lambda parent, tokens: sum(t * 100**i for i, t in enumerate(tokens)) + 1 if parent else 1,
}


@since(4)
@pytest.mark.parametrize("digest", COLLISIONS.values(), ids=COLLISIONS)
def test_prefix_p5_colliding_digests(
    serve: Any, subject: Subject, monkeypatch: pytest.MonkeyPatch, digest: Callable[..., int]
) -> None:
    """Whatever the hash does, tokens and parent decide, so there is never a false hit."""
    monkeypatch.setattr(subject.home("chained_digest"), "chained_digest", digest)
    engine = serve(block_size=2, num_blocks=24)
    prompts = [[1, 2, 9], [3, 4, 5, 6, 9], [1, 2, 5, 6, 9], [5, 6, 1, 2, 9], [1, 2, 1, 2, 9], [3, 4, 5, 7, 9]]
    for _ in range(2):
        for prompt in prompts:
            ask(engine, [prompt])
        ask(engine, prompts)


@since(4)
def test_prefix_p5_equal_blocks_under_different_parents(serve: Any) -> None:
    engine = serve(block_size=2, num_blocks=32)
    assert cached(ask(engine, [[1, 2, 5, 6, 9]])) == [0]
    assert cached(ask(engine, [[5, 6, 9], [3, 4, 5, 6, 9], [1, 2, 5, 6, 8]])) == [0, 0, 4]


@since(4)
def test_prefix_p6_cached_blocks_that_are_free_are_not_evicted_by_their_own_request(serve: Any) -> None:
    """Exactly the blocks it needs are free, most hold its own beginning: it is admitted, and hits all of them."""
    engine = serve(block_size=2, num_blocks=6, max_num_batched_tokens=4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    ask(engine, [prompt], max_tokens=2)
    assert cached(ask(engine, [prompt], max_tokens=4)) == [8]  # all six blocks: four hits and two fresh ones
    assert cached(ask(engine, [prompt], max_tokens=4)) == [8]


@needs("max_num_batched_tokens")
def test_prefix_p6_the_budget_is_charged_for_uncached_tokens_only(serve: Any) -> None:
    engine = serve(block_size=2, num_blocks=32, max_num_batched_tokens=4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    ask(engine, [prompt], max_tokens=1)
    listener = ask(engine, [prompt, [*prompt[:8], 10], [*prompt[:8], 11]], max_tokens=1)
    assert [told.steps_with_token[0] for told in listener.requests.values()] == [listener.events[-1]["step"]] * 3


# --- blocks ---


@since(4)
def test_blocks_b2_a_shared_prefix_outlives_its_first_owner(serve: Any) -> None:
    """A and B share, A finishes at once, C wants every block that is left while B decodes."""
    engine = serve(block_size=2, num_blocks=14, max_num_seqs=2)
    shared = [1, 2, 3, 4, 5, 6]
    params = [greedy(1), greedy(12, True), greedy(8, True), greedy(8, True)]
    prompts = [[*shared, 7], [*shared, 8], [20, 21, 22], [30, 31, 32, 33]]
    ask(engine, prompts, params=params)
    ask(engine, prompts, params=params)


# --- scheduler ---


@since(3)
def test_scheduler_s1_what_can_never_fit_is_refused_when_added(serve: Any) -> None:
    engine = serve(block_size=2, num_blocks=4, max_num_batched_tokens=3)
    for prompt, max_tokens in ((9, 1), (20, 4), (3, 7), (8, 2)):
        with pytest.raises(
            ValueError, match=rf"prompts\[1\].*{prompt} prompt tokens.*{max_tokens}.*pool has 4; .*num_blocks"
        ):
            engine.generate([[1], [5] * prompt], greedy(max_tokens))
    # The last token is never fed back and needs no slot: 3 + 6 tokens fit in 8 slots, and so do 8 + 1
    ask(engine, [[1, 2, 3], [1] * 8, [7]], params=[greedy(6, True), greedy(1), greedy(3)])


@needs("max_num_batched_tokens")
def test_scheduler_s1_a_resumed_sequence_longer_than_the_budget(serve: Any) -> None:
    """Preempted when prompt + output exceed the budget of a step, it comes back in chunks; its neighbour completes."""
    engine = serve(block_size=2, num_blocks=11, max_num_batched_tokens=4)
    listener = ask(engine, [[1, 2, 3], [4, 5, 6]], params=[greedy(20, True), greedy(18, True)])
    assert listener.requests[1].preempted
    resumed = [e for e in listener.events if e["request"] == 1 and e["type"] == "scheduled" and e["tokens"] > 1]
    assert len(resumed) > 1


@needs("max_num_batched_tokens")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scheduler_s2_preempt_and_resume(serve: Any, temperature: float) -> None:
    """The tokens of a large pool; each sampled token kept exactly once; the seeded stream not restarted."""
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    params = [SamplingParams(temperature, 6, ignore_eos=True, seed=seed) for seed in (3, 4, 5)]
    expected = serve(block_size=2, num_blocks=64).generate(prompts, params)
    engine = serve(block_size=2, num_blocks=6)
    listener = Listener()
    engine.trace.on_event = listener
    assert engine.generate(prompts, params) == expected
    listener.check_end(prompts, expected, params, engine.eos_token_ids)
    assert any(told.preempted for told in listener.requests.values())
    assert listener.requests[0].preempted == 0  # the earliest arrival gives way to nobody


@needs("max_num_batched_tokens")
def test_scheduler_s4_a_long_prompt_does_not_stop_a_decode(serve: Any) -> None:
    """A decodes, B needs 40 chunks: A gets a token in every step, and B finishes."""
    engine = serve(block_size=2, num_blocks=128, max_num_batched_tokens=4)
    listener = ask(engine, [[1], [i % 60 for i in range(118)]], params=[greedy(60, True), greedy(2)])
    steps = listener.requests[0].steps_with_token
    assert steps == list(range(steps[0], steps[0] + 60))
    assert sum(e["request"] == 1 and e["type"] == "scheduled" for e in listener.events) >= 39


@since(2)
def test_scheduler_s7_more_requests_than_seats(serve: Any, subject: Subject) -> None:
    engine = serve(block_size=2, num_blocks=24, max_num_seqs=3, max_num_batched_tokens=5)
    prompts = [[i, i + 1][: 1 + i % 2] for i in range(12)]
    params = [greedy(1 + (5 * i) % 12, ignore_eos=i % 3 == 0) for i in range(12)]
    outputs = engine.generate(prompts, params)
    assert outputs == [
        continuation(prompt, p.max_tokens, p.ignore_eos) for prompt, p in zip(prompts, params, strict=True)
    ]
    subject.check_idle(engine)


# --- chunked prefill ---


@needs("max_num_batched_tokens")
@pytest.mark.parametrize("blocks_cached", [0, 1, 2])
def test_chunked_c1_first_token_scores_do_not_depend_on_the_chunks(
    subject: Subject, checkpoints: Path, blocks_cached: int
) -> None:
    """A 23-token prompt, cut at every place, after 0, 1 and 2 cached blocks: the scores are HF's, on a real model."""
    path = lively_qwen3(checkpoints)
    [prompt] = random_prompts(23)
    for budget in (1, 2, 3, 5, 64):
        engine = subject.engine(path, block_size=8, num_blocks=16, max_num_batched_tokens=budget)
        if blocks_cached:
            engine.generate([prompt[: 8 * blocks_cached]], greedy(1))
        _, recorder = record_alone(engine, prompt, greedy(1))
        assert recorder.steps[0].positions[0] == 8 * blocks_cached
        last = recorder.steps[-1].logits
        assert last is not None
        oracle.check_logits(last, oracle.truth(path).logits(prompt)[-1:])


@needs("max_num_batched_tokens")
@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_chunked_c2_nothing_is_sampled_before_the_last_chunk(serve: Any, budget: int) -> None:
    """max_tokens=1 on a prompt of several chunks: one token, one draw, after exactly the chunks that it takes."""
    engine = serve(block_size=4, num_blocks=16, max_num_batched_tokens=budget)
    prompt = list(range(23))
    listener = ask(engine, [prompt], max_tokens=1)
    kinds = [e["type"] for e in listener.events]
    assert kinds.count("scheduled") == -(-23 // budget)
    assert kinds[-3:] == ["token", "finished", "blocks"]
    params = SamplingParams(1.0, 1, seed=5)
    whole = serve(block_size=4, num_blocks=16).generate([prompt], params)
    assert serve(block_size=4, num_blocks=16, max_num_batched_tokens=budget).generate([prompt], params) == whole
