"""What all stages share: sampling parameters, the sampler, the end of a sequence, the manifest."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stages.core import SamplingParams, Sequence, Trace, append_token, make_sequences, sample
from stages.manifest import load_stage, load_stages
from tests import oracle


def sequence(temperature: float, seed: int = 0, num_output: int = 0, **params: Any) -> Sequence:
    return Sequence(0, [1, 2] + [3] * num_output, 2, SamplingParams(temperature, **params), seed)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens.*0"),
        ({"max_tokens": -1}, "max_tokens.*-1"),
        ({"temperature": -0.5}, r"temperature.*-0\.5"),
        ({"temperature": float("nan")}, "temperature.*nan"),
        ({"temperature": float("inf")}, "temperature.*inf"),
    ],
)
def test_scheduler_s6_parameters_that_make_no_sense(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(top_q=1)  # type: ignore[call-arg]


def test_sampler_m1_tiny_temperatures_agree_with_greedy() -> None:
    """Wide logits, temperatures mixed in a batch: 0 is the exact argmax, tiny values agree, nothing is NaN."""
    logits = 40 * torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    rows = [sequence(t, seed=i) for i, t in enumerate((0.0, 1e-5, 1e-4, 1e-3, 0.0))]
    assert sample(logits, rows) == logits.argmax(-1).tolist()
    best = torch.zeros(1, 100)
    best[0, 7] = torch.finfo(torch.float32).eps  # ahead by the smallest margin there is
    assert sample(best, [sequence(0.0)]) == [7]


def test_the_noise_depends_on_seed_and_index_alone() -> None:
    logits = torch.zeros(1, 1000)
    chosen = {(seed, n): sample(logits, [sequence(1.0, seed, n)])[0] for seed in range(5) for n in range(5)}
    assert len(set(chosen.values())) > 20
    batch = [sequence(1.0, seed, n) for seed, n in reversed(chosen)]
    assert sample(logits.expand(25, -1), batch) == list(reversed(chosen.values()))


def test_draws_have_the_odds_of_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0, 0.5])
    for temperature in (0.5, 1.0, 2.0):
        draws = sample(logits.expand(4000, -1), [sequence(temperature, seed) for seed in range(4000)])
        oracle.check_distribution(draws, (logits.double() / temperature).softmax(-1))


@pytest.mark.parametrize(
    ("output", "params", "reason"),
    [
        ([5], {"max_tokens": 2}, None),
        ([5, 6], {"max_tokens": 2}, "length"),
        ([9], {"max_tokens": 2}, "stop"),
        ([5, 8], {"max_tokens": 2}, "stop"),
        ([9], {"max_tokens": 2, "ignore_eos": True}, None),
        ([5, 9], {"max_tokens": 2, "ignore_eos": True}, "length"),
    ],
)
def test_why_a_sequence_is_over(output: list[int], params: dict[str, Any], reason: str | None) -> None:
    told: list[dict[str, Any]] = []
    seq = Sequence(3, [9, 8, *output[:-1]], 2, SamplingParams(**params), 0)  # EOS ids in the prompt end nothing
    assert append_token(seq, output[-1], frozenset({8, 9}), Trace(told.append)) == (reason is not None)
    assert seq.output == output and told[0]["ids"] == output[-1:]
    assert [event["reason"] for event in told if event["type"] == "finished"] == ([reason] if reason else [])


def test_prompts_are_copied_and_checked() -> None:
    prompt = [1, 2, 3]
    [seq] = make_sequences([prompt], SamplingParams(max_tokens=5), vocab_size=10, max_model_len=8)
    seq.token_ids.append(4)
    assert prompt == [1, 2, 3] and (seq.limit, seq.max_slots) == (8, 7)
    with pytest.raises(ValueError, match=r"prompts\[0\]: 4 prompt tokens \+ max_tokens 5 exceed .* 8 positions"):
        make_sequences([seq.token_ids], SamplingParams(max_tokens=5), vocab_size=10, max_model_len=8)


def test_the_manifest_and_the_files_agree() -> None:
    stages = load_stages()
    assert [stage.number for stage in stages] == list(range(1, len(stages) + 1))
    directory = Path(load_stages.__code__.co_filename).parent
    assert {f"{stage.module_name}.py" for stage in stages} == {f.name for f in directory.glob("stage_*.py")}
    for stage in stages:
        assert stage.engine_class().__name__ == stage.class_name
        assert len((directory / f"{stage.module_name}.py").read_text(encoding="utf-8").splitlines()) < 300
    with pytest.raises(ValueError, match="no stage 99"):
        load_stage(99)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.array, torch.tensor])
def test_engine_e4_integers_of_other_libraries_are_token_ids(kind: Any) -> None:
    limits = {"vocab_size": 512, "max_model_len": 4096}
    for prompt in [kind(3), kind(511)], np.array([3, 511], dtype=np.int32), torch.tensor([3, 511]):
        [seq] = make_sequences([prompt], SamplingParams(), **limits)  # type: ignore[list-item]
        assert seq.token_ids == [3, 511] and {type(token) for token in seq.token_ids} == {int}
    with pytest.raises(ValueError, match="empty"):
        make_sequences([np.array([], dtype=np.int64)], SamplingParams(), **limits)  # type: ignore[list-item]
