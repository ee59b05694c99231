"""Decode attention with all that lies between two projections inside: what gets it, what it computes, how it is used.

Triton's interpreter cannot run Gluon. So the kernel runs here as plain Python, program by program. On a GPU
`test_attention_gpu.py` runs the kernel itself.
"""

import types
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from nanovllm.kernels.attention.paged_decode import DecodeWorkspace, plan_decode
from nanovllm.kernels.attention.paged_tile import LOG2_E
from nanovllm.kernels.fused.norm_rope_write import norm_rope_write
from nanovllm.kernels.hopper import fused_decode as kernels
from tests.kernels.attention_cases import Lengths, as_single_tokens, attention_float64, make_case
from tests.kernels.gluon_as_python import Barrier, Bars, Memory, Pointer, language, load_elements, store_elements

NUM_KV_HEADS, EPS = 2, 1e-6


def as_python(program: tuple[int, int], cache: torch.Tensor) -> Any:
    """The kernel for one program of the grid. cache: what TMA reads [Hkv, 2 * slots, D]."""

    def bring(_: object, where: list[Any], bar: Barrier, memory: Memory) -> None:
        head, slot, _ = map(int, where)
        memory.tile.copy_(cache[head : head + 1, slot : slot + memory.tile.shape[1]])
        bar.happens(False, -2 * memory.tile.numel())

    def allocate(dtype: torch.dtype, shape: list[int], _: object) -> Any:
        return (
            Bars(Barrier() for _ in range(shape[0])) if dtype == torch.int64 else Memory(torch.full(shape, torch.nan))
        )

    def atomic_add(pointer: Pointer, value: int, **_: str) -> torch.Tensor:
        before = load_elements(pointer)
        store_elements(pointer, before + value, torch.tensor(True))
        return before

    def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
        store_elements(
            Pointer(pointer.flat, torch.as_tensor(pointer.offset)), torch.as_tensor(value), torch.as_tensor(mask)
        )

    def load(pointer: Pointer, mask: Any = None, other: float = 0.0, cache_modifier: str = "") -> torch.Tensor:
        return load_elements(pointer, None if mask is None else torch.as_tensor(mask), other)

    gl = language(lambda axis: torch.tensor(program[axis]))
    gl.load, gl.store, gl.allocate_shared_memory, gl.atomic_add = load, store, allocate, atomic_add
    mbarrier = types.SimpleNamespace(
        init=lambda *_, **__: None, MBarrierLayout=tuple, wait=lambda bar, parity: bar.wait(parity),
        expect=lambda bar, count: bar.happens(True, count),
    )  # fmt: skip
    names = {
        "gl": gl, "mbarrier": mbarrier, "tma": types.SimpleNamespace(async_copy_global_to_shared=bring),
        "mma_v2": lambda a, b, acc: acc + a @ b, "float": float, "range": lambda *ends: range(*map(int, ends)),
        "gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None, "debug_barrier": lambda: None,
    }  # fmt: skip
    for name in ("_order", "_rotated", "_attend", "_over_warps", "_merge_parts"):
        names[name] = types.FunctionType(getattr(kernels, name).fn.__code__, names)
    return types.FunctionType(kernels._fused_decode_kernel.fn.__code__, names)


CASES: list[tuple[Lengths, int]] = [  # tokens of a row and its context, pieces
    ([(1, 300), (1, 5), (1, 77), (1, 1), (1, 65)], 1),
    ([(1, 300), (1, 5), (1, 77), (1, 1), (1, 65)], 3),
    ([(1, 300), (1, 5), (1, 77), (1, 1), (1, 65)], 30),  # fewer tiles than pieces
    ([(1, 640), (1, 63), (1, 64)], 5),  # more parts than warps
    ([(3, 102), (2, 31), (6, 6), (3, 65), (1, 129)], 4),  # several tokens of a row
    ([(15, 130)], 2),
]


@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize(("lengths", "pieces"), CASES)
def test_what_it_computes(lengths: Lengths, pieces: int, with_norms: bool) -> None:
    """The result, and what is in the cache afterwards. New keys and values are NaN in the cache before."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU here; test_attention_gpu.py covers it")
    group, head_dim, block_size = (3 if with_norms else 2), 128, 64
    shape: dict[str, Any] = {"num_kv_heads": NUM_KV_HEADS, "head_dim": head_dim, "block_size": block_size}
    case = as_single_tokens(make_case([(n, max(n, c)) for n, c in lengths], group=group, **shape))
    meta, num_heads = case.meta, NUM_KV_HEADS * group
    num_tokens = len(meta.slots)
    torch.manual_seed(0)
    qkv = torch.randn(num_tokens, num_heads + 2 * NUM_KV_HEADS, head_dim)
    norms = (torch.randn(head_dim), torch.randn(head_dim)) if with_norms else None
    table = torch.randn(700, 2, head_dim // 2)
    before = case.kv.clone()
    before.flatten(1, 2)[:, meta.slots] = torch.nan
    expected_kv = before.clone()
    q = norm_rope_write(qkv, expected_kv, norms, table, meta.context_len - 1, meta.slots, EPS)

    kv, out = before.clone(), torch.full_like(q, torch.nan)
    workspace = DecodeWorkspace.allocate(pieces, 1, num_heads, head_dim, q.device)
    for part in (workspace.m, workspace.denom, workspace.acc):
        part.fill_(torch.nan)
    plan = plan_decode(meta.context_len, pieces, kernels.CONFIG)
    arrived = torch.zeros(num_tokens * NUM_KV_HEADS, dtype=torch.int32)
    parts = workspace.m, workspace.denom, workspace.acc, arrived
    tensors = meta.block_table, meta.context_len, meta.slots, plan, *(norms or (qkv, qkv)), table
    pointers = [Pointer(x.view(-1)) for x in (kv, out, *parts, *tensors)]
    boxes = types.SimpleNamespace(dtype=torch.float32, layout=None)
    slots = torch.tensor(kv.shape[1] * block_size)
    cache = before.view(-1, NUM_KV_HEADS, head_dim).transpose(0, 1)
    for piece in torch.randperm(pieces).tolist():
        for kv_head in range(NUM_KV_HEADS):
            as_python((kv_head, piece), cache)(
                Pointer(qkv.view(-1)), boxes, *pointers, EPS, case.scale * LOG2_E, slots, meta.block_table.stride(0),
                pieces, NUM_KV_HEADS, group, 4 if group == 3 else 2, head_dim, block_size, kernels.KEYS, kernels.WARPS,
                2, norms is not None, True,
            )  # fmt: skip
    assert not arrived.any()
    torch.testing.assert_close(kv, expected_kv, equal_nan=True, rtol=1e-5, atol=1e-5)
    places = expected_kv.flatten(1, 2)
    for token in range(num_tokens):
        position = torch.arange(int(meta.context_len[token]))
        slot = meta.block_table[token, position // block_size].long() * block_size + position % block_size
        answer = attention_float64(q[token : token + 1], *places[:, slot], case.scale)[0]
        error = (out[token].double() - answer).norm(dim=-1) / answer.norm(dim=-1)
        assert error.max() <= 1e-5, f"token {token}"  # false of a NaN
