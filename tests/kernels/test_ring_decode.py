"""Decode attention by a ring of keys: what gets it, what it computes, and what it compiles to.

Triton's interpreter cannot run Gluon. So the two sides of the kernel run here as plain Python, each in a thread of its
own (`gluon_as_python.py`). `test_ring_decode_gpu.py` runs the kernel itself.
"""

import json
import os
import re
import subprocess
import sys
import threading
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from nanovllm.attention import triton_backend
from nanovllm.attention.interface import KVScales
from nanovllm.attention.triton_backend import HopperKernels, TritonBackend
from nanovllm.engine.plan import Scheduled
from nanovllm.graphs.decode_steps import DecodeSteps
from nanovllm.kernels.attention.paged_decode import DecodeWorkspace, merge_pieces, plan_decode
from nanovllm.kernels.attention.paged_tile import LOG2_E
from nanovllm.kernels.hopper import ring_decode as kernels
from nanovllm.kernels.hopper.ring_decode import RingLayout, ring_layout
from nanovllm.sampling.sampler import Sampled
from tests.kernels.attention_cases import Case, Lengths, as_bytes, as_single_tokens, make_case, paged_inputs
from tests.kernels.gluon_as_python import Barrier, Bars, Cache, Memory, Pointer, as_python

FP8 = torch.float8_e4m3fn
ROOT = Path(__file__).parents[2]
NUM_KV_HEADS = 4

# --- what gets it ----------------------------------------------------------------------------------------------------


def layout_of(
    num_sequences: int = 16, group: int = 2, num_kv_heads: int = 8, head_dim: int = 128, block_size: int = 256,
    dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None,
) -> RingLayout | None:  # fmt: skip
    q = torch.empty(num_sequences, num_kv_heads * group, head_dim, dtype=dtype, device="meta")
    kv = torch.empty(2, 9, block_size, num_kv_heads, head_dim, dtype=kv_dtype or dtype, device="meta")
    return ring_layout(q, kv, num_sequences)


def test_what_gets_it() -> None:
    wide, narrow = RingLayout(32, 4, 3, 1, 160), RingLayout(32, 4, 6, 1, 160)
    assert layout_of(64) == layout_of(64, dtype=torch.float16) == layout_of(300, 16, 4, block_size=32) == wide
    assert layout_of(64, head_dim=64) == layout_of(99, head_dim=64, num_kv_heads=12) == narrow
    small, small_narrow = RingLayout(16, 4, 3, 1, 160), RingLayout(16, 4, 6, 1, 160)
    assert layout_of(8) == layout_of(63, 16, 4, block_size=32) == small
    assert layout_of(8, head_dim=64) == layout_of(head_dim=64, num_kv_heads=12) == small_narrow
    in_fp8 = RingLayout(64, 4, 3, 1, 160)
    assert layout_of(16, kv_dtype=FP8, block_size=64) == layout_of(300, kv_dtype=FP8) == in_fp8
    assert layout_of(7) is None and layout_of(15, kv_dtype=FP8) is None and layout_of(group=17) is None
    assert layout_of(block_size=16) is None and layout_of(dtype=torch.float32) is None
    assert [d for d in (16, 32, 64, 96, 128, 256) if layout_of(head_dim=d)] == [64, 128]
    assert [n for n in (1, 2, 3, 4, 6, 8, 10, 12, 16) if layout_of(num_kv_heads=n)] == [4, 8, 12, 16]


def test_the_plan_of_a_step_is_for_the_kernel_that_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers use one kernel and its plan, and the first is not launched with overlap. Layers with a window have
    another kernel and another plan."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU here")
    calls: list[tuple[Any, ...]] = []

    def stand_in(*arguments: Any, overlap: bool = False, window: int = 0) -> None:
        inputs, workspace, plan, layout = arguments
        calls.append((workspace.m.shape, plan, layout, inputs.context_len, overlap, window))

    monkeypatch.setattr(triton_backend, "hopper_kernels", lambda device: HopperKernels(ring_decode=kernels))
    monkeypatch.setattr(kernels, "ring_decode", stand_in)
    monkeypatch.setattr(triton_backend, "paged_decode", stand_in)
    backend = TritonBackend(num_sms=10)
    mixed = [(1, n) for n in range(20, 40)] + [(40, 50)]
    for lengths, shape, keys in (
        ([(1, n) for n in range(200, 208)], (5, 2, 1, 16), 16),
        ([(2, n) for n in range(200, 208)], (5, 2, 8, 16), 16),
        (mixed, (5, 2, 1, 16), 16),
        ([(1, n) for n in range(200, 264)], (5, 2, 1, 16), 32),
        ([(1, n) for n in range(200, 207)], (3, 2, 1, 16), 64),
    ):
        case = make_case(lengths, num_kv_heads=8, head_dim=128, block_size=64, dtype=torch.bfloat16)
        shared: dict[Any, Any] = {}
        calls.clear()
        for _ in range(3):
            backend.attend(case.q, case.kv, case.meta, case.scale, shared)
        assert [call[0] for call in calls] == [shape] * 3 and [call[4] for call in calls] == [False, True, True]
        assert all(call[1] is calls[0][1] for call in calls)
        layout = calls[0][2]
        assert layout.keys == keys and isinstance(layout, RingLayout) == (keys < 64)
        contexts = calls[0][3]
        assert len(contexts) == sum(n <= 2 for n, _ in lengths)
        assert calls[0][1][-1, 1] == sum(-(-int(n) // keys) for n in contexts)
        for window in (64, 0, 64):
            backend.attend(case.q, case.kv, case.meta, case.scale, shared, window)
        first, unlimited, second = calls[3:]
        assert (first[4], unlimited[4], second[4]) == (False, True, True)
        assert first[1] is second[1] is not calls[0][1] and unlimited[1] is calls[0][1]
        assert not isinstance(first[2], RingLayout) and (first[5], unlimited[5]) == (64, 0)
        queries, keys = first[0][2], first[2].keys
        tiles = [-(-int(n) // keys) - max(0, int(n) - queries + 1 - 64) // keys for n in contexts]
        assert first[1][-1, 1] == sum(tiles)


# --- what it computes ------------------------------------------------------------------------------------------------

CASES: list[tuple[Lengths, int, int]] = [  # lengths, pieces, group
    ([(1, 300), (1, 5), (1, 77)], 4, 2),
    ([(1, 1), (1, 2)], 20, 1),  # fewer tiles than pieces
    ([(1, 256)], 9, 4),
    ([(1, 7), (2, 40), (3, 90)], 5, 2),  # guesses are verified
    ([(3, 66), (2, 33), (4, 4), (1, 1), (4, 259), (4, 64), (3, 65)], 6, 4),  # some do not see the last whole tile
    ([(1, n) for n in (16, 17, 64, 65, 128, 256, 257, 1, 3)], 7, 8),
]


def emulate(case: Case, pieces: int, group: int, layout: RingLayout, before: torch.Tensor) -> int:
    """Compare with the answer. before: `case.kv` as it was before the step. How many boxes were ordered early."""
    meta, block_size = case.meta, case.kv.shape[2]
    in_fp8 = case.kv.dtype == FP8
    words = 32 if in_fp8 else 64
    pages = [kv.view(torch.int16) if in_fp8 else kv for kv in (before, case.kv)]
    queries = 16 // group if meta.max_query_len > 1 else 1
    workspace = DecodeWorkspace.allocate(pieces, queries, case.q.shape[1], 64, case.q.device)
    for part in (workspace.m, workspace.denom, workspace.acc):
        part.fill_(float("nan"))
    out = torch.full_like(case.q, float("nan"))
    plan = plan_decode(meta.context_len, pieces, layout.config)
    pointer = {
        name: Pointer(tensor.view(-1))
        for name, tensor in {
            "q": case.q, "out": out, "m": workspace.m, "denom": workspace.denom, "acc": workspace.acc, "plan": plan,
            "table": meta.block_table, "start": meta.query_start, "context": meta.context_len,
        }.items()
    }  # fmt: skip
    early_boxes = 0
    for program in ((heads, piece) for heads in range(NUM_KV_HEADS // layout.heads) for piece in range(pieces)):
        shape = layout.stages, layout.heads, layout.keys, words
        k, v = (torch.full(shape, -7 if in_fp8 else float("nan"), dtype=pages[0].dtype) for _ in range(2))
        full = Bars(Barrier() for _ in range(layout.stages))
        empty = Bars(Barrier(*places) for places in zip(k, v, strict=True))
        cache = Cache(*(page.view(-1, NUM_KV_HEADS, words).transpose(0, 1) for page in pages))
        order = as_python("_produce", program, cache)
        arguments = (
            cache, Memory(k), Memory(v), full, empty,
            pointer["table"], pointer["start"], pointer["context"], pointer["plan"],
            case.kv.stride(0) // (NUM_KV_HEADS * 64), meta.block_table.stride(0),
            layout.heads, block_size, layout.keys, words, layout.stages, True,
        )  # fmt: skip
        side = threading.Thread(target=order, args=arguments, daemon=True)
        side.start()
        as_python("_consume", program, Cache(before, case.kv))(
            *(pointer[name] for name in ("q", "out", "m", "denom", "acc")), Memory(k), Memory(v), full, empty,
            pointer["start"], pointer["context"], pointer["plan"], case.scale * case.scales.k * LOG2_E,
            case.scales.v if in_fp8 else None, case.q.stride(0),
            NUM_KV_HEADS, layout.heads, group, 64, queries, layout.keys, words, layout.stages, True,
        )  # fmt: skip
        side.join(timeout=20)
        assert not side.is_alive()
        early_boxes += cache.early_boxes
    merge_pieces(paged_inputs(case, out), workspace, plan, layout.keys)
    error = (out.double() - case.expected).norm(dim=-1) / case.expected.norm(dim=-1)
    assert error.max() <= 1e-5  # false of a NaN
    return early_boxes


def before_the_step(case: Case) -> torch.Tensor:
    kv = case.kv.clone()
    nan = torch.full((), float("nan")).to(kv.dtype)
    as_bytes(kv).flatten(1, 2)[:, case.meta.slots] = as_bytes(nan)
    return kv


@pytest.mark.parametrize("layout", [RingLayout(16, 4, 3, 1), RingLayout(32, 2, 2, 1)], ids=str)
@pytest.mark.parametrize("block_size", [pytest.param(32, marks=pytest.mark.slow), 256])
@pytest.mark.parametrize(("lengths", "pieces", "group"), CASES)
def test_what_it_computes(lengths: Lengths, pieces: int, group: int, block_size: int, layout: RingLayout) -> None:
    """What the step itself writes is NaN until its writer is waited for."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU here; test_ring_decode_gpu.py covers it")
    case = make_case(lengths, group=group, num_kv_heads=NUM_KV_HEADS, head_dim=64, block_size=block_size)
    early_boxes = emulate(case, pieces, group, layout, before_the_step(case))
    assert bool(early_boxes) == any(context - n >= layout.keys for n, context in lengths)


@pytest.mark.parametrize(("lengths", "pieces", "group"), CASES)
def test_what_it_computes_in_fp8(lengths: Lengths, pieces: int, group: int) -> None:
    """Two numbers are one word on their way; queries in the order of the keys that were widened together."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU here; test_fp8_kv.py covers it")
    shape: dict[str, Any] = {"group": group, "num_kv_heads": NUM_KV_HEADS, "head_dim": 64, "block_size": 32}
    case = make_case(lengths, scales=KVScales(0.3, 2.7), **shape)
    emulate(case, pieces, group, RingLayout(16, 4, 3, 1), before_the_step(case))


@pytest.mark.parametrize("pieces", [1, 3, 7])
def test_tokens_of_a_row_as_decodes_of_their_own(pieces: int) -> None:
    """As a recorded step has them. A whole tile lies behind a later token, and was written in this step."""
    if torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU here; test_ring_decode_gpu.py covers it")
    lengths = [(1, 100), (40, 77), (70, 70), (5, 34), (1, 35), (1, 3)]
    case = as_single_tokens(make_case(lengths, num_kv_heads=NUM_KV_HEADS, head_dim=64, block_size=32))
    assert emulate(case, pieces, 2, RingLayout(16, 4, 3, 1), before_the_step(case))


def test_a_recorded_step_has_the_tokens_of_a_row_side_by_side() -> None:
    """The kernel takes what lies before the first of them for old, and before the others nothing."""
    several = [Scheduled(7, 3, 10, 4, True, ()), Scheduled(8, 1, 90, 1, True, ()), Scheduled(9, 2, 0, 3, False, ())]
    seen: list[Any] = []
    graphs: Any = types.SimpleNamespace(sizes=[256], max_several=256, max_keys=1000, scratch_row=9)
    graphs._fits = partial(DecodeSteps._fits, graphs)

    def run(tokens: Any) -> Sampled:
        seen.append(tokens.T.tolist())
        nothing = torch.zeros(8)
        return Sampled(nothing, nothing, nothing, nothing, None)

    graphs.run = run
    found = DecodeSteps.replay(graphs, several)
    rows = [(9, 3, 10), (9, 3, 11), (9, 3, 12), (3, 3, 13), (1, 1, 90), (9, 2, 0), (9, 2, 1), (9, 2, 2)]
    assert seen == [[list(row) for row in rows]]
    assert found is not None and found.chosen is not None and found.chosen.tolist() == [3, 4]


# --- what it compiles to ---------------------------------------------------------------------------------------------

COMPILED: list[tuple[int, int, int, int, int, int, str, bool]] = [
    # sequences, head_dim, KV heads, group, block size, queries, dtype, whether it may start early
    (64, 128, 8, 2, 256, 1, "bf16", True),
    (64, 128, 8, 2, 256, 1, "bf16", False),
    (64, 128, 4, 8, 32, 2, "fp16", True),
    (64, 64, 8, 4, 256, 4, "bf16", True),
    (8, 128, 8, 2, 256, 1, "bf16", True),
    (8, 64, 4, 8, 32, 2, "fp16", False),
    (16, 128, 8, 2, 256, 1, "fp8", True),
    (16, 64, 4, 8, 64, 2, "fp8", False),
]


def gives_up_together(ptx: str) -> bool:
    """Whether all warps have read a place before one thread gives it up: only the compiler puts that barrier there."""
    read = ptx.rindex("ldmatrix", 0, ptx.rindex("mbarrier.arrive.shared"))
    return "bar.sync" in ptx[read : ptx.index("mbarrier.arrive.shared", read)]


def compile_case(
    num_sequences: int, head_dim: int, num_kv_heads: int, group: int, block_size: int, queries: int, dtype: str,
    early: bool,
) -> dict[str, Any]:  # fmt: skip
    """For a Hopper GPU that this machine need not have. Not in a process that has switched the interpreter on."""
    import triton
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = kernels._ring_kernel
    in_fp8 = dtype == "fp8"
    layout = layout_of(num_sequences, group, num_kv_heads, head_dim, block_size, kv_dtype=FP8 if in_fp8 else None)
    assert layout is not None
    keys, heads, stages = layout.keys, layout.heads, layout.stages
    words, element, dtype = (head_dim // 2, "i16", "bf16") if in_fp8 else (head_dim, dtype, dtype)
    constants: dict[str, Any] = {
        "NUM_KV_HEADS": num_kv_heads, "HEADS": heads, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size,
        "QUERIES": queries, "KEYS": keys, "WORDS": words, "STAGES": stages, "REGISTERS": kernels.PRODUCER_REGISTERS,
        "PDL": early,
    }  # fmt: skip
    signature = dict.fromkeys(kernel.arg_names, "i32") | {
        "q_ptr": f"*{dtype}", "kv_desc": f"tensordesc<{element}{[heads, keys, words]},{kernels.BOXES[words]!r}>",
        "out_ptr": f"*{dtype}", "m_ptr": "*fp32", "denom_ptr": "*fp32", "acc_ptr": "*fp32", "scale": "fp32",
        "v_scale": "fp32",
        **dict.fromkeys(("block_table_ptr", "query_start_ptr", "context_len_ptr", "piece_ptr"), "*i32"),
    }  # fmt: skip
    constants |= {} if in_fp8 else {"v_scale": None}
    signature |= dict.fromkeys(constants, "constexpr")
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = "q_ptr", "out_ptr", "m_ptr", "denom_ptr", "acc_ptr", "piece_ptr", "q_stride", "v_slot"
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(kernel, signature, values, attributes)
    options = {"num_warps": heads, "launch_pdl": early, "maxnreg": layout.max_registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptxas = Path(nvidia.__path__[0]) / "bin" / "ptxas"
    command = [str(ptxas), "-v", "-arch=sm_90a", "-", "-o", os.devnull]
    said = subprocess.run(command, input=compiled.asm["ptx"], capture_output=True, text=True).stderr
    return {
        "shared": compiled.metadata.shared,
        "spilled": [int(n) for n in re.findall(r"(\d+) bytes spill", said)],
        "registers": [int(n) for n in re.findall(r"Used (\d+) registers", said)],
        "waits": compiled.asm["ptx"].count("griddepcontrol.wait"),
        "boxes": len(re.findall(r"cp\.async\.bulk\.tensor\.3d", compiled.asm["ptx"])),
        "together": gives_up_together(compiled.asm["ptx"]),
    }


@pytest.mark.slow
def test_it_fits_a_hopper_multiprocessor() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.test_ring_decode"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    for case, found in zip(COMPILED, json.loads(done.stdout.splitlines()[-1]), strict=True):
        said = f"{case}: {found}"
        assert found["spilled"] and not any(found["spilled"]), said
        assert found["registers"] == [kernels.MAX_REGISTERS], said
        assert (kernels.SMALL_RING_BYTES if case[0] == 8 else kernels.RING_BYTES) <= found["shared"] <= 227 * 1024, said
        assert found["waits"] == (2 if case[-1] else 0) and found["boxes"] >= 2, said
        assert found["together"], said


if __name__ == "__main__":
    print(json.dumps([compile_case(*case) for case in COMPILED]))
