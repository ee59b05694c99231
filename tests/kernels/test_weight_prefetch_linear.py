"""The linear layer in Gluon: which layers get it, what it compiles to, and on a Hopper GPU what it computes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial as bind
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from nanovllm.kernels.fused.add_rms_norm import add_rms_norm
from nanovllm.kernels.hopper import weight_prefetch_linear as kernels
from nanovllm.kernels.hopper.prefetch_tiles import (
    SHARED_BYTES,
    PrefetchTile,
    can_have_norm,
    choose_fp8_tile,
    choose_tile,
    norm_in_fp8,
)
from nanovllm.kernels.linear import choice
from nanovllm.kernels.linear.choice import choose_linear, choose_norm_linear, choose_on_any_gpu, hopper_linear
from tests.kernels.as_card import as_card

ROOT = Path(__file__).parents[2]
HOW: dict[str, dict[str, bool]] = {"plain": {}, "gated": {"gated": True}, "partial": {"partial": True}}
LAYERS = {
    "0.6B": [("plain", 4096, 1024), ("partial", 1024, 2048), ("gated", 6144, 1024), ("partial", 1024, 3072)],
    "1B": [("plain", 3072, 2048), ("partial", 2048, 2048), ("gated", 16384, 2048), ("partial", 2048, 8192)],
    "8B": [("plain", 6144, 4096), ("partial", 4096, 4096), ("gated", 24576, 4096), ("partial", 4096, 12288)],
    "8B on 2 ranks": [("plain", 3072, 4096), ("partial", 4096, 2048), ("gated", 12288, 4096), ("partial", 4096, 6144)],
    "8B on 4 ranks": [("plain", 1536, 4096), ("partial", 4096, 1024), ("gated", 6144, 4096), ("partial", 4096, 3072)],
}


def empty(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(outputs, inputs, dtype=dtype, device="meta")


def stand_in(*_: object, **__: object) -> Tensor:
    raise AssertionError("is chosen only")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "weight_prefetch_linear", stand_in)
    monkeypatch.setattr(kernels, "norm_linear", stand_in)
    monkeypatch.setattr(choice, "hopper_linear", lambda device: kernels)
    with as_card((9, 0)):
        yield


def tile_of(num_tokens: int, kind: str, outputs: int, inputs: int, **dtype: torch.dtype) -> PrefetchTile | None:
    chosen = choose_linear(num_tokens, empty(outputs, inputs, **dtype), **HOW[kind])
    if not isinstance(chosen, bind) or chosen.func is not stand_in:
        return None
    assert {name: chosen.keywords[name] for name in ("gated", "partial")} == {
        "gated": kind == "gated",
        "partial": kind == "partial",
    }
    tile: PrefetchTile = chosen.keywords["tile"]
    return tile


def test_which_layers_get_it(hopper: None) -> None:
    """As many letters as token counts: which of qkv, o, gate and up, down."""
    counts = 1, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257
    found = {}
    for model, layers in LAYERS.items():
        asked = [[tile_of(n, *layer) is not None for layer in layers] for n in counts]
        found[model] = " ".join("".join(c for c, used in zip("qogd", row, strict=True) if used) or "-" for row in asked)
    assert found == {
        "0.6B": "qogd qogd qogd qogd qogd qogd qogd qogd qogd qogd -",
        "1B": "qogd qogd qogd qogd qogd qogd qogd qogd qo qo -",
        "8B": "qod qod qogd qogd od od - - - - -",
        "8B on 2 ranks": "qod qod qogd qogd qod qod q q - - -",
        "8B on 4 ranks": "qogd qogd qogd qogd qogd qogd q q q q -",
    }


@pytest.mark.parametrize("gated", [False, True])
def test_which_layers_have_the_norm_inside(gated: bool, hopper: None) -> None:
    counts = {
        inputs: [n for n in (1, 2, 3, 4, 5, 16) if choose_norm_linear(n, empty(4096, inputs), gated=gated)]
        for inputs in (896, 1024, 2048)
    }
    assert counts == {896: [], 1024: [1, 2, 3, 4], 2048: [1, 2]}
    assert choose_norm_linear(1, empty(4096, 1024, torch.float32), gated=gated) is None
    assert choose_norm_linear(1, empty(4096 + 32, 1024), gated=gated) is None, "no whole tiles"
    in_fp8 = {
        inputs: [
            n
            for n in (1, 2, 4, 5)
            if choose_norm_linear(n, empty(6 * inputs if gated else 6144, inputs, torch.float8_e4m3fn), gated=gated)
        ]
        for inputs in (896, 1024, 2048, 4096)
    }
    assert in_fp8 == {896: [], 1024: [], 2048: [1, 2], 4096: [] if gated else [1]}


def test_tiles_for_a_few_more_tokens(hopper: None) -> None:
    """Layers of a small model with 5 to 8 tokens: other tiles than with more or fewer."""
    q, o, g, d = LAYERS["0.6B"]
    for num_tokens in (5, 8):
        assert tile_of(num_tokens, *q) == PrefetchTile(8, 128, 6, 1, cuts=2)
        assert tile_of(num_tokens, *g) == PrefetchTile(8, 128, 8, 1)
        assert tile_of(num_tokens, *o) == tile_of(num_tokens, *d) == PrefetchTile(8, 128, 4, 4)
    for num_tokens, cuts, stages in ((4, (2, 8), 6), (9, (1, 1), 4), (32, (1, 1), 4), (33, (1, 1), 6)):
        tiles = [tile_of(num_tokens, *layer) for layer in (q, d)]
        assert tuple(tile.cuts for tile in tiles if tile) == cuts
        assert tiles[1] is not None and tiles[1].stages == stages


def test_a_shape_or_dtype_that_is_none_for_it(hopper: None) -> None:
    assert tile_of(32, "plain", 4096, 4096, dtype=torch.float16) is not None
    assert choose_linear(32, empty(4096, 4096, torch.float32)) is None
    assert tile_of(32, "plain", 4096, 4096 + 64) is None
    assert tile_of(32, "plain", 4096 + 32, 4096) is None
    assert tile_of(32, "gated", 8192 + 64, 4096) is None and tile_of(32, "gated", 8192 + 128, 4096) is not None


def test_where_it_cannot_run_it_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another GPU, or a Triton that has moved Gluon: the chooser takes what runs on any."""
    monkeypatch.setattr(choice, "hopper_linear", lambda device: None)
    for num_tokens in (17, 64, 65, 128, 129, 256):
        for kind, outputs, inputs in (layer for layers in LAYERS.values() for layer in layers):
            weight = empty(outputs, inputs)
            chosen = choose_linear(num_tokens, weight, **HOW[kind])
            before = choose_on_any_gpu(num_tokens, weight, **HOW[kind])
            assert (chosen and chosen.keywords) == (before and before.keywords)  # type: ignore[attr-defined]


@pytest.mark.parametrize("most", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", HOW)
def test_all_programs_run_at_once_if_they_can(kind: str, most: int) -> None:
    for num_tokens in (1, 17, 64, 65, 129, 256):
        for columns in (64, 1024, 1536, 4096, 12288, 25600):
            for inputs in (128, 384, 1024, 3072, 12288):
                tile = choose_tile(num_tokens, columns, inputs, most, kind == "gated", kind == "partial")
                assert inputs % (tile.splits * tile.inner) == 0 and (tile.splits == 1 or kind == "partial")
                size = tile.stages * 2 * tile.inner * (64 + tile.tokens)
                tiles = columns // (32 if kind == "gated" else 64) * -(-num_tokens // tile.tokens)
                resident = min(3, -(-tiles * tile.splits // 128))
                assert size * (resident if tile.stages > 3 else 1) <= SHARED_BYTES
                assert 16 <= tile.tokens <= most and tile.tokens < 2 * max(9, num_tokens) and tile.cuts == 1


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", HOW)
def test_for_a_handful_of_tokens_programs_are_enough_and_run_at_once(kind: str, norm: bool) -> None:
    for num_tokens in (1, 2, 3, 4):
        for columns in (64, 1024, 1536, 4096, 12288):
            for inputs in (128, 384, 1024, 3072)[: 3 if norm else 4]:
                gated, partial = kind == "gated", kind == "partial" and not norm
                tile = choose_tile(num_tokens, columns, inputs, 16, gated, partial, handful=True, norm=norm)
                assert num_tokens <= tile.tokens and tile.tokens * tile.cuts >= 8 and tile.cuts <= 8
                assert inputs % (tile.cuts * tile.splits * tile.inner) == 0
                programs = columns * tile.cuts * tile.splits // (32 if gated else 64)
                halved = inputs % (256 * tile.cuts) == 0 and tile.cuts < 8 and not gated
                assert programs > 64 or not halved, "it could be cut once more"
                size = tile.stages * 2 * tile.inner * (64 + (0 if norm else tile.tokens * tile.cuts))
                size += 2 * tile.tokens * inputs if norm else 0
                assert size * (min(3, -(-programs // 128)) if tile.stages > 3 else 1) <= SHARED_BYTES


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", HOW)
def test_in_fp8_all_programs_run_at_once(kind: str, norm: bool) -> None:
    """With whole blocks of 128 inputs in a step, and three blocks under way at least."""
    for num_tokens in (1, 2, 4, 8, 9, 17, 64, 65, 1000):
        for columns in (64, 1024, 4096, 6144, 12288, 25600):
            for inputs in (128, 384, 1024, 4096, 12288, 18944):
                gated, partial = kind == "gated", kind == "partial" and not norm
                if norm and not (norm_in_fp8(columns, inputs, gated) and can_have_norm(num_tokens, inputs)):
                    continue
                tile = choose_fp8_tile(num_tokens, columns, inputs, gated, partial, norm=norm)
                depth, rows = inputs // (tile.splits * tile.cuts), tile.tokens * tile.cuts
                assert tile.inner % 128 == 0 and depth * tile.splits * tile.cuts == inputs and depth % tile.inner == 0
                assert tile.splits == 1 or (partial and tile.splits <= 4)
                assert rows >= 8 and (tile.cuts == 1 or (not gated and tile.splits == 1 and num_tokens <= 4))
                tiles = columns * tile.cuts // (32 if gated else 64) * -(-num_tokens // tile.tokens)
                resident = min(3, -(-tiles * tile.splits // 128))
                size = tile.stages * tile.inner * (64 + (0 if norm else 2 * rows)) + 2 * tile.tokens * inputs * norm
                assert resident * size <= SHARED_BYTES
                assert tile.stages * tile.inner >= min(384, depth) and tile.tokens >= min(num_tokens, 64)


# --- what it compiles to ---------------------------------------------------------------------------------------------

# Kind, tile, steps, whether there is a bias, in FP8 how many rows share a scale (else 0), tokens if the norm is inside
CASES: list[tuple[str, PrefetchTile, int, bool, int, int]] = [
    ("plain", PrefetchTile(32, 128, 6, 1), 32, True, 0, 0),
    ("plain", PrefetchTile(64, 128, 6, 1), 8, False, 0, 0),
    ("partial", PrefetchTile(64, 128, 6, 4), 4, False, 0, 0),
    ("partial", PrefetchTile(64, 128, 3, 4), 4, False, 0, 0),
    ("gated", PrefetchTile(32, 128, 3, 1), 32, False, 0, 0),
    ("gated", PrefetchTile(128, 128, 4, 1), 8, False, 0, 0),
    ("gated", PrefetchTile(128, 64, 4, 1), 16, False, 0, 0),
    ("plain", PrefetchTile(8, 512, 4, 1), 8, True, 1, 0),
    ("plain", PrefetchTile(64, 256, 4, 1), 16, False, 128, 0),
    ("gated", PrefetchTile(64, 128, 3, 1), 32, False, 1, 0),
    ("gated", PrefetchTile(64, 128, 3, 1), 32, False, 128, 0),
    ("partial", PrefetchTile(32, 256, 3, 4), 12, False, 64, 0),
    ("partial", PrefetchTile(1, 128, 6, 1, 8), 3, False, 0, 0),
    ("partial", PrefetchTile(4, 128, 6, 1, 8), 2, False, 0, 0),
    ("plain", PrefetchTile(4, 128, 8, 1, 2), 4, False, 0, 1),
    ("plain", PrefetchTile(4, 128, 3, 1, 2), 4, True, 0, 4),
    ("gated", PrefetchTile(8, 128, 8, 1), 8, False, 0, 1),
    ("gated", PrefetchTile(8, 128, 8, 1), 8, False, 0, 4),
    ("plain", PrefetchTile(4, 128, 8, 1, 2), 8, True, 0, 2),
    ("gated", PrefetchTile(8, 128, 5, 1), 16, False, 0, 2),
    ("partial", PrefetchTile(1, 128, 8, 1, 8), 3, False, 1, 0),
    ("partial", PrefetchTile(4, 256, 4, 1, 2), 4, False, 128, 0),
    ("plain", PrefetchTile(8, 512, 4, 1), 8, True, 1, 1),
    ("plain", PrefetchTile(4, 128, 8, 1, 2), 4, True, 128, 4),
    ("gated", PrefetchTile(8, 256, 4, 1), 4, False, 1, 4),
    ("gated", PrefetchTile(8, 128, 8, 1), 8, False, 128, 2),
]


def compile_case(kind: str, tile: PrefetchTile, steps: int, bias: bool, scale_rows: int, normed: int) -> dict[str, Any]:
    """For a Hopper GPU that this machine need not have. Not in a process that has switched the interpreter on."""
    import triton
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = kernels._weight_prefetch_linear_kernel
    halves, stages = 2 if kind == "gated" else 1, min(tile.stages, steps)
    columns, itemsize = 64 // halves, 1 if scale_rows else 2
    dtype, weight_dtype = "bf16", "fp8e4nv" if scale_rows else "bf16"
    constants = {
        "TOKENS": tile.tokens, "COLUMNS": columns, "INNER": tile.inner, "HALVES": halves, "STAGES": stages,
        "REFILLS": steps > stages, "LINES": kernels.LINES[itemsize], "LINE": 128 // itemsize, "SCALE_ROWS": scale_rows,
        "BIAS": bias, "PDL": True, "CUTS": tile.cuts, "NORMED": normed, "SPLITS": 2,
        "SIZE": steps * tile.inner * tile.cuts if normed else 0,
    }  # fmt: skip
    of_norm = "parts_ptr", "residual_ptr", "norm_ptr", "total_ptr"
    given = {"bias_ptr": bias, "scale_ptr": scale_rows, "x_desc": not normed} | dict.fromkeys(of_norm, normed)
    constants |= {name: None for name, is_given in given.items() if not is_given}  # type: ignore[misc]
    weight_block = [columns // 8, halves, 8, tile.inner]
    signature = dict.fromkeys(kernel.arg_names, "i32") | {
        "x_desc": f"tensordesc<{dtype}{[tile.tokens * tile.cuts, tile.inner]},{kernels.X_LAYOUT!r}>",
        "weight_desc": f"tensordesc<{weight_dtype}{weight_block},{kernels.WEIGHT_LAYOUTS[itemsize]!r}>",
        "weight_ptr": f"*{weight_dtype}", "scale_ptr": "*fp32", "bias_ptr": f"*{dtype}", "parts_ptr": "*fp32",
        "residual_ptr": f"*{dtype}", "norm_ptr": f"*{dtype}", "total_ptr": f"*{dtype}", "eps": "fp32",
        "out_ptr": "*fp32" if kind == "partial" else f"*{dtype}",
    }  # fmt: skip
    signature |= dict.fromkeys(constants, "constexpr")
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = [n for n in kernel.arg_names if n.endswith("_ptr") or n in ("inputs", "outputs")]
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned if n not in constants}
    source = GluonASTSource(kernel, signature, values, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})
    ptx = compiled.asm["ptx"]
    before, _, after = ptx.partition("griddepcontrol.wait")
    ptxas = Path(nvidia.__path__[0]) / "bin" / "ptxas"
    command = [str(ptxas), "-v", "-arch=sm_90a", "-", "-o", os.devnull]
    said = subprocess.run(command, input=ptx, capture_output=True, text=True).stderr
    return {
        "shared": compiled.metadata.shared,
        "spilled": [int(n) for n in re.findall(r"(\d+) bytes spill", said)],
        "registers": [int(n) for n in re.findall(r"Used (\d+) registers", said)],
        "weights before the wait": len(re.findall(r"cp\.async\.bulk\.tensor\.4d", before)),
        "x before the wait": len(re.findall(r"cp\.async\.bulk\.tensor\.2d", before)),
        "x after the wait": len(re.findall(r"cp\.async\.bulk\.tensor\.2d", after)),
        "loads before the wait": len(re.findall(r"ld\.global", before)),
        "loads after the wait": len(re.findall(r"ld\.global", after)),
        "products": len(re.findall(r"wgmma\.mma_async", after)),
    }


def test_the_weights_of_all_stages_are_asked_for_before_the_wait() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.test_weight_prefetch_linear"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    for (kind, tile, steps, bias, scale_rows, normed), found in zip(CASES, answers, strict=True):
        case = f"{kind}, {tile}, {bias}, {scale_rows}, {normed}: {found}"
        assert found["spilled"] and not any(found["spilled"]), case
        stages = min(tile.stages, steps)
        assert found["weights before the wait"] == stages and found["x before the wait"] == 0, case
        orders = max(1, tile.inner // 256)  # of a warp, for the input of a step: four warps, each 64 numbers at a time
        assert found["x after the wait"] == (0 if normed else orders * (stages + (steps > stages))), case
        if normed:
            loads = steps * tile.inner * tile.cuts // 1024  # of the norm's weight: 8 elements for each thread
            scales = 2 if scale_rows else 0  # a thread has the sums of two rows
            assert found["loads before the wait"] == loads + scales, case
            assert found["loads after the wait"] >= 5 * normed, case  # two for each part, and the residual
        assert found["products"] == tile.inner // 16, case
        programs = 227 * 1024 // (found["shared"] + 1024)
        input_bytes = 64 * (1 if scale_rows else 2) + 2 * tile.tokens * tile.cuts * (not normed)
        size = tile.stages * tile.inner * input_bytes + 2 * tile.tokens * steps * tile.inner * tile.cuts * (normed > 0)
        assert programs >= min(3, SHARED_BYTES // size), case


# --- what it computes ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 17, 64, 65, 100, 129, 256])
@pytest.mark.parametrize("kind", ["plain", "bias", "gated", "partial"])
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 64), (384, 192), (1024, 320), (4096, 1024)])
def test_weight_prefetch_linear(kind: str, num_tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    if hopper_linear(device) is None:
        pytest.skip("no Hopper GPU")

    def normal(*shape: int, seed: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    halves = 2 if kind == "gated" else 1
    x, weight = normal(num_tokens, inputs, seed=0), normal(halves * outputs, inputs, seed=1) / 16
    bias = normal(outputs, seed=2) if kind == "bias" else None
    truth = x.double() @ weight.double().t()
    if kind == "gated":
        gate, up = truth.chunk(2, -1)
        truth = torch.nn.functional.silu(gate) * up
    elif bias is not None:
        truth += bias
    gated, partial = kind == "gated", kind == "partial"
    tiles = [choose_tile(num_tokens, outputs, inputs, 64, gated, partial)]
    if num_tokens <= 8:
        tiles += [choose_tile(num_tokens, outputs, inputs, n, gated, partial, handful=True) for n in (16, 8)]
        tiles.append(choose_tile(num_tokens, outputs, inputs, 8, gated, partial, num_stages=8))
    if dtype == torch.bfloat16:
        tiles += [choose_tile(num_tokens, outputs, inputs, most, gated, partial) for most in (16, 32, 128)]
        tiles += [tiles[0]._replace(stages=3), tiles[-1]._replace(inner=64, stages=4)]
    for tile in dict.fromkeys(tiles):
        ours = kernels.weight_prefetch_linear(x, weight, bias, tile=tile, gated=gated, partial=partial)
        if partial:
            assert ours.shape == (tile.splits, num_tokens, outputs) and ours.dtype == torch.float32
            ours = ours.sum(0)
        assert ours.shape == truth.shape
        error = (ours.double() - truth).norm() / truth.norm()
        limit = 1e-5 if partial else 4e-3 if dtype == torch.bfloat16 else 1e-3
        assert error < limit, (tile, error)


@pytest.mark.gpu
@pytest.mark.parametrize(("parts", "dtype"), [(3, torch.bfloat16), (1, torch.float16), (0, torch.bfloat16)])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["plain", "bias", "gated"])
@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 8192), (1024, 4096), (1024, 320), (128, 64)])
def test_norm_linear(kind: str, num_tokens: int, inputs: int, outputs: int, parts: int, dtype: torch.dtype) -> None:
    """The sum is that of `add_rms_norm` bit for bit, and the result that of the same product. parts: 0 is no parts."""
    device = torch.device("cuda", torch.cuda.current_device())
    if hopper_linear(device) is None:
        pytest.skip("no Hopper GPU")
    torch.manual_seed(0)
    shape = (parts, num_tokens, inputs) if parts else (num_tokens, inputs)
    x = torch.randn(shape, device=device, dtype=torch.float32 if parts else dtype)
    gated, halves = kind == "gated", 2 if kind == "gated" else 1
    residual, norm_weight = torch.randn(num_tokens, inputs, device=device).to(dtype), torch.rand(inputs, device=device)
    weight, norm_weight = torch.randn(halves * outputs, inputs, device=device).to(dtype) / 16, norm_weight.to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype) if kind == "bias" else None
    tile = choose_tile(num_tokens, outputs, inputs, 64, gated, False)
    normed, total = add_rms_norm(x, residual, norm_weight, 1e-6)
    expected = kernels.weight_prefetch_linear(normed, weight, bias, tile=tile, gated=gated)
    tile = choose_tile(num_tokens, outputs, inputs, 16, gated, False, handful=True, norm=True)
    ours, our_total = kernels.norm_linear(x, residual, norm_weight, 1e-6, weight, bias, tile=tile, gated=gated)
    assert torch.equal(our_total, total)
    assert (ours.double() - expected.double()).norm() < 1e-3 * expected.double().norm(), tile


@pytest.mark.gpu
def test_a_recording_reads_what_is_in_its_input_then() -> None:
    """Descriptors are made when a step is recorded, and hold the address of the input."""
    device = torch.device("cuda", torch.cuda.current_device())
    if hopper_linear(device) is None:
        pytest.skip("no Hopper GPU")
    x, weight = torch.zeros(40, 1024, dtype=torch.bfloat16, device=device), torch.randn(512, 1024, device=device)
    weight = weight.bfloat16()
    tile = choose_tile(40, 512, 1024, 64, False, False)
    kernels.weight_prefetch_linear(x, weight, tile=tile)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = kernels.weight_prefetch_linear(x, weight, tile=tile)
        out = kernels.weight_prefetch_linear(between, weight[:, :512].contiguous(), tile=tile)
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    expected = (x.float() @ weight.float().t()).bfloat16().float() @ weight[:, :512].float().t()
    assert (out.float() - expected).norm() < 1e-2 * expected.norm()


if __name__ == "__main__":
    print(json.dumps([compile_case(*case) for case in CASES]))
