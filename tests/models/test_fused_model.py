"""The engine with the kernels that a GPU would use, in Triton's interpreter: the same tokens as without them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from nanovllm import LLM, SamplingParams, kernels
from nanovllm.kernels import FusedKernels
from nanovllm.kernels.fused.add_rms_norm import add_rms_norm
from nanovllm.kernels.fused.norm_rope_write import norm_rope_write
from nanovllm.kernels.fused.sample import sample_rows
from nanovllm.kernels.fused.silu_and_mul import gelu_and_mul, silu_and_mul
from nanovllm.kernels.moe.grouped_mlp import grouped_mlp
from nanovllm.kernels.moe.route import route
from nanovllm.layers.norm import rms_norm
from nanovllm.sampling import sampler
from tests.weights import lively_gemma3, lively_qwen3, lively_qwen3_moe, random_llama, random_qwen2, random_qwen2_moe

OF_EXPERTS = {"route": route, "grouped_mlp": grouped_mlp}
KERNELS = {
    "add_rms_norm": add_rms_norm,
    "norm_rope_write": norm_rope_write,
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": gelu_and_mul,
    "sample_rows": sample_rows,
    **OF_EXPERTS,
}


def tokens(path: Path) -> list[list[int]]:
    params = [SamplingParams(temperature=t, seed=3, max_tokens=6, ignore_eos=True) for t in (0.0, 0.9)]
    prompts = [{"prompt_token_ids": [5, 9, 2, 7]}, {"prompt_token_ids": [11, 3, 8]}]
    with LLM(path, device="cpu", skip_tokenizer_init=True, kv_cache_gib=0.01, max_model_len=64, max_num_seqs=4) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(
    ("build", "head_dim"),
    [
        pytest.param(lively_qwen3, 32, id="Qwen3, heads of 32"),
        pytest.param(random_qwen2, 24, id="Qwen2, heads of 24, which Triton's vectors cannot be"),
        pytest.param(lively_qwen3, 24, id="Qwen3, heads of 24", marks=pytest.mark.slow),
        pytest.param(random_qwen2, 32, id="Qwen2, heads of 32", marks=pytest.mark.slow),
        pytest.param(lively_qwen3_moe, 32, id="Qwen3-MoE", marks=pytest.mark.slow),
        pytest.param(random_qwen2_moe, 16, id="Qwen2-MoE", marks=pytest.mark.slow),
        pytest.param(lively_gemma3, 32, id="Gemma 3", marks=pytest.mark.slow),
    ],
)
def test_the_kernels_change_no_token(
    build: object, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 4 * head_dim} if build in (random_qwen2, random_qwen2_moe) else {"head_dim": head_dim}
    path = build(tmp_path, **sizes)  # type: ignore[operator]
    expected = tokens(path)
    used = set()

    def counted(name: str, kernel: object) -> object:
        def call(*args: object, **options: object) -> object:
            used.add(name)
            return kernel(*args, **options)  # type: ignore[operator]

        return call

    fused = FusedKernels(**{name: counted(name, kernel) for name, kernel in KERNELS.items()})  # type: ignore[arg-type]

    def for_cpu(device: torch.device) -> FusedKernels:
        return fused

    monkeypatch.setattr(kernels, "fused_kernels", for_cpu)
    monkeypatch.setattr(sampler, "fused_kernels", for_cpu)
    assert tokens(path) == expected
    unused = {"norm_rope_write"} if head_dim == 24 else set()
    unused |= set() if build in (lively_qwen3_moe, random_qwen2_moe) else OF_EXPERTS.keys()
    unused.add("silu_and_mul" if build is lively_gemma3 else "gelu_and_mul")
    unused |= {"silu_and_mul"} if build is lively_qwen3_moe else set()  # no layer has a plain MLP
    assert used == KERNELS.keys() - unused


@pytest.mark.parametrize(
    ("build", "sizes", "inside"),
    [
        pytest.param(lively_qwen3, {}, {"plain", "gated"}, id="Qwen3"),
        pytest.param(random_qwen2, {}, {"plain", "gated"}, id="Qwen2, with biases of q, k, v"),
        pytest.param(random_llama, {"mlp_bias": True}, {"plain"}, id="Llama, with biases of the MLP"),
        pytest.param(random_qwen2_moe, {}, {"plain"}, id="Qwen2-MoE: two layers read the norm before the experts"),
        pytest.param(lively_gemma3, {}, set(), id="Gemma 3, whose norms are before the addition, too"),
    ],
)
def test_a_norm_that_the_next_layer_computes_changes_no_token(
    build: Any, sizes: dict[str, Any], inside: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in in PyTorch: the kernel runs on Hopper alone. It is for few tokens: 4 of a prompt, not 7."""
    path = build(tmp_path, **sizes)
    expected = tokens(path)
    used = set()

    def choose(num_tokens: int, weight: Tensor, *, gated: bool) -> Any:
        def norm_linear(
            x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            used.add("gated" if gated else "plain")
            total = x + residual
            y = F.linear(rms_norm(total, norm_weight, eps), weight, bias)
            gate, up = y.chunk(2, -1)
            return F.silu(gate) * up if gated else y, total

        return norm_linear if num_tokens <= 4 else None

    monkeypatch.setattr(kernels, "fused_kernels", lambda device: FusedKernels(choose_norm_linear=choose))
    assert tokens(path) == expected
    assert used == inside
