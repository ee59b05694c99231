"""No request waits for a compiler: whatever variants of attention's kernels a step needs, warming up has had them."""

from itertools import accumulate
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from nanovllm.attention import triton_backend
from nanovllm.attention.interface import AttentionMetadata
from nanovllm.attention.triton_backend import HopperKernels, TritonBackend
from nanovllm.graphs.sizes import batch_sizes
from nanovllm.kernels.attention import paged_decode
from nanovllm.kernels.hopper import ring_decode, warp_specialized_prefill
from nanovllm.runner.model_runner import UNRECORDED

Variants = set[tuple[Any, ...]]


class Launches:
    """Stands in for the kernels, and notes with which constants each is launched."""

    def __init__(self, name: str, noted: Variants) -> None:
        self.name, self.noted = name, noted

    def __getitem__(self, _: object) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.noted.add((self.name, *sorted(constants.items(), key=lambda item: item[0])))

        return launch


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Variants:
    variants: Variants = set()
    for module, name in (
        (paged_decode, "_decode_kernel"), (paged_decode, "_merge_kernel"), (paged_decode, "_plan_kernel"),
        (ring_decode, "_ring_kernel"), (warp_specialized_prefill, "_warp_specialized_prefill_kernel"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, Launches(name, variants))
    hopper = HopperKernels(ring_decode, warp_specialized_prefill)
    monkeypatch.setattr(triton_backend, "hopper_kernels", lambda device: hopper)
    for module in (paged_decode, ring_decode):
        monkeypatch.setattr(module, "overlaps_launches", lambda device: True)
    return variants


def variants_of(lengths: tuple[int, ...], noted: Variants) -> Variants:
    """Of a step with sequences of so many tokens, in the shape of Qwen3-0.6B: of its first layer and of the others."""
    noted.clear()
    num_seqs, num_tokens = len(lengths), sum(lengths)
    q = torch.empty(num_tokens, 16, 128, dtype=torch.bfloat16)
    meta = AttentionMetadata(
        slots=torch.zeros(num_tokens, dtype=torch.int64),
        query_start=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        context_len=torch.full((num_seqs,), 5000, dtype=torch.int32),
        block_table=torch.zeros(num_seqs, 20, dtype=torch.int32),
        num_decodes=next((i for i, n in enumerate(lengths) if n != 1), num_seqs),
        max_query_len=max(lengths),
        max_context_len=5000,
    )
    shared: dict[str, Any] = {}
    for _ in range(2):
        TritonBackend(132).attend(q, torch.empty(2, 3, 256, 8, 128, dtype=torch.bfloat16), meta, 1.0, shared)
    return set(noted)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("max_num_seqs", [16, 32, 256])
def test_every_variant_was_compiled_beforehand(max_num_seqs: int, recorded: bool, noted: Variants) -> None:
    compiled: Variants = set()
    for lengths in UNRECORDED:
        if len(lengths) <= max_num_seqs:
            compiled |= variants_of(lengths, noted)
    for size in batch_sizes(max_num_seqs, 256) if recorded else ():
        compiled |= variants_of((1,) * size, noted)
    for n in (1, 2, 8, 15, 16, 17, 31, 32, 33, 64, 256):
        for lengths in ((1,) * n, (1,) * (n - 1) + (300,), (5,) * n):
            if n <= max_num_seqs:
                assert variants_of(lengths, noted) <= compiled, lengths[-3:]
