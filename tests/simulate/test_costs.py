"""The cost of a step: counts of real plans, more work never takes less time, factors found again, cards and errors."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.plan import Scheduled, StepHandle, StepMasks, StepPlan, StepResult
from nanovllm.models.config import read_config
from nanovllm.sampling_params import SamplingParams
from nanovllm.simulate import costs as costs_module
from nanovllm.simulate.costs import Card, IntakeTime, ServerTime, StepShape, load_costs, shape_of
from nanovllm.simulate.fit import Observation, fit_device, fit_host, fit_intake, non_negative_least_squares
from nanovllm.simulate.needs import KINDS, Architecture, Needs, read_architecture
from nanovllm.simulate.step_time import DEVICE_TERMS, HOST_TERMS, Recordings, StepTime

# --- counts of real plans ---------------------------------------------------------------------------------------------


class Plans:
    """An executor that keeps the plans, and gives every sequence the token 1 and says that all guesses are right."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def add(self, key: int, token_ids: Sequence[int], params: SamplingParams) -> None: ...
    def remove(self, key: int) -> None: ...
    def close(self) -> None: ...

    def submit(self, plan: StepPlan) -> StepHandle:
        self.plans.append(plan)
        return Done({s.key: ([1] * (len(s.guesses) + 1), None) for s in plan.scheduled if s.sample})


class Done:
    def __init__(self, tokens: dict[int, Any]) -> None:
        self.tokens = tokens

    def guesses(self) -> dict[int, list[int]]:
        return {}

    unfiltered = frozenset[int]()

    def drawn(self) -> dict[int, int]:
        return {}

    def draw(self, masks: StepMasks) -> None: ...

    def result(self) -> StepResult:
        return StepResult(self.tokens)


def shapes_of(prompts: list[int], max_tokens: int, proposes: int = 0, **config: Any) -> list[StepShape]:
    """The shapes of all steps of prompts of these lengths, all there at once."""
    chosen = {"num_kv_blocks": 64, "kvcache_block_size": 4, "max_model_len": 100, "async_scheduling": False} | config
    executor = Plans()
    engine = LLMEngine(executor, EngineConfig(**chosen), vocab_size=1000)
    if proposes:
        engine.scheduler.proposer, engine.scheduler.max_guesses = Guesser(), proposes
    for i, length in enumerate(prompts):
        ids = [100 * i + n for n in range(length)]
        engine.add_request(str(i), ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    while engine.has_unfinished():
        engine.advance()
    return [shape_of(plan) for plan in executor.plans]


class Guesser:
    def propose(self, seq: Any, k: int) -> list[int | None]:
        return [1] * k


def test_chunks_and_decodes_of_one_prompt() -> None:
    chunk = StepShape(prompts=1, prompt_tokens=8, prompt_pairs=36, prompt_keys=8)
    assert shapes_of([20], 3, max_num_batched_tokens=8) == [
        chunk,
        chunk._replace(prompt_pairs=8 * 8 + 36, prompt_keys=16),
        StepShape(prompts=1, prompt_tokens=4, prompt_pairs=16 * 4 + 10, samples=1, prompt_keys=20),
        StepShape(decodes=1, decode_keys=21, samples=1),
        StepShape(decodes=1, decode_keys=22, samples=1),
    ]


def test_a_chunk_beside_decodes() -> None:
    found = shapes_of([2, 9], 4, max_num_batched_tokens=4)
    assert found[0] == StepShape(prompts=2, prompt_tokens=4, prompt_pairs=3 + 3, samples=1, prompt_keys=2)
    beside = 3 * 2 + 6  # three tokens, each of which sees the two before the chunk
    assert found[1] == StepShape(1, 3, prompts=1, prompt_tokens=3, prompt_pairs=beside, samples=1, prompt_keys=5)


def test_what_is_computed_anew_after_a_preemption_counts_as_a_prompt() -> None:
    found = shapes_of([8, 8], 20, num_kv_blocks=9, enable_prefix_caching=False)
    again = [shape for shape in found[1:] if shape.prompts]
    assert again and all(shape.prompt_tokens > 8 for shape in again)  # the prompt, and what had been generated


def test_guesses_and_the_keys_that_each_of_them_reads() -> None:
    found = shapes_of([5], 9, proposes=2)
    assert found[0] == StepShape(prompts=1, prompt_tokens=5, prompt_pairs=28, samples=1, guesses=2, prompt_keys=7)
    assert found[1] == StepShape(decodes=1, decode_keys=8 + 9 + 10, samples=1, guesses=2)


def test_rows_with_masks() -> None:
    plan = StepPlan(0, [Scheduled(7, 0, 4, 1, True, ()), Scheduled(8, 1, 9, 1, True, ())], masked=[8])
    assert shape_of(plan) == StepShape(decodes=2, decode_keys=15, samples=2, masked=1)


# --- the time of a shape ----------------------------------------------------------------------------------------------

RECORDINGS = Recordings((1, 2, 4, *range(8, 257, 8)), (64, 128, 256, 512), 64, 1e6, 1e3)
factor = st.floats(0, 1e-3)
numbers = st.integers(0, 2000)
shapes = st.builds(StepShape, *[numbers] * 9)
times = st.builds(
    StepTime,
    st.fixed_dictionaries(dict.fromkeys(DEVICE_TERMS, factor)),
    st.fixed_dictionaries(dict.fromkeys(HOST_TERMS, factor)),
    st.integers(0, 500),
    st.floats(0, 0.1),
    st.sampled_from([RECORDINGS, Recordings()]),
    st.floats(0, 0.1),
    st.floats(0, 1),
)


@given(times, shapes, shapes)
@settings(max_examples=60, deadline=None)
def test_more_work_never_takes_less_time(time: StepTime, shape: StepShape, more: StepShape) -> None:
    larger = StepShape(*map(sum, zip(shape, more, strict=True)))
    assert time.device_seconds(larger) >= time.device_seconds(shape) * (1 - 1e-12)
    assert time.host_seconds(larger) >= time.host_seconds(shape) * (1 - 1e-12)


def test_a_step_is_padded_to_its_recording_or_launched() -> None:
    run = RECORDINGS.run
    assert run(StepShape(decodes=9)) == (16, False)
    assert run(StepShape(decodes=9, prompts=1, prompt_tokens=1)) == (64, False)
    assert run(StepShape(decodes=63, prompts=1, prompt_tokens=1)) == (64, True)  # no room for a row of padding
    assert run(StepShape(prompts=1, prompt_tokens=513)) == (513, True)
    assert replace(RECORDINGS, layer_operations=5e3).run(StepShape(prompts=1, prompt_tokens=257)) == (512, True)
    assert Recordings().run(StepShape(decodes=300)) == (300, False)


def test_launching_is_a_floor_and_no_addition() -> None:
    time = StepTime({"token": 1e-5}, {}, launch=0.01, recordings=RECORDINGS)
    assert time.device_seconds(StepShape(prompts=70, prompt_tokens=100)) == 0.01
    assert time.device_seconds(StepShape(prompts=70, prompt_tokens=5000)) == pytest.approx(0.05)


KNOWN = StepTime(
    {"step": 7e-4, "token": 2e-7, "token_beyond_knee": 1.2e-6, "decode": 1e-6, "decode_key": 2.6e-8}
    | {"prompt_step": 3e-4, "prompt": 4e-6, "prompt_pair": 2e-10, "guess_step": 1e-4, "masked": 5e-5}
    | {"prompt_key": 4e-7},
    {"step": 5e-5, "sequence": 2e-6, "prompt_token": 0.0, "sample": 1e-6},
    160,
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
        longest = context * (prompts > 0)
        found.append(StepShape(decodes, keys, *of_prompts, decodes + prompts, guesses, masked, longest))
    return [shape for shape in found if shape.samples]


def test_the_fit_finds_a_known_cost_in_noisy_points() -> None:
    draw = random.Random(1)
    seen = [Observation(str(i), [s], KNOWN.device_seconds(s) * draw.gauss(1, 0.02)) for i, s in enumerate(drawn(400))]
    found, missed = fit_device(seen, RECORDINGS)
    assert missed.median < 2.5 and missed.worst < 12
    for shape in drawn(60):
        assert found.device_seconds(shape) == pytest.approx(KNOWN.device_seconds(shape), rel=0.03)
    assert found.launch == pytest.approx(KNOWN.launch, rel=0.02)
    for name in "decode_key", "prompt_key":
        assert found.device[name] == pytest.approx(KNOWN.device[name], rel=0.05)


def test_the_fit_finds_it_in_sums_over_whole_runs() -> None:
    all_shapes = drawn(400)
    runs = [all_shapes[i : i + 5] for i in range(0, len(all_shapes) - 5, 5)] + [[s] for s in all_shapes[:40]]
    seen = [Observation(str(i), run, sum(map(KNOWN.device_seconds, run))) for i, run in enumerate(runs)]
    assert fit_device(seen, RECORDINGS)[1].worst < 2


def test_the_fit_of_the_host() -> None:
    steps = [(s, KNOWN.host_seconds(s), 0.01) for s in drawn(100)]
    found = replace(KNOWN, host=fit_host(steps))
    for shape in drawn(20):  # the last chunk of a prompt draws, so that a sequence and a sample are hard to tell apart
        assert found.host_seconds(shape) == pytest.approx(KNOWN.host_seconds(shape), rel=1e-6)


def test_the_fit_of_the_intake() -> None:
    added = [(n, n * length, n * 3e-5 + n * length * 2e-7, 1.0) for n in (1, 8, 30) for length in (10, 1000)]
    assert fit_intake(added) == pytest.approx((3e-5, 2e-7))


def test_least_squares_without_negative_factors() -> None:
    import numpy as np

    a, b = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]), np.array([3.0, 2.0, 1.0])
    assert non_negative_least_squares(a, b).tolist() == pytest.approx([2.0, 0.0])  # a slope below 0 would fit better
    assert non_negative_least_squares(a, np.array([3.0, 5.0, 7.0])).tolist() == pytest.approx([1.0, 2.0])


def test_least_squares_are_the_best_of_all_choices_of_columns() -> None:
    import numpy as np

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


# --- cards ------------------------------------------------------------------------------------------------------------

SMALL = Architecture(1000, 64, 128, 4, 4, 2, 16, True, True, False, False, False)


def card(**more: Any) -> Card:
    facts: dict[str, Any] = {"card": "x1", "shape": "tiny", "tensor_parallel_size": 1, "architecture": SMALL}
    facts |= {"itemsize": 2, "source": "a grid of 3 steps", "rates": {"bytes_per_second": 1e9}, "kv_tokens": 10_000}
    facts |= {
        "time": KNOWN,
        "server": ServerTime(1e-3, 1e-6, 2e-5),
        "intake": IntakeTime(1e-5, 1e-7),
        "all_reduce": {"2": [1e-5, 1e-9]},
    }
    facts |= {"residuals": {}, "machine": {"device": "X1"}, "commit": {}, "points": []}
    return Card(**facts | more)


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(costs_module, "CARDS", tmp_path)
    card().write(tmp_path)
    return tmp_path


def test_a_card_survives_its_file(cards: Path) -> None:
    [path] = cards.iterdir()
    assert path.name == "x1.tiny.json"
    assert Card.read(path) == card()


def test_a_measured_model_has_its_own_factors(cards: Path) -> None:
    found = load_costs("x1", "tiny")
    assert found.measured and found.source == "measured on x1 (a grid of 3 steps)"
    assert found.time == KNOWN and found.kv_tokens == 10_000
    assert load_costs(str(cards / "x1.tiny.json"), "tiny") == found


def test_another_model_costs_in_proportion(cards: Path, tmp_path: Path) -> None:
    """Twice the layers: what grows with them doubles, and the head, which is there once, does not."""
    deeper = write_config(tmp_path / "deeper", replace(SMALL, num_hidden_layers=8))
    found = load_costs("x1", deeper)
    assert not found.measured and "derived from tiny" in found.source
    for name in ("token_beyond_knee", "decode_key", "prompt_pair", "decode"):
        assert found.time.device[name] == pytest.approx(2 * KNOWN.device[name])
    assert found.time.launch == 2 * KNOWN.launch and found.time.device["masked"] == KNOWN.device["masked"]
    needs, more = Needs(SMALL, 2), Needs(replace(SMALL, num_hidden_layers=8), 2)
    rest = KNOWN.device["step"] - needs.weight_bytes / 1e9
    assert found.time.device["step"] == pytest.approx(more.weight_bytes / 1e9 + 2 * rest)
    assert found.kv_tokens == (10_000 * needs.key_bytes + needs.memory_bytes - more.memory_bytes) // more.key_bytes


def test_an_embedding_takes_memory_even_if_no_step_reads_it_whole(cards: Path, tmp_path: Path) -> None:
    two = replace(SMALL, tie_word_embeddings=False)
    found = load_costs("x1", write_config(tmp_path / "two", two))
    embedding = 2 * SMALL.vocab_size * SMALL.hidden_size
    assert found.kv_tokens == 10_000 - embedding // Needs(SMALL, 2).key_bytes
    assert found.time.device["step"] == pytest.approx(KNOWN.device["step"])


def test_experts_are_read_as_tokens_choose_them(cards: Path, tmp_path: Path) -> None:
    """Beside a dense model that is the same but for its MLPs."""
    with_experts = replace(SMALL, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=64, num_expert_layers=4)
    path = write_config(tmp_path / "experts", with_experts)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"model_type": "qwen3_moe"}))
    found, needs = load_costs("x1", path), Needs(with_experts, 2)
    assert not found.measured and "derived from tiny" in found.source
    free = replace(found.time, device={"step": found.time.device["step"]}, launch=0.0, recordings=Recordings())
    rest = KNOWN.device["step"] - Needs(SMALL, 2).weight_bytes / 1e9
    for batch in (1, 5, 300):
        expected = rest + needs.read_bytes(batch) / 1e9
        assert free.device_seconds(StepShape(decodes=batch)) == pytest.approx(expected)
    ratio = needs.token_operations / Needs(SMALL, 2).token_operations
    assert found.time.device["token_beyond_knee"] == pytest.approx(ratio * KNOWN.device["token_beyond_knee"])
    assert found.time.knee > 2 * KNOWN.knee
    two = with_experts.share(2)
    assert two.num_expert_parameters == with_experts.num_expert_parameters / 2
    with pytest.raises(ValueError, match="and 128 and 64 neurons; choose a number that divides all of them"):
        replace(with_experts, num_attention_heads=256, num_key_value_heads=128).share(128)


def test_ranks_share_the_work_and_pay_for_sums(cards: Path) -> None:
    alone, two = load_costs("x1", "tiny"), load_costs("x1", "tiny", 2)
    assert two.time.device["decode_key"] == alone.time.device["decode_key"] / 2
    assert two.time.device["token"] == pytest.approx(alone.time.device["token"] + 9 * 1e-9 * 64 * 2)
    with pytest.raises(ValueError, match="tensor_parallel_size=4: sums over so many ranks were not measured on x1"):
        load_costs("x1", "tiny", 4)
    with pytest.raises(ValueError, match="tensor_parallel_size=3 does not fit a model of 4 heads"):
        load_costs("x1", "tiny", 3)


def test_an_unknown_card_and_an_unknown_model(cards: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"card='h9000' is not known; known are x1\. .*--card FILE"):
        load_costs("h9000", "tiny")
    with pytest.raises(ValueError, match=r"model='huge' is neither .* on x1, where tiny was\. .*--card FILE"):
        load_costs("x1", "huge")
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"rows": []}))
    with pytest.raises(ValueError, match=r"is no file of step costs.*step_costs --out DIR"):
        load_costs(str(other), "tiny")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        load_costs(str(tmp_path / "missing.json"), "tiny")


def test_a_model_that_is_too_large_for_the_card(cards: Path, tmp_path: Path) -> None:
    huge = write_config(tmp_path / "huge", replace(SMALL, num_hidden_layers=4000))
    with pytest.raises(ValueError, match="leave no memory for keys on x1; raise tensor_parallel_size=1"):
        load_costs("x1", huge)


def write_config(path: Path, model: Architecture) -> Path:
    path.mkdir()
    numbers = {name: value for name, value in vars(model).items() if not name.endswith(("bias", "norm"))}
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "dtype": "bfloat16", **numbers}))
    return path


def test_a_kind_of_model_that_is_not_counted_is_refused(tmp_path: Path) -> None:
    assert list(KINDS) == ["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "smollm3", "seed_oss"]
    config = json.loads((Path(__file__).parents[2] / "benchmarks/shapes/Qwen3-0.6B/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    with pytest.raises(ValueError, match="model_type 'mistral' is not supported; choose a model of llama"):
        read_architecture(tmp_path)
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | experts | {"sliding_window": 4096}))
    with pytest.raises(ValueError, match="sliding_window is not supported; choose a model without windows"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"use_sliding_window": True}))
    with pytest.raises(ValueError, match="use_sliding_window is not supported; choose a model without windows"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(("said", "heads"), [({}, 4), ({"num_key_value_heads": None}, 16)])
def test_key_value_heads_that_config_json_leaves_out_are_the_family_s(
    tmp_path: Path, said: dict[str, None], heads: int
) -> None:
    """As the engine reads them, and Hugging Face."""
    raw = json.loads((Path(__file__).parents[2] / "benchmarks/shapes/Qwen3-0.6B/config.json").read_text())
    raw |= {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    del raw["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(raw | said))
    assert read_architecture(tmp_path)[0].num_key_value_heads == heads == read_config(tmp_path).num_key_value_heads
