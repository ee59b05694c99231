"""Choosing a backend: what is taken and said where, and how flash-attn is called when it is there."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.attention import select_backend
from nanovllm.attention.interface import AttentionMetadata
from nanovllm.attention.torch_ref import TorchRefBackend
from nanovllm.kernels import has_bfloat16
from nanovllm.models.loader import dtype_in_use
from tests.kernels.attention_cases import check, make_case

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says it has a Hopper GPU, if a very small one, and no flash-attn."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(multi_processor_count=2)
    )
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)


def test_auto_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="nanovllm"):
        assert select_backend("auto", CPU, 64, 16, torch.float32).name == "torch_ref"
    assert "chose torch_ref" in caplog.text
    assert "need an NVIDIA GPU" in caplog.text


@pytest.mark.usefixtures("hopper")
def test_auto_on_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="nanovllm"):
        assert select_backend("auto", CUDA, 128, 256, torch.bfloat16).name == "triton"
        assert select_backend("auto", CUDA, 96, 256, torch.bfloat16).name == "torch_ref"
    assert "chose triton" in caplog.text
    assert "head_dim" in caplog.text


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_a_gpu_backend_needs_a_gpu(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"attention_backend='{name}' .*NVIDIA GPU.*take attention_backend='torch_ref'"
    ):
        select_backend(name, CPU, 64, 16, torch.float32)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype", "message"),
    [
        (64, 8, torch.float16, "power of two of at least 16, not 8"),
        (64, 48, torch.float16, "power of two of at least 16, not 48"),
        (80, 16, torch.float16, "head_dim of .*, not 80"),
        (64, 16, torch.float64, "not torch.float64"),
    ],
)
def test_shapes_that_the_kernels_cannot_have(head_dim: int, block_size: int, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_backend("triton", CUDA, head_dim, block_size, dtype)


@pytest.mark.usefixtures("hopper")
def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    with pytest.raises(ValueError, match=r"7\.5 or more, and this GPU has 7\.0"):
        select_backend("triton", CUDA, 64, 16, torch.float16)


def test_bfloat16_before_ampere(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A GPU of 7.5 takes such a checkpoint in float16, and says so; who asks for bfloat16 is told what to do."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    caplog.set_level("INFO", logger="nanovllm")
    assert not has_bfloat16(CUDA) and has_bfloat16(CPU)
    assert dtype_in_use(None, torch.bfloat16, CUDA) == torch.float16 and "no bfloat16" in caplog.text
    assert (
        dtype_in_use(None, torch.float16, CUDA) == torch.float16
        and dtype_in_use(None, torch.float16, CPU).itemsize == 4
    )
    with pytest.raises(ValueError, match=r"dtype='bfloat16': 'cuda' has no bfloat16 .*use 'float16'"):
        dtype_in_use(torch.bfloat16, torch.bfloat16, CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert dtype_in_use(None, torch.bfloat16, CUDA) == torch.bfloat16


@pytest.mark.parametrize(("capability", "found"), [((7, 5), "float32"), ((8, 0), "bfloat16")])
def test_gemma_is_never_in_float16(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capability: tuple[int, int], found: str
) -> None:
    """Its activations would be infinite, and every request would fail."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    caplog.set_level("INFO", logger="nanovllm")
    for stored in torch.bfloat16, torch.float16:
        assert str(dtype_in_use(None, stored, CUDA, exceeds_float16=True)) == f"torch.{found}"
    assert ("are used in float32" in caplog.text) == (found == "float32")
    if found == "float32":
        with pytest.raises(ValueError, match=r"dtype='bfloat16': 'cuda' has no bfloat16 .*use 'float32'"):
            dtype_in_use(torch.bfloat16, torch.bfloat16, CUDA, exceeds_float16=True)


@pytest.mark.usefixtures("hopper")
def test_flash_attn_without_the_library() -> None:
    with pytest.raises(ValueError, match=r"flash-attn-4 cannot be imported.*flash-attn 2 .*multiple of 256.*install"):
        select_backend("flash_attn", CUDA, 128, 128, torch.bfloat16)


@pytest.mark.usefixtures("hopper")
def test_flash_attn_has_no_fp32() -> None:
    with pytest.raises(ValueError, match="16 bits"):
        select_backend("flash_attn", CUDA, 128, 256, torch.float32)


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="must be auto, torch_ref, triton or flash_attn; got 'flashinfer'"):
        select_backend("flashinfer", CPU, 64, 16, torch.float32)


def answer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: Any, start: Any, context: Any, **kw: Any) -> Any:
    """What the libraries compute, by the oracle. They load V to the end of a context's last page."""
    longest = int(context.max()), int(start.diff().max())
    assert (kw["max_k"], kw["max_q"]) >= longest
    assert kw["causal"] is True
    slots = torch.zeros(q.shape[0], dtype=torch.int64)
    meta = AttentionMetadata(slots, start, context, table, 0, longest[1], longest[0])
    left, right = kw["window_size"]
    assert right in (-1, 0)
    out = TorchRefBackend().attend(q, torch.stack((k, v)), meta, kw["scale"], window=left + 1)
    for s, page in enumerate(table.gather(1, (context.long()[:, None] - 1) // k.shape[1])[:, 0].tolist()):
        out[start[s] : start[s + 1]] += 0 * v[page].sum()
    return out


def flash_attn_4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kw: Any) -> tuple[torch.Tensor, None]:
    assert k.shape[1] in (16, 128)  # a page of 256 is handed over as two of 128
    out = answer(
        q,
        k,
        v,
        kw["page_table"],
        kw["cu_seqlens_q"],
        kw["seqused_k"],
        max_q=kw["max_seqlen_q"],
        max_k=kw["max_seqlen_k"],
        causal=kw["causal"],
        scale=kw["softmax_scale"],
        window_size=kw.get("window_size", (-1, -1)),
    )
    return out, None


def flash_attn_2(
    *args: Any,
    softmax_scale: float,
    causal: bool,
    block_table: torch.Tensor,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    q, k, v, start, key_start, max_q, max_k = args
    context, how = key_start.diff(), {"causal": causal, "scale": softmax_scale, "window_size": window_size}
    return answer(q, k, v, block_table, start, context, max_q=max_q, max_k=max_k, **how)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("module", "function", "block_size"),
    [
        ("flash_attn.cute.interface", flash_attn_4, 16),
        ("flash_attn.cute.interface", flash_attn_4, 256),
        ("flash_attn", flash_attn_2, 256),
    ],
)
def test_flash_attn_gets_the_prefills(
    module: str, function: Any, block_size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The libraries' place is taken by functions of the same signature; decodes must not reach them."""
    if torch.cuda.is_available():
        pytest.skip("the real libraries are tested on a GPU")
    library = ModuleType(module)
    calls: list[Any] = []

    def count(*args: Any, **kw: Any) -> Any:
        calls.append(args)
        return function(*args, **kw)

    library.flash_attn_varlen_func = count  # type: ignore[attr-defined]
    for package in "flash_attn", "flash_attn.cute":
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, module, library)
    with caplog.at_level("INFO", logger="nanovllm"):
        backend = select_backend("flash_attn", CUDA, 64, block_size, torch.float16)
    assert "flash-attn" in caplog.text
    check(backend, make_case([(1, 20), (1, 30), (20, 300), (40, 40)], num_kv_heads=1, block_size=block_size), 1e-5)
    case = make_case([(1, 20), (20, 300)], num_kv_heads=1, block_size=block_size, window=35)
    num_calls = len(calls)
    check(backend, case, 1e-5)
    # In small blocks, one of those that a tile of the library begins with may be another sequence's.
    assert (len(calls) > num_calls) == (block_size == 256)
