"""The mixture of experts as it is trained: Hugging Face's results and gradients, and a loss that balances."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.weights import lively_qwen3, lively_qwen3_moe
from training.experts import BALANCE, balancing_loss, compute_all_experts, counts_of_experts, layers_of_experts
from training.models import make_model, save

IDS = torch.tensor([[3, 141, 59, 26, 5, 358], [97, 9, 32, 38, 46, 0]])
REAL = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])


@pytest.mark.parametrize("norm", [False, True])
def test_all_experts_computed_give_the_results_and_gradients_of_the_chosen(tmp_path: Path, norm: bool) -> None:
    path = lively_qwen3_moe(tmp_path, norm_topk_prob=norm)
    theirs, ours = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(2))
    names = list(ours.state_dict())
    compute_all_experts(ours)
    logits = [model(IDS, use_cache=False).logits for model in (theirs, ours)]
    torch.testing.assert_close(logits[1], logits[0], atol=2e-4, rtol=1e-4)
    for scores in logits:
        scores.log_softmax(-1)[..., 7].sum().backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and b.grad.abs().max() > 0, name
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4 * float(b.grad.abs().max()), rtol=1e-3)
    assert list(ours.state_dict()) == names, "the checkpoint stays Hugging Face's"


def test_the_balancing_loss_counts_real_tokens_layer_by_layer(tmp_path: Path) -> None:
    """An even router costs K; one that sends all to the same experts costs more; padding costs nothing."""
    model = AutoModelForCausalLM.from_pretrained(lively_qwen3_moe(tmp_path), dtype=torch.float32)
    compute_all_experts(model)
    blocks = layers_of_experts(model)
    chosen = torch.eye(8).repeat(2, 1)[:12] * 9  # each token another expert
    for block in blocks:
        block.router_logits = chosen.clone()
    even = torch.ones(2, 6, dtype=torch.bool)
    even[1, 2:] = False  # eight real tokens, of which each has another favourite
    balanced = float(balancing_loss(model, even))
    assert balanced == pytest.approx(BALANCE * 3, rel=0.05)
    for block in blocks:
        block.router_logits[:8] = torch.tensor([9.0, 8, 7, 0, 0, 0, 0, 0])
    one_sided = float(balancing_loss(model, even))
    assert one_sided > 2 * balanced
    for block in blocks:
        block.router_logits[8:] = 5.0
    assert float(balancing_loss(model, even)) == pytest.approx(one_sided)
    assert counts_of_experts(model, even).tolist() == [[8, 8, 8, 0, 0, 0, 0, 0]] * len(blocks)
    # Two layers that are one-sided towards different experts do not make up for each other
    blocks[0].router_logits[:8] = torch.tensor([0.0, 0, 0, 0, 0, 7, 8, 9])
    assert float(balancing_loss(model, even)) == pytest.approx(one_sided)
    dense = AutoModelForCausalLM.from_pretrained(lively_qwen3(tmp_path), dtype=torch.float32)
    assert float(balancing_loss(dense, even)) == 0


def test_a_saved_model_is_whole_and_replaces_the_last(tmp_path: Path) -> None:
    model = make_model("moe", 0)
    for seed in range(2):
        with torch.no_grad():
            model.model.norm.weight.fill_(1 + seed)
        save(model, tmp_path)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert saved.dtype == torch.bfloat16 and saved.model.norm.weight[0].item() == 1 + seed
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors"}
    assert (tmp_path / "model.safetensors").stat().st_size < 11_000_000
    assert model.dtype == torch.float32, "training goes on in float32"
