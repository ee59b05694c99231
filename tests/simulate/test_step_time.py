"""The time of a step by its counts: more work never takes less time, and the fit finds known factors again."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.simulate.fit import (
    Observation,
    fit_counts,
    fit_device,
    fit_host,
    non_negative_least_squares,
    residuals,
)
from nanovllm.simulate.step_shape import StepShape
from nanovllm.simulate.step_time import DEVICE_TERMS, HOST_TERMS, Kind, Recordings, StepTime

RECORDINGS = Recordings((1, 2, 4, *range(8, 257, 8)), (64, 128, 256, 512), 96, 4000, 64, 1e6, 1e3)
factor = st.floats(0, 1e-3)
numbers = st.integers(0, 2000)
shapes = st.builds(StepShape, *[numbers] * len(StepShape._fields))
chunks = st.builds(  # of up to 150 tokens: beyond 96 tokens, or 4000 keys, they are computed in another way
    lambda tokens, context: StepShape(0, 0, 1, tokens, tokens * context, 0, 0, 0, context),
    st.integers(1, 150),
    st.integers(1, 60),
)
tables = st.lists(st.tuples(st.integers(1, 600), st.floats(0, 0.1)), min_size=1, max_size=6).map(
    lambda rows: tuple(zip(sorted({n for n, _ in rows}), sorted(seconds for _, seconds in rows), strict=False))
)
times = st.builds(
    StepTime,
    tables,
    st.fixed_dictionaries(dict.fromkeys(DEVICE_TERMS, factor)).map(
        lambda device: {**device, "shared_key": min(device["shared_key"], device["decode_key"])}
    ),
    st.fixed_dictionaries(dict.fromkeys(HOST_TERMS, factor)),
    st.floats(0, 0.1),
    st.sampled_from([RECORDINGS, Recordings()]),
    st.sampled_from([math.inf, 500.0]),
    st.floats(0, 0.1),
    st.floats(0, 1),
)


@given(times, shapes, shapes)
@settings(max_examples=60, deadline=None)
def test_more_work_never_takes_less_time(time: StepTime, shape: StepShape, more: StepShape) -> None:
    larger = StepShape(*map(sum, zip(shape, more, strict=True)))
    assert time.device_seconds(larger) >= time.device_seconds(shape) * (1 - 1e-12)
    assert time.host_seconds(larger) >= time.host_seconds(shape) * (1 - 1e-12)


@given(times, chunks, chunks)
@settings(max_examples=200, deadline=None)
def test_a_larger_chunk_never_takes_less_time(time: StepTime, chunk: StepShape, other: StepShape) -> None:
    larger = StepShape(*map(max, zip(chunk, other, strict=True)))
    assert time.device_seconds(larger) >= time.device_seconds(chunk) * (1 - 1e-12)


def test_a_step_is_padded_to_its_recording_or_launched() -> None:
    run = RECORDINGS.run
    assert run(StepShape(decodes=9)) == (16, Kind.DECODES)
    assert run(StepShape(decodes=89, prompts=1, prompt_tokens=1)) == (96, Kind.DECODES)  # each token is a decode
    assert run(StepShape(decodes=9, guesses=90)) == (128, Kind.LAUNCHED)  # too many tokens for that
    assert run(StepShape(prompts=1, prompt_tokens=65)) == (72, Kind.DECODES)
    two = StepShape(prompts=2, prompt_tokens=65, prompt_pairs=2000, prompt_keys=62)
    assert run(two) == (72, Kind.DECODES)
    assert run(two._replace(prompt_pairs=2001)) == (128, Kind.PROMPTS)  # reads too much
    assert run(StepShape(decodes=9, prompts=1, prompt_tokens=100)) == (128, Kind.PROMPTS)
    assert run(StepShape(decodes=63, prompts=1, prompt_tokens=50)) == (128, Kind.LAUNCHED)  # no room for a padding row
    assert run(StepShape(prompts=1, prompt_tokens=513)) == (513, Kind.LAUNCHED)
    costly = replace(RECORDINGS, layer_operations=5e3)
    assert costly.run(StepShape(prompts=1, prompt_tokens=257)) == (512, Kind.LAUNCHED)
    assert Recordings().run(StepShape(decodes=300)) == (300, Kind.DECODES)


def test_steps_that_read_too_much_for_a_recording_of_decodes() -> None:
    """Keys of a chunk may count twice. Those of guesses count once, and those of plain decodes not at all."""
    chunk = StepShape(0, 0, 1, 40, 40 * 30 + 820, prompt_keys=70)  # 40 tokens behind 30: each reads up to 70 keys
    twice = replace(RECORDINGS, chunk_weight=2)
    assert RECORDINGS.read_keys(chunk) == 2800 and twice.read_keys(chunk) == 5600
    assert RECORDINGS.run(chunk) == (40, Kind.DECODES) and twice.run(chunk) == (64, Kind.PROMPTS)
    assert RECORDINGS.run(StepShape(10, 4001)) == (16, Kind.DECODES)
    assert RECORDINGS.run(StepShape(10, 3000, guesses=10, shared_keys=1000)) == (24, Kind.DECODES)
    assert RECORDINGS.run(StepShape(10, 3000, guesses=10, shared_keys=1001)) == (64, Kind.PROMPTS)


def test_keys_of_few_tokens_and_of_many() -> None:
    """Where tokens are decodes of their own, each reads its context. A larger step shares the keys, and takes no less
    than a step with few tokens."""
    time = replace(KNOWN, table=((1, 1e-3), (96, 1e-3), (128, 1e-3)), device={"own_key": 1e-6})
    few = StepShape(prompts=1, prompt_tokens=50, prompt_pairs=1275, prompt_keys=50)
    assert time.device_seconds(few) == pytest.approx(1e-3 + 1e-6 * 1275)
    more = few._replace(prompt_tokens=120, prompt_pairs=7260, prompt_keys=120)
    assert time.device_seconds(more) == pytest.approx(1e-3 + 1e-6 * 2000)  # half of what it might read
    slower = replace(time, table=((1, 1e-3), (96, 1e-3), (128, 4e-3)))
    assert slower.device_seconds(more) == pytest.approx(4e-3)


def test_what_sequences_share_comes_from_the_cache_if_it_is_still_there() -> None:
    """The keys of a recording have 1000 bytes each here, so the cache has room for 1000 of them."""
    recordings = replace(RECORDINGS, layer_key_bytes=1e3)
    time = StepTime(((1, 1e-3),), {"decode_key": 1e-6, "shared_key": 1e-7}, {}, 0.0, recordings, cache_bytes=1e6)
    fits = StepShape(decodes=4, decode_keys=1000, shared_keys=1500, shared_beginnings=500)
    assert time.device_seconds(fits) == pytest.approx(1e-3 + 1e-3)  # meanwhile 2000 keys come from the cache
    many = fits._replace(shared_keys=15_000)
    assert time.device_seconds(many) == pytest.approx(1e-3 + 500 * 1e-6 + 15_500 * 1e-7)
    beside_others = fits._replace(decode_keys=1600)  # 1100 of them belong to one sequence each
    assert time.lost_keys(beside_others) == 0.8 * 600
    assert time.device_seconds(beside_others) == pytest.approx(1e-3 + 2.08e-3)
    assert time.lost_keys(beside_others._replace(shared_keys=500)) == 0.8 * 500
    assert time.device_seconds(beside_others._replace(shared_beginnings=1000)) == pytest.approx(1e-3 + 2.8e-3)


def test_guesses_share_the_keys_of_their_sequence_in_a_recording_with_prompts() -> None:
    """Each guess reads the context once more in a recording of decodes, which may read 4000 keys here. In a recording
    with prompts no fewer are counted, and guesses read no others than their sequence."""
    time = StepTime(((1, 1e-3),), {"decode_key": 1e-6}, {}, 0.0, RECORDINGS)
    few, many = StepShape(10, 1000, guesses=10, guess_keys=3000), StepShape(10, 1000, guesses=10, guess_keys=9000)
    assert [RECORDINGS.run(shape)[1] for shape in (few, many)] == [Kind.DECODES, Kind.PROMPTS]
    assert time.device_seconds(few) == time.device_seconds(many) == pytest.approx(1e-3 + 4e-3)
    assert time.device_seconds(many._replace(decode_keys=6000)) == pytest.approx(1e-3 + 6e-3)


def test_launching_is_a_floor_and_no_addition() -> None:
    time = StepTime(((0, 0.0), (1000, 0.01)), {}, {}, launch=0.01, recordings=RECORDINGS)
    assert time.device_seconds(StepShape(prompts=70, prompt_tokens=100)) == 0.01
    assert time.device_seconds(StepShape(prompts=70, prompt_tokens=5000)) == pytest.approx(0.05)


KNOWN = StepTime(
    ((1, 7e-4), (64, 8e-4), (128, 9e-4), (512, 1.4e-3), (3000, 4e-3)),
    {"decode_key": 2.6e-8, "first_key": 2e-8, "key_beside_prompts": 1e-8, "prompt": 4e-6, "prompt_pair": 2e-10}
    | {"prompt_key": 4e-7, "own_key": 1e-8, "many_sequences": 3e-4, "guess_step": 1e-4, "masked": 5e-5}
    | {"shared_key": 1.1e-8},
    {"step": 5e-5, "sequence": 2e-6, "prompt_token": 0.0, "sample": 1e-6},
    0.009,
    RECORDINGS,
)


def drawn(count: int) -> list[StepShape]:
    draw = random.Random(0)
    found = []
    for _ in range(count):
        decodes, prompts = draw.choice([0, 1, 4, 16, 64, 200]), draw.choice([0, 0, 1, 3])
        tokens = draw.choice([20, 100, 400, 3000]) * prompts
        keys, context = decodes * draw.randint(50, 4000), draw.randint(50, 4000)
        guesses, masked = (draw.choice([0, 0, n]) for n in (2 * decodes, decodes))
        of_prompts = prompts, tokens, tokens * context
        longest, shared = context * (prompts > 0), draw.choice([0, 0, 4 * keys])
        found.append(StepShape(decodes, keys, *of_prompts, decodes + prompts, guesses, masked, longest, shared))
    return [shape for shape in found if shape.samples]


def test_the_fit_finds_a_known_cost_in_noisy_points() -> None:
    draw = random.Random(1)
    seen = [Observation(str(i), s, KNOWN.device_seconds(s) * draw.gauss(1, 0.02)) for i, s in enumerate(drawn(400))]
    found = fit_device(seen, RECORDINGS)
    missed = residuals(seen, found)
    assert missed.median < 2.5 and missed.worst < 12
    for shape in drawn(60):
        assert found.device_seconds(shape) == pytest.approx(KNOWN.device_seconds(shape), rel=0.03)
    assert found.launch == pytest.approx(KNOWN.launch, rel=0.02)
    for name in "decode_key", "prompt_key", "shared_key":
        assert found.device[name] == pytest.approx(KNOWN.device[name], rel=0.05)


def test_without_steps_that_share_keys_these_cost_as_much_as_those_of_one_prompt() -> None:
    known = replace(KNOWN, device={"decode_key": 1e-6, "own_key": 4e-7})
    alone = [StepShape(n, 100 * n, samples=n) for n in (1, 8, 16, 64)]
    alone += [StepShape(0, 0, 1, n, 20 * n, 1, prompt_keys=20) for n in (8, 16, 32, 64)]
    seen = [Observation(str(i), s, known.device_seconds(s)) for i, s in enumerate(alone)]
    found = fit_device(seen, RECORDINGS).device
    assert found["decode_key"] > found["shared_key"] == found["own_key"] > 0
    on_cpu = fit_device(seen, Recordings()).device
    assert on_cpu["own_key"] == 0 and on_cpu["shared_key"] == on_cpu["decode_key"] > 0


def test_the_fit_does_not_follow_a_few_steps_that_contradict_the_others() -> None:
    seen = [
        Observation(str(i), s, KNOWN.device_seconds(s) * (3 if i % 20 == 7 else 1)) for i, s in enumerate(drawn(400))
    ]
    found = fit_device(seen, RECORDINGS)
    for shape in drawn(60):
        assert found.device_seconds(shape) == pytest.approx(KNOWN.device_seconds(shape), rel=0.03)


def test_the_fit_of_the_host() -> None:
    steps = [(s, KNOWN.host_seconds(s), 0.01) for s in drawn(100)]
    found = replace(KNOWN, host=fit_host(steps))
    for shape in drawn(20):  # the last chunk of a prompt draws, so that a sequence and a sample are hard to tell apart
        assert found.host_seconds(shape) == pytest.approx(KNOWN.host_seconds(shape), rel=1e-6)


def test_the_fit_of_the_intake() -> None:
    added = [(n, n * length, n * 3e-5 + n * length * 2e-7, 1.0) for n in (1, 8, 30) for length in (10, 1000)]
    assert fit_counts(added) == pytest.approx((3e-5, 2e-7))


def test_least_squares_without_negative_factors() -> None:
    a, b = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]), np.array([3.0, 2.0, 1.0])
    assert non_negative_least_squares(a, b).tolist() == pytest.approx([2.0, 0.0])  # a slope below 0 would fit better
    assert non_negative_least_squares(a, np.array([3.0, 5.0, 7.0])).tolist() == pytest.approx([1.0, 2.0])


def test_least_squares_are_the_best_of_all_choices_of_columns() -> None:
    draw = np.random.default_rng(0)
    for _ in range(300):
        a, b = draw.uniform(size=(8, 4)), draw.uniform(size=8)  # columns that are much alike
        errors = [float(b @ b)]
        for chosen in range(1, 16):
            columns = a[:, [bool(chosen >> i & 1) for i in range(4)]]
            x = np.linalg.lstsq(columns, b, rcond=None)[0]
            if x.min() >= 0:
                errors.append(float(((columns @ x - b) ** 2).sum()))
        found = non_negative_least_squares(a, b)
        assert found.min() >= 0 and ((a @ found - b) ** 2).sum() == pytest.approx(min(errors))
