"""Attention over a KV cache in FP8: that over the rounded keys and values, and nothing else is rounded."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.attention import select_backend
from nanovllm.attention.interface import AttentionBackend, KVScales, to_fp8, write_kv
from nanovllm.attention.torch_ref import TorchRefBackend
from nanovllm.kernels import FP8
from tests.kernels.attention_cases import Case, Lengths, check, make_case
from tests.kernels.test_attention_gpu import DECODE, PREFILL, TOLERANCE, VERIFY

SCALES = KVScales(0.3, 2.7)  # which no other number makes up for
MIXED: Lengths = [(1, 1), (1, 16), (1, 17), (1, 130), (3, 40), (5, 5), (16, 32), (33, 100)]
FP32 = 1e-5


# --- what is stored -----------------------------------------------------------------------------------------------


def test_numbers_are_rounded_to_the_nearest_and_saturate() -> None:
    x = torch.tensor([0.0, 1.0, 1.06, -1.07, 448.0, 449.0, 1e30, -1e30, float("inf"), float("nan"), 0.0009])
    rounded = to_fp8(x, 1.0).float()
    expected = torch.tensor([0.0, 1.0, 1.0, -1.125, 448, 448, 448, -448, 448, float("nan"), 2**-9 * 0])
    assert torch.equal(rounded.nan_to_num(-7), expected.nan_to_num(-7))
    assert torch.equal(to_fp8(x, 4.0).float()[4:6], torch.tensor([112.0, 112.0]))


def stored(kv: torch.Tensor) -> torch.Tensor:
    return kv.view(torch.uint8).flatten(1, 2)


def test_what_is_written_lands_in_its_slots_alone() -> None:
    k, v = torch.randn(2, 3, 2, 8) * 300
    kv = torch.full((2, 4, 5, 2, 8), 7.0).to(FP8)
    before, slots = stored(kv).clone(), torch.tensor([19, 0, 7])
    write_kv(kv, k, v, slots, SCALES)
    after = stored(kv)
    assert torch.equal(after[0, slots], to_fp8(k, SCALES.k).view(torch.uint8))
    assert torch.equal(after[1, slots], to_fp8(v, SCALES.v).view(torch.uint8))
    untouched = torch.ones(20, dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(after[:, untouched], before[:, untouched])


ON = [
    pytest.param("cpu", torch.float32, id="interpreter"),
    pytest.param("cuda", torch.float32, id="fp32", marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, id="bf16", marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float16, id="fp16", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("device", "dtype"), ON)
@pytest.mark.parametrize("scales", [KVScales(), KVScales(0.25, 4)], ids=["1", "scaled"])
def test_the_fused_kernel_writes_the_same(device: str, dtype: torch.dtype, scales: KVScales) -> None:
    """Without a norm and at position 0, where rotation changes nothing, so that the numbers are equal. Some are too
    large for FP8, and NaN stays NaN. Triton's interpreter rounds wrongly and knows no NaN: it is given neither."""
    pytest.importorskip("triton")
    from nanovllm.kernels.fused.norm_rope_write import norm_rope_write

    qkv = torch.randn(5, 8, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype) * 400
    num_nan = 0 if device == "cpu" else 3
    if device == "cpu":
        qkv = to_fp8(qkv, 1).to(dtype)
    else:
        qkv[2, 5, [3, 35]], qkv[3, 7, 60] = float("nan"), float("nan")
    qkv[0, 6, :9] = 1000
    table = torch.stack((torch.ones(1, 32), torch.zeros(1, 32)), 1).to(device)
    positions, slots = torch.zeros(5, dtype=torch.int32, device=device), torch.tensor([3, 17, 16, 0, 40], device=device)
    kv = torch.full((2, 3, 16, 2, 64), 7.0, device=device).to(FP8)
    expected = kv.clone()
    q = norm_rope_write(qkv, kv, None, table, positions, slots, 1e-6, scales)
    write_kv(expected, qkv[:, 4:6], qkv[:, 6:], slots, scales)
    assert torch.equal(q, qkv[:, :4])
    assert torch.equal(kv.float().nan_to_num(9), expected.float().nan_to_num(9))
    assert kv.float().isnan().sum() == num_nan and (kv.float().abs() == 448).sum() > 20


# --- what is read ---------------------------------------------------------------------------------------------------


def dequantised(case: Case) -> Case:
    parts = [part.to(case.q.dtype) * scale for part, scale in zip(case.kv, case.scales, strict=True)]
    return dataclasses.replace(case, kv=torch.stack(parts), scales=KVScales())


@pytest.mark.parametrize("scales", [KVScales(), SCALES], ids=["1", "scaled"])
@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "window"),
    [(64, 2, 16, 0), (80, 1, 5, 0), (128, 4, 256, 0), (256, 3, 16, 0), (64, 8, 5, 8), (80, 2, 16, 33)],
)
def test_torch_ref(head_dim: int, group: int, block_size: int, window: int, scales: KVScales) -> None:
    """Bit by bit what attention over the widened cache gives, and the answer in float64."""
    shape: dict[str, Any] = {"head_dim": head_dim, "group": group, "block_size": block_size, "window": window}
    case = make_case(MIXED, scales=scales, **shape)
    backend, wide = TorchRefBackend(), dequantised(case)
    check(backend, case, FP32)
    out = backend.attend(case.q, case.kv, case.meta, case.scale, {}, window, scales)
    assert torch.equal(out, backend.attend(wide.q, wide.kv, wide.meta, wide.scale, {}, window))


def interpreted(num_sms: int = 2) -> AttentionBackend:
    pytest.importorskip("triton")
    from nanovllm.attention.triton_backend import TritonBackend

    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU here; the tests below cover it")
    return TritonBackend(num_sms)


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ([(1, 200), (1, 1), (1, 16), (1, 130)], {"head_dim": 128}),  # over pieces, which are merged
        ([(1, 70), (5, 66), (3, 3)], {"group": 3}),  # guesses are verified
        ([(1, 40), (40, 73), (17, 17)], {"block_size": 256}),
        ([(1, 40), (40, 173), (3, 260)], {"window": 40}),
    ],
    ids=["decodes", "guesses", "chunks", "windows"],
)
def test_triton(lengths: Lengths, shape: dict[str, Any]) -> None:
    check(interpreted(), make_case(lengths, num_kv_heads=1, scales=SCALES, **shape), FP32)


@pytest.mark.parametrize("name", ["torch_ref", "triton"])
def test_scales_are_not_for_other_caches(name: str) -> None:
    """A checkpoint may have them, and the cache be in the dtype of the queries all the same."""
    backend = TorchRefBackend() if name == "torch_ref" else interpreted()
    case = make_case([(1, 40), (5, 5), (20, 33)], group=1)
    check(backend, dataclasses.replace(case, scales=SCALES), FP32)
    kv = torch.zeros_like(case.kv)
    k, v = torch.randn(2, len(case.meta.slots), 2, 64)
    write_kv(kv, k, v, case.meta.slots, SCALES)
    assert torch.equal(kv.flatten(1, 2)[:, case.meta.slots], torch.stack((k, v)))


def test_triton_by_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = interpreted()
    from nanovllm.attention import triton_backend as module
    from nanovllm.kernels.attention.paged_prefill import PrefillConfig

    by_tma = PrefillConfig(rows=32, keys=16, num_warps=8, num_stages=2, tma=True, max_registers=128)
    monkeypatch.setattr(module, "prefill_config", lambda *_: by_tma)
    check(backend, make_case([(40, 113), (17, 17)], block_size=64, scales=SCALES), FP32)


# --- where it is refused --------------------------------------------------------------------------------------------


def choose(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> Any:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    properties = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    return select_backend(name, torch.device("cuda"), 64, 16, torch.bfloat16, FP8)


@pytest.mark.parametrize("name", ["auto", "triton", "torch_ref", "flash_attn"])
def test_a_gpu_before_ada_cannot(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    message = r"kv_cache_dtype='fp8' needs compute capability 8.9 or more, and 'cuda' has 8.6; take .*'auto'"
    with pytest.raises(ValueError, match=message):
        choose(monkeypatch, name, (8, 6))


def test_flash_attn_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, "auto", (8, 9)).name == "triton"
    with pytest.raises(ValueError, match=r"'flash_attn' cannot read kv_cache_dtype='fp8'; take .*'triton'"):
        choose(monkeypatch, "flash_attn", (9, 0))


# --- on a GPU -------------------------------------------------------------------------------------------------------


def on_gpu(case: Case) -> AttentionBackend:
    return select_backend("triton", case.q.device, case.q.shape[-1], case.kv.shape[2], case.q.dtype, FP8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_compiled(head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    """With 8 KV heads, so that on Hopper the ring has its part."""
    how: dict[str, Any] = {"head_dim": head_dim, "block_size": block_size, "dtype": dtype, "device": "cuda"}
    for lengths, group in (DECODE, 2), (PREFILL, 3), (VERIFY * 3, 2):
        case = make_case(lengths, group=group, num_kv_heads=8, scales=SCALES, **how)
        check(on_gpu(case), case, TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 100, 1024])
def test_compiled_windows(window: int) -> None:
    for lengths in DECODE, PREFILL, VERIFY:
        how: dict[str, Any] = {"head_dim": 128, "dtype": torch.bfloat16, "device": "cuda", "window": window}
        case = make_case(lengths, block_size=256, scales=SCALES, **how)
        check(on_gpu(case), case, TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("plain", [False, True], ids=["chosen", "plain"])
@pytest.mark.parametrize("scales", [KVScales(), SCALES], ids=["1", "scaled"])
def test_large_batches(scales: KVScales, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel that is chosen, on Hopper the ring, and by the one for any GPU."""
    from nanovllm.attention import triton_backend

    lengths = [(1, 1 + 37 * s % 900) for s in range(300)]
    how: dict[str, Any] = {"head_dim": 128, "block_size": 256, "dtype": torch.bfloat16, "device": "cuda"}
    case = make_case(lengths, num_kv_heads=8, scales=scales, **how)
    ring = triton_backend.hopper_kernels(case.q.device).ring_decode
    assert ring is None or ring.ring_layout(case.q, case.kv, len(lengths)) is not None
    if plain:
        monkeypatch.setattr(triton_backend, "hopper_kernels", lambda device: triton_backend.HopperKernels())
    check(on_gpu(case), case, TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
def test_queries_beyond_fp16_are_the_largest_there() -> None:
    """Products are in fp16. A query of 1e6 has to give numbers, and NaN must not become one."""
    how: dict[str, Any] = {"head_dim": 128, "block_size": 256, "dtype": torch.bfloat16, "device": "cuda"}
    for lengths in [(1, 300)] * 20, [(40, 300)]:
        case = make_case(lengths, num_kv_heads=8, scales=KVScales(), **how)
        case.q[0, 0, 5], case.q[1, 1, 7] = 1e6, float("nan")
        out = on_gpu(case).attend(case.q, case.kv, case.meta, case.scale)
        bad = torch.zeros(out.shape[:2], dtype=torch.bool, device="cuda")
        bad[1, 1] = True
        assert torch.equal(out.isnan().all(-1), bad) and out[~bad].isfinite().all()
