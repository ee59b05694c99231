"""The cost of a step: counts of real plans, cards, models that were not measured, and errors."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm.config import EngineConfig
from nanovllm.engine.engine import LLMEngine
from nanovllm.engine.plan import Scheduled, StepHandle, StepMasks, StepPlan, StepResult
from nanovllm.models.config import read_config
from nanovllm.sampling_params import SamplingParams
from nanovllm.simulate import costs as costs_module
from nanovllm.simulate.costs import Card, IntakeTime, ServerTime, StepShape, load_costs, shape_of
from nanovllm.simulate.fleet import FleetOptions
from nanovllm.simulate.needs import KINDS, Architecture, Needs, read_architecture
from nanovllm.simulate.scenario import Scenario, WorkloadOptions
from nanovllm.simulate.step_time import Kind, Recordings
from tests.simulate.test_step_time import KNOWN

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
    assert found[1] == StepShape(decodes=1, decode_keys=8, guess_keys=9 + 10, samples=1, guesses=2)


def test_keys_that_sequences_share_count_once_as_read() -> None:
    """Three prompts with the same 8 tokens, which are two blocks; the first is computed before the others come."""
    executor = Plans()
    config = EngineConfig(num_kv_blocks=64, kvcache_block_size=4, max_model_len=100, async_scheduling=False)
    engine = LLMEngine(executor, config, vocab_size=1000)
    shapes = []
    for number in range(4):
        if number < 3:
            ids = [*range(8), 100 + number, 200 + number]
            engine.add_request(str(number), ids, SamplingParams(max_tokens=9, ignore_eos=True))
        engine.advance()
        shapes.append(shape_of(executor.plans[-1], engine.scheduler))
    assert [(s.decodes, s.prompts, s.decode_keys, s.shared_keys, s.shared_beginnings) for s in shapes] == [
        (0, 1, 0, 0, 0),
        (1, 1, 11, 0, 0),
        (2, 1, 12 + 11 - 8, 8, 8),
        (3, 0, 13 + 12 + 11 - 16, 16, 8),
    ]
    assert shape_of(executor.plans[-1]) == shapes[-1]._replace(decode_keys=36, shared_keys=0, shared_beginnings=0)


def test_rows_with_masks() -> None:
    plan = StepPlan(0, [Scheduled(7, 0, 4, 1, True, ()), Scheduled(8, 1, 9, 1, True, ())], masked=[8])
    assert shape_of(plan) == StepShape(decodes=2, decode_keys=15, samples=2, masked=1)


# --- cards ------------------------------------------------------------------------------------------------------------

RATES = {"bytes_per_second": 1e9, "operations_per_second": 1e11}
SMALL = Architecture(1000, 64, 128, 4, 4, 2, 16, True, True, False, False, False)


def card(**more: Any) -> Card:
    facts: dict[str, Any] = {"card": "x1", "shape": "tiny", "tensor_parallel_size": 1, "architecture": SMALL}
    facts |= {"itemsize": 2, "source": "a grid of 3 steps", "rates": RATES, "kv_tokens": 10_000}
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
    with_a_cache = card(time=replace(KNOWN, cache_bytes=5e7))
    assert Card.read(with_a_cache.write(cards)) == with_a_cache


def test_a_card_that_knows_nothing_of_shared_keys(cards: Path) -> None:
    [path] = cards.iterdir()
    raw = json.loads(path.read_text())
    del raw["time"]["device"]["shared_key"]
    time = Card.from_json(raw).time
    alone = StepShape(decodes=8, decode_keys=800, samples=8)
    assert time.device_seconds(alone._replace(decode_keys=100, shared_keys=700)) == time.device_seconds(alone)


def test_a_measured_model_has_its_own_factors(cards: Path) -> None:
    found = load_costs("x1", "tiny")
    assert found.measured and found.source == "measured on x1 (a grid of 3 steps)"
    assert found.time == KNOWN and found.kv_tokens == 10_000
    assert load_costs(str(cards / "x1.tiny.json"), "tiny") == found


def test_an_engine_with_more_seats_than_were_measured_records_more() -> None:
    costs = load_costs("h200", "Qwen3-0.6B")
    assert costs.for_seats(512) == costs.for_seats(64) == costs
    more = costs.for_seats(1000)
    alone, beside = StepShape(600, 300_000, samples=600), StepShape(600, 300_000, 1, 100, 5050, 601, prompt_keys=100)
    for shape, kind in (alone, Kind.DECODES), (beside, Kind.PROMPTS):
        assert costs.time.recordings.run(shape)[1] is Kind.LAUNCHED
        assert more.time.recordings.run(shape) == (608 if shape is alone else 768, kind)
        assert more.device_seconds(shape) < costs.device_seconds(shape)
    assert more.time.recordings.run(StepShape(decodes=1000)) == (1000, Kind.DECODES)
    engine = EngineConfig(max_num_seqs=1000)
    scenario = Scenario(
        model="Qwen3-0.6B",
        card="h200",
        engine=engine,
        workload=WorkloadOptions(rate=1.0, queries=1),
        fleet=FleetOptions(),
    )
    assert scenario.costs == more


def test_another_model_costs_in_proportion(cards: Path, tmp_path: Path) -> None:
    """Twice the layers: what grows with them doubles, and the head, which is there once, does not."""
    deeper = write_config(tmp_path / "deeper", replace(SMALL, num_hidden_layers=8))
    found = load_costs("x1", deeper)
    assert not found.measured and "derived from tiny" in found.source
    for name in ("decode_key", "prompt_pair", "prompt_key", "own_key", "shared_key"):
        assert found.time.device[name] == pytest.approx(2 * KNOWN.device[name])
    assert found.time.launch == 2 * KNOWN.launch and found.time.device["masked"] == KNOWN.device["masked"]
    needs, more = Needs(SMALL, 2), Needs(replace(SMALL, num_hidden_layers=8), 2)
    rest = 7e-4 - needs.weight_bytes / 1e9
    assert found.time.of_tokens(1) == pytest.approx(more.weight_bytes / 1e9 + 2 * rest)
    for few, many in (1, 64), (64, 128), (600, 3000):
        grown, more_grown = (time.of_tokens(many) - time.of_tokens(few) for time in (KNOWN, found.time))
        assert more_grown == pytest.approx(2 * grown)
    assert found.kv_tokens == (10_000 * needs.key_bytes + needs.memory_bytes - more.memory_bytes) // more.key_bytes


def test_an_embedding_takes_memory_even_if_no_step_reads_it_whole(cards: Path, tmp_path: Path) -> None:
    two = replace(SMALL, tie_word_embeddings=False)
    found = load_costs("x1", write_config(tmp_path / "two", two))
    embedding = 2 * SMALL.vocab_size * SMALL.hidden_size
    assert found.kv_tokens == 10_000 - embedding // Needs(SMALL, 2).key_bytes
    assert found.time.of_tokens(1) == pytest.approx(KNOWN.of_tokens(1))


def test_experts_are_read_as_tokens_choose_them(cards: Path, tmp_path: Path) -> None:
    """Beside a dense model that is the same but for its MLPs."""
    with_experts = replace(SMALL, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=64, num_expert_layers=4)
    path = write_config(tmp_path / "experts", with_experts)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"model_type": "qwen3_moe"}))
    found, needs = load_costs("x1", path), Needs(with_experts, 2)
    assert not found.measured and "derived from tiny" in found.source
    free = replace(found.time, table=found.time.table[:1], device={}, launch=0.0, recordings=Recordings())
    rest = 7e-4 - Needs(SMALL, 2).weight_bytes / 1e9
    for batch in (1, 5, 300):
        expected = rest + needs.read_bytes(batch) / 1e9
        assert free.device_seconds(StepShape(decodes=batch)) == pytest.approx(expected)
    ratio = needs.token_operations / Needs(SMALL, 2).token_operations
    knee = found.time.table[2][0]  # behind the rows of 1 and of 64 tokens
    assert knee > 2 * 100
    assert found.time.of_tokens(knee) - found.time.of_tokens(1) == pytest.approx(KNOWN.of_tokens(100) - 7e-4, rel=0.1)
    grown, more_grown = (time.of_tokens(4000) - time.of_tokens(3500) for time in (KNOWN, found.time))
    assert more_grown == pytest.approx(ratio * grown)
    two = with_experts.share(2)
    assert two.num_expert_parameters == with_experts.num_expert_parameters / 2
    with pytest.raises(ValueError, match="and 128 and 64 neurons; choose a number that divides all of them"):
        replace(with_experts, num_attention_heads=256, num_key_value_heads=128).share(128)


def test_ranks_share_the_work_and_pay_for_sums(cards: Path) -> None:
    alone, two = load_costs("x1", "tiny"), load_costs("x1", "tiny", 2)
    assert two.time.device["decode_key"] == alone.time.device["decode_key"] / 2
    (_, at_one), (_, at_64), *_ = two.time.table
    assert at_64 - at_one == pytest.approx(8e-4 - 7e-4 + 63 * 9 * 1e-9 * 64 * 2)
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
