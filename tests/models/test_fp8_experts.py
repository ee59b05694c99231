"""Experts in FP8: Hugging Face's logits of the same weights in float32, whether they are kept in FP8 or widened."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.kernels import FP8
from nanovllm.layers.experts import Experts, Fp8Experts
from nanovllm.models.config import read_config
from nanovllm.models.loader import load_model
from tests import oracle
from tests.fp8_checkpoints import Layout, in_fp8, wide_mixtral, wide_qwen3_moe
from tests.models.test_fp8 import Build, has_fp8, hf_logits, logits
from tests.stages.ranks import Threads

__all__ = ["has_fp8"]  # a fixture


@pytest.mark.parametrize(
    ("build", "layout", "size", "whole"),
    [
        (wide_qwen3_moe, "block", 1, False),
        (wide_qwen3_moe, "channel", 2, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (wide_qwen3_moe, "channel", 1, False),
                (wide_mixtral, "block", 1, False),
                (wide_mixtral, "channel", 2, False),
                (wide_qwen3_moe, "block", 2, True),
                (wide_qwen3_moe, "block", 2, False),
            )
        ),
    ],
)
def test_experts_are_kept(
    has_fp8: None, build: Build, layout: Layout, size: int, whole: bool, checkpoints: Path
) -> None:
    """whole: whether each rank has whole experts."""
    path, widened = in_fp8(build(checkpoints), layout)
    config = read_config(path)

    def task(group: Any) -> Tensor:
        model = load_model(path, expert_parallel=whole, group=group).model
        experts = [module for module in model.modules() if isinstance(module, Experts)]
        assert len(experts) == 3 and all(isinstance(module, Fp8Experts) for module in experts)
        assert {p.dtype for n, p in model.named_parameters() if n.endswith("experts.down_proj")} == {FP8}
        shares: Tensor = group.all_gather(logits(model))
        return shares

    for shares in Threads.run(size, task):
        found = torch.cat(list(shares), dim=-1)[:, : config.vocab_size]
        oracle.check_logits(found, hf_logits(widened))


@pytest.mark.parametrize(
    ("over", "left"),
    [
        ({"moe_intermediate_size": 192}, ()),
        pytest.param({}, ("1.mlp.experts.3.up_proj",), marks=pytest.mark.slow),
    ],
    ids=["sizes", "left out"],
)
def test_experts_that_cannot_stay_are_widened(
    has_fp8: None, over: dict[str, Any], left: tuple[str, ...], checkpoints: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All of a layer, if one of its tensors cannot stay."""
    path, widened = in_fp8(wide_qwen3_moe(checkpoints, **over), "block", left=left)
    with torch.inference_mode(), caplog.at_level(logging.INFO, "nanovllm"):
        model = load_model(path).model
        oracle.check_logits(logits(model), hf_logits(widened))
    told = f"6 of 9 linear layers, and the experts of {2 if left else 0} of 3 layers, stay in FP8, the others are in"
    assert told in caplog.text
