"""The sum over the ranks with the norm behind it: one rank's kernel, and in its buffer what the others would send.

Several ranks at once are in tests/engine/test_one_shot.py, on GPUs.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nanovllm.kernels.fused.sum_over_ranks import EMPTY, MAX_ROWS, ROW_BYTES, sum_over_ranks
from nanovllm.layers.norm import add_rms_norm, rms_norm

ON = [
    pytest.param("cpu", torch.float32, id="interpreter"),
    *(
        pytest.param("cuda", dtype, id=str(dtype).removeprefix("torch."), marks=pytest.mark.gpu)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ),
]


class Ranks:
    """The buffers of all of them, on one device, and their turns."""

    def __init__(self, size: int, device: str) -> None:
        shape = 2, size, MAX_ROWS, ROW_BYTES // 4
        self.buffers = [torch.full(shape, EMPTY, dtype=torch.int32, device=device) for _ in range(size)]
        self.turns = [torch.zeros(MAX_ROWS, dtype=torch.int32, device=device) for _ in range(size)]

    def views(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(b if dtype.itemsize == 4 else b.view(torch.int16) for b in self.buffers)

    def sum(self, xs: list[Tensor], dtype: torch.dtype, **then: Any) -> list[tuple[Tensor, Tensor]]:
        """Rank by rank, each finding in its buffer what the kernels of the others would send."""
        views, found = self.views(dtype), []
        rows, size = xs[0].shape[-2:]
        empty = EMPTY if dtype.itemsize == 4 else -0x8000
        sent = [(x.sum(0) if x.dim() == 3 else x).to(dtype).view(views[0].dtype) for x in xs]
        sent = [words.where(words != empty, 0) for words in sent]
        for rank, x in enumerate(xs):
            place = [int(turn) for turn in self.turns[rank][:rows]]
            for peer, words in enumerate(sent):
                for row in range(rows):
                    if peer != rank:
                        views[rank][place[row], peer, row, :size] = words[row]
            found.append(sum_over_ranks(x, views, self.turns[rank], rank, dtype, **then))
            for peer, buffer in enumerate(views):
                for row in range(rows):
                    mine = buffer[place[row], rank, row]
                    if peer != rank:
                        assert torch.equal(mine[:size], sent[rank][row]), "every other rank has got our row"
                        mine.fill_(empty)  # and would have read it
        assert all((buffer == EMPTY).all() for buffer in self.buffers), "and what was read makes room"
        return found


@pytest.mark.parametrize(("device", "dtype"), ON)
@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_get_the_sum_and_its_norm(device: str, dtype: torch.dtype, size: int) -> None:
    """Again and again, so that places are used a second time, with fewer rows and more, of other lengths."""
    ranks, seed = Ranks(size, device), 0
    for rows, width in [(3, 96), (1, 1000), (5, 96), (2, 128), (3, 128), (1, 96)]:
        numbers = torch.randn(size + 2, rows, width, generator=torch.Generator().manual_seed(seed := seed + 1))
        numbers[:, 0, :4] = -0.0  # which means "nothing has come" in 16 bits
        xs, residual, weight = list(numbers[:size].to(device, dtype)), numbers[-2].to(device, dtype), numbers[-1, 0]
        weight = weight.to(device, dtype)
        found = ranks.sum(xs, dtype, norm=(weight, 1e-6), residual=residual)
        total = torch.stack([x.float() for x in xs]).sum(0) + residual.float()
        for ours in found:
            tolerance = 1e-6 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(ours[1].float(), total, rtol=tolerance, atol=tolerance)
            normed = rms_norm(ours[1], weight, 1e-6)
            torch.testing.assert_close(ours[0], normed, rtol=tolerance, atol=tolerance)
            assert torch.equal(ours[0], found[0][0]) and torch.equal(ours[1], found[0][1]), "same bits everywhere"


@pytest.mark.parametrize(("device", "dtype"), ON)
def test_parts_are_added_before_they_are_sent(device: str, dtype: torch.dtype) -> None:
    ranks = Ranks(2, device)
    xs = [torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(rank)).to(device) for rank in range(2)]
    for out, total in ranks.sum(xs, dtype):
        expected = sum(x.sum(0).to(dtype).float() for x in xs)
        torch.testing.assert_close(total, torch.as_tensor(expected).to(dtype), rtol=1e-2, atol=1e-2)
        assert torch.equal(out, total), "without a norm"


def test_only_the_empty_number_is_sent_as_another() -> None:
    """In 32 bits a number is empty only as a whole, and those next to it come through."""
    ranks = Ranks(2, "cpu")
    words = torch.tensor([EMPTY, EMPTY + 1, EMPTY - 1, 0x8000, -0x80000000, 0], dtype=torch.int32)
    x = words.view(torch.float32)[None]
    for _, total in ranks.sum([torch.zeros_like(x), x], torch.float32):
        assert torch.equal(total, x.where(words != EMPTY, 0.0))


def test_it_does_what_the_plain_norm_does() -> None:
    ranks = Ranks(2, "cpu")
    xs = [torch.randn(4, 64, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    residual, weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)), torch.ones(64)
    expected = add_rms_norm(xs[0] + xs[1], residual, weight, 1e-6)
    for found in ranks.sum(xs, torch.float32, norm=(weight, 1e-6), residual=residual):
        torch.testing.assert_close(found, expected)


def compile_for(size: int) -> str:
    """PTX for a Hopper GPU that this machine need not have. Not in a process that has switched the interpreter on."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from nanovllm.kernels.fused import sum_over_ranks as module

    found: list[str] = []

    class Launch:
        """In the kernel's place: compiles what would be launched."""

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return self.compile

        def compile(self, *tensors: Any, num_warps: int, launch_pdl: bool, **constants: Any) -> None:
            kernel = usual
            names = kernel.arg_names
            signature: dict[str, Any] = dict.fromkeys(names[:5], "*bf16") | {"buffers": ("*i16", "*i16")}
            signature |= {"turn_ptr": "*i32", "eps": "fp32"} | dict.fromkeys(constants, "constexpr")
            values = {(names.index(name),): value for name, value in constants.items()}
            places = [(i,) for i in (0, 1, 2, 3, 4, 6)] + [(5, 0), (5, 1)]
            attributes = {place: [["tt.divisibility", 16]] for place in places}
            source = ASTSource(kernel, signature, values, attributes)
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
            found.append(compiled.asm["ptx"])

    usual: Any = module._sum_over_ranks_kernel
    module._sum_over_ranks_kernel = Launch()
    x, buffers = torch.zeros(2, size, dtype=torch.bfloat16), (torch.zeros(1, dtype=torch.int16),) * 2
    module.sum_over_ranks(x, buffers, torch.zeros(2), 0, x.dtype, norm=(x[0], 1e-6), residual=x)
    return found[0]


@pytest.mark.parametrize("size", [33, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 4096))])
def test_a_place_is_emptied_only_when_all_threads_have_read(size: int) -> None:
    """Between the loads that wait and the stores that empty there is a barrier in what runs on a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = f"from tests.kernels.test_sum_over_ranks import compile_for; print(compile_for({size}))"
    command = [sys.executable, "-c", program]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    loads = [i for i, line in enumerate(lines) if "ld.volatile.global" in line or "ld.relaxed.sys.global" in line]
    sends = [i for i, line in enumerate(lines) if "st.global.wt" in line]
    empties = [i for i, line in enumerate(lines) if "st.global" in line and i > max(loads)]
    assert sends and max(sends) < min(loads), "what the others wait for is sent first"
    between = [line for line in lines[max(loads) : min(empties)] if "bar.sync" in line]
    assert between, "no barrier"
