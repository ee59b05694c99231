"""Contexts that are cut into pieces, one for each of several programs, in Triton's interpreter."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.attention import triton_backend
from nanovllm.attention.interface import KVScales
from nanovllm.attention.triton_backend import HopperKernels, TritonBackend
from nanovllm.graphs.sizes import FEW_PLACES
from nanovllm.kernels.attention import prefill_pieces
from nanovllm.kernels.attention.paged_prefill import PrefillConfig
from tests.kernels.attention_cases import Case, Lengths, behind_long_contexts, check, make_case

FP32 = 1e-5


@pytest.fixture
def cutting_backend(monkeypatch: pytest.MonkeyPatch) -> TritonBackend:
    """Cuts contexts of a few tiles: a piece may be of 16 keys, and with two KV heads 6 programs share a step."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU here; test_attention_gpu covers it")
    monkeypatch.setattr(prefill_pieces, "FEWEST_KEYS", 16)
    return TritonBackend(num_sms=6)


def pieces_in(backend: TritonBackend, case: Case) -> int:
    """How many partial results the case leaves for each KV head, with no more left behind by an earlier one."""
    case = behind_long_contexts(case)
    check(backend, case, FP32)
    *_, workspace = backend._prefill_workspaces.values()
    for part in (workspace.m, workspace.denom, workspace.acc):
        part.fill_(float("nan"))
    backend.attend(case.q, case.kv, case.meta, case.scale, window=case.window, scales=case.scales)
    written = workspace.m.isfinite()  # [Hkv, P, ROWS]
    assert torch.equal(written, written[:1, :, :1].expand_as(written))
    return int(written[0, :, 0].sum())


@pytest.mark.parametrize(
    ("lengths", "group", "block_size", "window", "pieces"),
    [
        ([(1, 40), (9, 500), (30, 113), (17, 17)], 2, 16, 0, 3),  # a share is 9 tiles of keys
        ([(9, 500), (14, 290)], 2, 16, 0, 5),
        ([(20, 500)], 3, 256, 0, 4),
        ([(20, 300)], 2, 16, 100, 4),
        ([(33, 64)], 1, 16, 0, 4),
        pytest.param([(33, 257), (17, 64)], 1, 256, 0, 4, marks=pytest.mark.slow),
        pytest.param([(33, 257), (17, 64)], 8, 16, 40, 0, marks=pytest.mark.slow),
        pytest.param([(17, 90)], 2, 16, 1, 4, marks=pytest.mark.slow),
    ],
)
def test_triton_cuts_long_contexts(
    cutting_backend: TritonBackend, lengths: Lengths, group: int, block_size: int, window: int, pieces: int
) -> None:
    """One sequence in many pieces and others in one; chunks of two tiles, whose last piece holds the causal border;
    windows that begin in one piece and end in another."""
    case = make_case(lengths, group=group, head_dim=16, block_size=block_size, window=window)
    assert pieces_in(cutting_backend, case) == pieces


def test_triton_cuts_what_comes_by_tma(cutting_backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    by_tma = PrefillConfig(rows=32, keys=16, num_warps=8, num_stages=2, tma=True, max_registers=128)
    monkeypatch.setattr(triton_backend, "prefill_config", lambda *_: by_tma)
    case = make_case([(9, 500), (14, 290)], block_size=64, head_dim=16)
    assert pieces_in(cutting_backend, case) == 5


def test_pieces_of_a_cache_in_fp8(cutting_backend: TritonBackend) -> None:
    """The scale of values is applied once. A tile has 128 keys."""
    case = make_case([(9, 500), (14, 290)], head_dim=16, scales=KVScales(0.5, 3.0))
    assert pieces_in(cutting_backend, case) == 2


def test_what_is_not_cut(cutting_backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """With enough work for all programs, or not enough keys for two pieces, there is nothing to merge."""
    busy = make_case([(40, 73), (17, 60)], group=1, num_kv_heads=6, head_dim=16)  # two programs for each KV head
    assert pieces_in(cutting_backend, busy) == 0
    monkeypatch.setattr(prefill_pieces, "FEWEST_KEYS", 160)
    assert pieces_in(cutting_backend, make_case([(17, 300)], group=1, head_dim=16)) == 0


def test_which_steps_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose metadata say so. On Hopper all other steps without windows are for its kernel."""
    calls: list[str] = []
    monkeypatch.setattr(
        triton_backend, "paged_prefill", lambda i, c, workspace, **_: calls.append("cut" if workspace else "whole")
    )
    hopper: Any = SimpleNamespace(
        fits=lambda *_: True, warp_specialized_prefill=lambda *_, **__: calls.append("hopper")
    )
    backend, case = TritonBackend(num_sms=6), make_case([(20, 30)])
    for kernels in HopperKernels(), HopperKernels(None, hopper):
        monkeypatch.setattr(triton_backend, "hopper_kernels", lambda _, kernels=kernels: kernels)
        for asked, window in product((case, behind_long_contexts(case)), (0, 9)):
            backend.attend(asked.q, asked.kv, asked.meta, asked.scale, window=window)
    assert calls == ["whole", "whole", "cut", "cut", "hopper", "whole", "cut", "cut"]


def test_too_many_sequences_to_cut(cutting_backend: TritonBackend) -> None:
    """The recordings for long contexts have no more."""
    case = behind_long_contexts(make_case([(17, 17)] * (prefill_pieces.MOST_SEQUENCES + 1), head_dim=16))
    with pytest.raises(ValueError, match="contexts of at most 64 sequences can be cut; got 65"):
        cutting_backend.attend(case.q, case.kv, case.meta, case.scale)
    assert FEW_PLACES <= prefill_pieces.MOST_SEQUENCES
