"""The elective on mixtures of experts: each of its parts, then Hugging Face's tokens under all circumstances."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.model import ModelConfig
from tests.electives.subject import make_subject
from tests.stages import conformance
from tests.stages.conformance import Conformance, run
from tests.stages.requests import PROMPTS, TIGHT, greedy
from tests.weights import lively_qwen3_moe

STORY_MOE = Path(__file__).parents[2] / "assets" / "story_moe"
Build = Callable[..., Path]


def mixed(directory: Path | str, **over: Any) -> Path:
    """Layers with and without experts, and weights of the experts that sum to one."""
    return lively_qwen3_moe(
        directory, **{"decoder_sparse_step": 2, "num_hidden_layers": 4, "norm_topk_prob": True} | over
    )


def one_expert(directory: Path | str, **over: Any) -> Path:
    return lively_qwen3_moe(directory, **{"num_experts_per_tok": 1} | over)


def all_experts(directory: Path | str, **over: Any) -> Path:
    return lively_qwen3_moe(directory, **{"num_experts_per_tok": 8, "mlp_only_layers": [1]} | over)


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Any:
    return make_subject("moe", request.config.getoption("impl"))


# --- the parts --------------------------------------------------------------------------------------------------------


def test_the_router_weighs_the_likeliest_experts(subject: Any) -> None:
    """Weights are probabilities among all experts, and only with `norm` do they sum to one; in fp32 from any dtype."""
    odds = torch.tensor([[1.0, 4.0, 2.0, 1.0], [5.0, 1.0, 1.0, 3.0]])
    for dtype in (torch.float32, torch.bfloat16):
        logits = odds.log().to(dtype)
        for norm in (False, True):
            weights, experts = subject.module.route(logits, 2, norm=norm)
            likeliest = [[1, 2], [0, 3]]
            assert experts.tolist() == likeliest, (
                f"experts {experts.tolist()}, the second result, but {likeliest} is right"
            )
            assert weights.dtype == torch.float32, f"route(logits in {dtype}): weights in {weights.dtype}, not float32"
            expected = logits.float().softmax(-1).gather(1, experts)
            expected = expected / expected.sum(-1, keepdim=True) if norm else expected
            wrong = (
                f"route(logits in {dtype}, norm={norm}): weights {weights.tolist()}, but {expected.tolist()} is right"
            )
            torch.testing.assert_close(weights, expected, atol=1e-5, rtol=0, msg=wrong)
    weights, experts = subject.module.route(odds.log(), 1, norm=True)
    assert experts.tolist() == [[1], [0]]
    assert weights.tolist() == [[1.0], [1.0]], "with norm, the weight of a token's only expert is 1"


def test_pairs_lie_by_expert_and_then_by_token(subject: Any) -> None:
    """Expert 0 has token 1, expert 2 has tokens 0 and 2, expert 3 all of them, and expert 1 and 4 have none."""
    order, counts = subject.module.sort_by_expert(torch.tensor([[3, 2], [0, 3], [2, 3]]), 5)
    found = (
        f"sort_by_expert of experts [[3, 2], [0, 3], [2, 3]]: pairs {order.tolist()}, but [2, 1, 4, 0, 3, 5] is right"
    )
    assert order.tolist() == [2, 1, 4, 0, 3, 5], f"{found}: pair 2 is the first choice of token 1, which is expert 0"
    found = f"the same, with 5 experts: counts {counts!r}, but the list [1, 0, 2, 3, 0] is right"
    assert type(counts) is list and counts == [1, 0, 2, 3, 0], found
    many = torch.arange(4096).view(-1, 2) % 3
    order, counts = subject.module.sort_by_expert(many, 3)
    assert order.tolist() == sorted(range(4096), key=lambda pair: pair % 3), "an expert's pairs stay in their order"
    assert counts == [1366, 1365, 1365]


def test_each_token_sums_its_own_answers_by_its_own_weights(subject: Any) -> None:
    experts = torch.tensor([[3, 2], [0, 3], [2, 3]])
    weights = torch.tensor([[0.5, 0.25], [1.0, 2.0], [0.125, 4.0]])
    order, _ = subject.module.sort_by_expert(experts, 4)
    token, choice = order // 2, order % 2
    answers = torch.stack([10.0**token, experts[token, choice].float()], dim=1)  # whose, and by whom
    expected = [[0.75, 0.5 * 3 + 0.25 * 2], [30.0, 2.0 * 3], [412.5, 0.125 * 2 + 4.0 * 3]]
    found = subject.module.combine(answers, order, weights)
    told = "an answer here is [1, 10 or 100 for token 0, 1 or 2; the number of its expert]"
    assert found.tolist() == expected, f"combine gives {found.tolist()}, but {expected} is right ({told})"
    half = subject.module.combine(answers.bfloat16(), order, weights)
    assert half.dtype == torch.bfloat16, "the weights are fp32, and the hidden state stays what it is"
    alone = subject.module.combine(answers[[3, 0]], torch.tensor([1, 0]), weights[:1])
    assert alone.shape == (1, 2), f"combine of one token has the shape {list(alone.shape)}, but [T, H] is [1, 2]"


def test_an_expert_without_tokens_is_not_run(subject: Any) -> None:
    config = ModelConfig(8, 4, 4, 1, 1, 1, 4, 8, 1e-6, 1e4, False, False, False, False, False, torch.float32)
    numbers = subject.module.ExpertConfig(4, 2, 3, True, frozenset())
    layer = subject.module.MixtureOfExperts(config, numbers)
    with torch.no_grad():
        layer.gate.weight.copy_(torch.eye(4))
    for expert in layer.experts:
        expert.register_forward_hook(lambda expert, inputs, _: ran.append(list(inputs[0].shape)))
    for x, expected in (
        ([[9.0, 0, 1, 0]], [[1, 4], [1, 4]]),
        ([[9.0, 0, 1, 0], [0, 0, 1, 2], [3, 0, 0, 1]], [[2, 4], [2, 4], [2, 4]]),
    ):
        ran: list[list[int]] = []
        layer(torch.tensor(x))
        assert ran == expected


# --- the whole --------------------------------------------------------------------------------------------------------


SLOW = pytest.mark.slow


@pytest.mark.parametrize("build", [mixed, *(pytest.param(b, marks=SLOW) for b in (one_expert, all_experts))])
def test_tokens_are_hf_s_in_a_pool_far_too_small(subject: Any, checkpoints: Path, build: Build) -> None:
    """In chunks, in company, and some of them preempted."""
    told: list[Any] = []
    options = TIGHT | {"num_blocks": 10, "max_num_seqs": 6, "on_event": told.append}
    outputs = run(subject, build(checkpoints), PROMPTS, greedy(12, ignore_eos=True), **options)
    assert any(event["type"] == "preempted" for event in told)
    assert len({token for output in outputs for token in output}) > 30


@SLOW
class TestConformance(Conformance):
    """The suite of the stages, whose dense models become mixtures of experts."""

    test_chats_are_hf_s = None  # type: ignore[assignment]  # there is no such model of this kind

    @pytest.fixture
    def story_model(self) -> Path:
        return STORY_MOE

    @pytest.mark.parametrize("number", [5])
    def test_stories_are_hf_s(self, subject: Any, story_model: Path, number: int) -> None:
        super().test_stories_are_hf_s(subject, story_model, number)

    @pytest.fixture(autouse=True)
    def models(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(conformance, "lively_qwen3", lively_qwen3_moe)
        monkeypatch.setattr(conformance, "random_llama", mixed)

    @pytest.mark.parametrize("build", [lively_qwen3_moe, mixed, one_expert, all_experts])
    def test_greedy_tokens_are_hf_s(self, subject: Any, checkpoints: Path, build: Build) -> None:
        super().test_greedy_tokens_are_hf_s(subject, checkpoints, build)


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def changed(tmp_path: Path, checkpoints: Path) -> Callable[..., Path]:
    """changed(edit of the tensors, config keys) -> a copy of a checkpoint with these changes. None drops a key."""

    def change(edit: Callable[[dict[str, Tensor]], Any] = lambda tensors: None, **config: Any) -> Path:
        path = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        shutil.copytree(lively_qwen3_moe(checkpoints), path)
        tensors = load_file(path / "model.safetensors")
        edit(tensors)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        raw = json.loads((path / "config.json").read_text()) | config
        (path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
        return path

    return change


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_local_experts": None, "num_experts": None}, "num_experts=None"),
        (
            {"moe_intermediate_size": 0, "num_experts_per_tok": None},
            "num_experts_per_tok=None, moe_intermediate_size=0",
        ),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 .* num_experts 8"),
        ({"model_type": "qwen3"}, "'qwen3' is not supported; supported are qwen3_moe"),
        ({"model_type": "mixtral"}, "'mixtral' is not supported"),
        ({"num_local_experts": 7}, r"unexpected .*experts\.7\.down_proj.*wrong shape .*gate\.weight is \(8, 64\)"),
        ({"moe_intermediate_size": 23}, r"experts\.0\.down_proj\.weight is \(64, 24\), config.json implies \(64, 23\)"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(
    subject: Any, changed: Callable[..., Path], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        subject.engine(changed(**config))


def test_both_spellings_of_the_number_of_experts(subject: Any, changed: Callable[..., Path]) -> None:
    for key in ("num_experts", "num_local_experts"):
        path = changed(**{"num_experts": None, "num_local_experts": None, key: 8})
        assert len(subject.engine(path).model.layers[0].mlp.experts) == 8


def test_a_missing_expert_is_named(subject: Any, changed: Callable[..., Path]) -> None:
    path = changed(lambda tensors: tensors.pop("model.layers.1.mlp.experts.5.up_proj.weight"))
    with pytest.raises(ValueError, match=r"missing \['layers\.1\.mlp\.experts\.5\.up_proj\.weight'\]"):
        subject.engine(path)


def test_stages_refuse_it(checkpoints: Path) -> None:
    from stages.checkpoint import load_model

    with pytest.raises(ValueError, match="'qwen3_moe' is not supported; supported are qwen3, qwen2, llama"):
        load_model(lively_qwen3_moe(checkpoints))
