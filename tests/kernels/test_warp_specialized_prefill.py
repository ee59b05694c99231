"""Prefill by warps with different tasks: what gets it, what it computes, and what it compiles to.

Triton's interpreter cannot run Gluon: `warp_specialized_prefill_as_python.py` stands in for it here, and
`test_attention_gpu.py` runs the kernel itself.
"""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from nanovllm.kernels.hopper import warp_specialized_prefill as kernels
from tests.kernels.attention_cases import Lengths, make_case
from tests.kernels.warp_specialized_prefill_as_python import emulate

ROOT = Path(__file__).parents[2]

# --- what gets it ----------------------------------------------------------------------------------------------------


def fits(group: int = 2, head_dim: int = 128, block_size: int = 256, dtype: torch.dtype = torch.bfloat16) -> bool:
    q = torch.empty(40, 2 * group, head_dim, dtype=dtype, device="meta")
    return kernels.fits(q, torch.empty(2, 9, block_size, 2, head_dim, dtype=dtype, device="meta"))


def test_what_gets_it() -> None:
    assert fits() and fits(dtype=torch.float16) and fits(block_size=64)
    assert not fits(block_size=32) and not fits(dtype=torch.float32)
    assert [n for n in range(1, 33) if fits(group=n)] == [1, 2, 4, 8, 16]
    assert [n for n in (16, 32, 64, 96, 128, 256) if fits(head_dim=n)] == [64, 128]


# --- what it computes ------------------------------------------------------------------------------------------------

MIXED: Lengths = [(1, 40), (1, 5), (40, 73), (17, 17), (90, 200), (64, 64), (33, 160), (3, 130)]


@pytest.mark.parametrize(
    ("group", "keys", "stages", "programs", "first_sequence"),
    [(1, 32, 2, 1, 0), (2, 32, 2, 3, 0), (2, 64, 4, 40, 2), (4, 32, 3, 2, 2), (8, 64, 2, 5, 0)],
)
@pytest.mark.parametrize("block_size", [64, 256])
def test_what_it_computes(
    block_size: int, group: int, keys: int, stages: int, programs: int, first_sequence: int
) -> None:
    """One tile of keys, two and more; programs that get no tile of queries; NaN wherever nothing may be read."""
    case = make_case(MIXED, group=group, head_dim=16, block_size=block_size)
    out = emulate(case, keys, stages, 32, programs, first_sequence)
    assert out[:first_sequence].isnan().all()  # left alone
    error = (out.double() - case.expected).norm(dim=-1) / case.expected.norm(dim=-1)
    assert error[first_sequence:].max() <= 1e-5  # false of a NaN


def test_sequences_without_queries_and_16_heads_of_a_kv_head() -> None:
    lengths = [(1, 40), (0, 1), (5, 70), (0, 30), (130, 130), (0, 1), (1, 1), (0, 1)]
    case = make_case(lengths, group=16, num_kv_heads=1, head_dim=16, block_size=64)
    out = emulate(case, 32, 2, 64, 3)
    error = (out.double() - case.expected).norm(dim=-1) / case.expected.norm(dim=-1)
    assert error.max() <= 1e-5


def test_a_context_that_cannot_be_does_not_stop_the_others() -> None:
    """Of a sequence with more queries than its context has tokens nothing is known, but nobody waits for ever."""
    case = make_case([(64, 64), (40, 40), (300, 300)], head_dim=16, block_size=64)
    case.meta.context_len[1] = 0
    out = emulate(case, 32, 2, 32, 1)
    error = (out.double() - case.expected).norm(dim=-1) / case.expected.norm(dim=-1)
    assert error[:64].max() <= 1e-5 and error[104:].max() <= 1e-5


# --- what it compiles to ---------------------------------------------------------------------------------------------

COMPILED: list[tuple[int, int, int, int, str, int]] = [  # head_dim, KV heads, group, block size, dtype, sequences
    (128, 8, 2, 256, "bf16", 32),
    (128, 8, 4, 64, "fp16", 512),
    (64, 4, 8, 256, "bf16", 32),
]


def exponentials_under_products(cubin: bytes, tools: Path) -> list[int]:
    """How many exponentials are computed between the wait for a product with keys and that for one with values."""
    path = Path(os.environ["SASS_OF"])
    path.write_bytes(cubin)
    listing = subprocess.run([str(tools / "cuobjdump"), "-sass", str(path)], capture_output=True, text=True).stdout
    lines = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", listing)
    waits = [(i, int(line.split(",")[-1], 16)) for i, line in enumerate(lines) if "DEPBAR.LE gsb" in line]
    return [sum("MUFU.EX2" in line for line in lines[i:j]) for (i, a), (j, b) in pairwise(waits) if (a, b) == (1, 0)]


def compile_case(
    head_dim: int, num_kv_heads: int, group: int, block_size: int, dtype: str, sequences: int
) -> dict[str, Any]:
    """For a Hopper GPU that this machine need not have. Not in a process that has switched the interpreter on."""
    import triton
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = kernels._warp_specialized_prefill_kernel
    constants = {
        "HEADS": num_kv_heads, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size, "ROWS": kernels.ROWS,
        "KEYS": kernels.KEYS, "STAGES": kernels.STAGES, "NOTES": kernels.NOTES, "SEQUENCES": sequences,
        "PRODUCER_REGISTERS": kernels.PRODUCER_REGISTERS, "CONSUMER_REGISTERS": kernels.CONSUMER_REGISTERS,
    }  # fmt: skip
    rows = min(kernels.ROWS, 2 * kernels.ROWS // group)
    signature = dict.fromkeys(kernel.arg_names, "i32") | {
        "q_desc": f"tensordesc<{dtype}{[rows, head_dim]},{kernels.BOX!r}>",
        "kv_desc": f"tensordesc<{dtype}{[kernels.KEYS, head_dim]},{kernels.BOX!r}>",
        "out_ptr": f"*{dtype}", "scale": "fp32",
        **dict.fromkeys(("taken_ptr", "block_table_ptr", "query_start_ptr", "context_len_ptr"), "*i32"),
    }  # fmt: skip
    signature |= dict.fromkeys(constants, "constexpr")
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in ("out_ptr", "v_slot")}
    source = GluonASTSource(kernel, signature, values, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    tools = Path(nvidia.__path__[0]) / "bin"
    command = [str(tools / "ptxas"), "-v", "-arch=sm_90a", "-", "-o", os.devnull]
    said = subprocess.run(command, input=compiled.asm["ptx"], capture_output=True, text=True).stderr
    return {
        "shared": compiled.metadata.shared,
        "spilled": [int(n) for n in re.findall(r"(\d+) bytes spill", said)],
        "exponentials": exponentials_under_products(compiled.asm["cubin"], tools),
    }


@pytest.mark.slow
def test_exponentials_are_taken_while_tensor_cores_multiply(tmp_path: Path) -> None:
    """ptxas moves waits: nothing but the machine code shows whether there is something to do under a product."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["SASS_OF"] = str(tmp_path / "kernel.cubin")
    command = [sys.executable, "-m", "tests.kernels.test_warp_specialized_prefill"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    for case, found in zip(COMPILED, json.loads(done.stdout.splitlines()[-1]), strict=True):
        said = f"{case}: {found}"
        assert found["spilled"] and not any(found["spilled"]), said
        assert found["shared"] <= 227 * 1024, said
        # For the second tile, masked ones and others, of either group: a thread has half as many as there are keys.
        assert len(found["exponentials"]) == 6 and min(found["exponentials"]) >= kernels.KEYS // 2, said


if __name__ == "__main__":
    print(json.dumps([compile_case(*case) for case in COMPILED]))
