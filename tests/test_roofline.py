"""The arithmetic behind the engine's benchmarks: the headline workload, its limit, idle time from a trace."""

import json
import random
from pathlib import Path

import pytest
import torch

from benchmarks.engine import SHAPE, steps
from benchmarks.lib import roofline, workloads
from nanovllm.engine.plan import Scheduled, StepPlan
from nanovllm.models.config import read_config
from nanovllm.models.transformer import Transformer
from nanovllm.simulate.needs import KINDS, Needs, read_architecture

# --- the workload and its limit --------------------------------------------------------------------------------------


def test_the_headline_workload_is_the_one_that_others_quote() -> None:
    prompts, max_tokens = workloads.headline(0)
    assert (len(prompts), sum(map(len, prompts)), sum(max_tokens)) == (256, 142_827, 133_966)
    assert prompts[0][:4] == [6311, 6890, 663, 4242] and max_tokens[:3] == [845, 312, 607]


def test_later_rounds_have_the_same_lengths_and_nothing_in_common() -> None:
    rounds = [workloads.headline(n) for n in (0, 1, 2)]
    lengths = [([len(p) for p in prompts], max_tokens) for prompts, max_tokens in rounds]
    assert lengths[0] == lengths[1] == lengths[2]
    beginnings = {tuple(p[:16]) for prompts, _ in rounds for p in prompts}
    assert len(beginnings) == 3 * 256, "a prefix cache would find something"


def test_the_roofline_of_the_headline() -> None:
    costs = roofline.headline_costs(SHAPE, workloads.HEADLINE, itemsize=2)
    assert (costs.prompt_tokens, costs.output_tokens) == (142_827, 133_966)
    assert round(costs.kv_bytes / 1e12, 2) == 13.85
    assert round(costs.weight_bytes / 1e12, 2) == 1.22
    limits = roofline.Limits(bytes_per_second=3.125e12, operations_per_second=741e12)
    assert limits.tokens_per_second(costs) == pytest.approx(26_700, rel=0.005)


def test_costs_are_what_counting_step_by_step_gives() -> None:
    c, _ = read_architecture(SHAPE)
    prompts, outputs = [3, 10, 1], [4, 1, 6]
    costs = roofline.costs_of(c, prompts, outputs, itemsize=2)
    matrices = c.num_hidden_layers * (
        c.hidden_size * c.head_dim * (2 * c.num_attention_heads + 2 * c.num_key_value_heads)
        + 3 * c.hidden_size * c.intermediate_size
    )
    keys = sum(p + step for p, n in zip(prompts, outputs, strict=True) for step in range(1, n))
    pairs = sum(query + 1 for p in prompts for query in range(p))
    assert costs.kv_bytes == keys * 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 2
    assert costs.weight_bytes == 5 * 2 * c.num_parameters
    assert costs.prefill_operations == 2 * (
        14 * matrices + 3 * c.vocab_size * c.hidden_size
    ) + pairs * c.num_hidden_layers * c.num_attention_heads * (4 * c.head_dim)


def test_the_least_of_all_steps_is_the_limit_of_the_run() -> None:
    """Prompts in two chunks, decodes beside them, sequences that end at different times."""
    (c, _), limits = read_architecture(SHAPE), roofline.Limits(bytes_per_second=3e12, operations_per_second=7e14)
    plans = [
        [Scheduled(0, 0, 0, 3, True, ()), Scheduled(1, 1, 0, 6, False, ())],
        [Scheduled(0, 0, 3, 1, True, ()), Scheduled(1, 1, 6, 4, True, ())],
        [Scheduled(0, 0, 4, 1, True, ()), Scheduled(1, 1, 10, 1, True, ())],
        [Scheduled(0, 0, 5, 1, True, ())],
    ]
    found = [steps.least_of(StepPlan(i, plan), Needs(c, 2), limits) for i, plan in enumerate(plans)]
    assert [kind for kind, _ in found] == [steps.PROMPTS] * 2 + [steps.kind_of(2)] * 2
    costs = roofline.costs_of(c, [3, 10], [4, 2], itemsize=2)
    # the limit has weights in each of the three steps that request 0 decodes in, one of which has a prompt beside it
    beside = costs.weight_bytes / 3 / limits.bytes_per_second
    assert sum(least for _, least in found) == pytest.approx(limits.seconds(costs) - beside)


def test_the_kinds_of_decode_steps() -> None:
    assert [steps.kind_of(n) for n in (1, 32, 33, 64, 65, 193, 256, 257)] == [
        "decode, 1 to 32", "decode, 1 to 32", "decode, 33 to 64", "decode, 33 to 64",
        "decode, 65 to 128", "decode, 193 to 256", "decode, 193 to 256", "decode, 193 to 256",
    ]  # fmt: skip


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("switch", [False, True])
def test_parameters_are_counted_as_the_model_has_them(family: str, switch: bool, tmp_path: Path) -> None:
    raw = json.loads((SHAPE / "config.json").read_text())
    switches = dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), switch)
    if KINDS[family].experts is not None:
        experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "mlp_only_layers": [1]}
        raw |= experts | {"shared_expert_intermediate_size": 40}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": family, "num_hidden_layers": 2} | switches))
    with torch.device("meta"):
        model = Transformer(read_config(tmp_path), max_model_len=1)
    counted, itemsize = read_architecture(tmp_path)
    assert itemsize == 2
    assert counted.num_parameters == sum(p.numel() for p in model.parameters())
    assert counted.num_matrix_parameters == sum(p.numel() for p in model.layers.parameters() if p.dim() > 1)
    of_experts = sum(p.numel() for p in model.layers.parameters() if p.dim() == 3)
    assert counted.num_expert_parameters == of_experts and (of_experts > 0) == (KINDS[family].experts is not None)
    assert counted.num_matrix_parameters - counted.num_active_parameters == pytest.approx(of_experts * 5 / 8)
    assert counted.num_head_parameters == model.embed_tokens.weight.numel()


def test_the_parameters_of_qwen3() -> None:
    assert read_architecture(SHAPE)[0].num_parameters == 596_049_920
    experts = read_architecture(workloads.SHAPES / "Qwen3-30B-A3B")[0]
    assert experts.num_parameters == 30_532_122_624
    assert experts.num_active_parameters + 2 * experts.num_head_parameters == pytest.approx(3.35e9, rel=0.01)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    """As drawing at random finds them, and each token alone its own ones."""
    needs, draw = Needs(read_architecture(workloads.SHAPES / "Qwen3-30B-A3B")[0], 2), random.Random(0)
    rest, each = needs.weight_bytes - needs.expert_bytes, needs.expert_bytes / 128
    assert needs.read_bytes(1) == pytest.approx(rest + 8 * each)
    for num_tokens in (2, 32, 300):
        drawn = [len({e for _ in range(num_tokens) for e in draw.sample(range(128), 8)}) for _ in range(200)]
        assert needs.read_bytes(num_tokens) == pytest.approx(rest + sum(drawn) / len(drawn) * each, rel=0.01)
    costs = roofline.costs_of(read_architecture(workloads.SHAPES / "Qwen3-30B-A3B")[0], [3, 3], [2, 4])
    assert costs.weight_bytes == needs.read_bytes(2) + 2 * needs.read_bytes(1)


# --- idle time -------------------------------------------------------------------------------------------------------


def trace(*kernels_of_steps: list[tuple[float, float]]) -> list[steps.Event]:
    """A trace in which step n is marked at 100 n and launches its kernels (start, duration), all as one graph."""
    events: list[steps.Event] = []
    for n, work in enumerate(kernels_of_steps):
        events.append({"cat": "user_annotation", "name": steps.MARK, "ts": 100.0 * n, "dur": 50})
        events.append(
            {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 100.0 * n + 9, "args": {"correlation": n}}
        )
        events += [{"cat": "kernel", "ts": s, "dur": d, "args": {"correlation": n}} for s, d in work]
    return events


def test_idle_time_between_and_within_steps() -> None:
    events = trace([(10, 20), (35, 15)], [(60, 40)], [(100, 10), (105, 5)])
    found = steps.shares(events)
    assert found["idle_between_percent"] == 10  # 50 to 60, of 10 to 110
    assert found["idle_inside_percent"] == 5  # 30 to 35
    assert found["busy_percent"] == 85
    assert found["kernels_per_step"] == 5 / 3


def test_a_kernel_belongs_to_the_step_that_launched_it() -> None:
    """With asynchronous scheduling it may run long after the next step was marked."""
    found = steps.shares(trace([(210, 10)], [(230, 10)], [(240, 20)]))
    assert found["idle_between_percent"] == 20 and found["idle_inside_percent"] == 0


def test_work_from_before_the_trace_is_left_out() -> None:
    before = {"cat": "kernel", "ts": -500.0, "dur": 10, "args": {"correlation": 99}}
    events = trace([(10, 10)], [(30, 10)])
    assert steps.shares([before, *events]) == steps.shares(events)


def test_a_trace_without_steps_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 steps"):
        steps.shares(trace([(10, 10)]))
