"""Compile the attention kernels for absent GPUs: `python -m tests.kernels.compile_attention 90 bf16 128 2 256`.

Prints JSON: for each kernel the shared memory of a program in bytes. Run in a process of its own, because the tests'
process has Triton's interpreter switched on, and the interpreter accepts much that a GPU does not.
"""

import json
import sys
from itertools import product
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanovllm.kernels import kv_write, paged_decode, paged_prefill

ELEMENT_SIZE = {"fp32": 4, "fp16": 2, "bf16": 2}
INTEGERS = ("block_table_ptr", "query_start_ptr", "context_len_ptr")
PARTIALS = ("m_ptr", "denom_ptr", "acc_ptr")


def shared_memory(kernel: Any, capability: int, dtype: str, constants: dict[str, int], warps: int, stages: int) -> int:
    """Compile down to machine code; the types of the arguments follow from their names."""
    kinds = dict.fromkeys(INTEGERS, "*i32") | dict.fromkeys(PARTIALS, "*fp32")
    kinds |= {"slots_ptr": "*i64", "scale": "fp32", "v_offset": "i64"}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = kinds.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
            if name in ("q_ptr", "kv_ptr", "k_ptr", "v_ptr", "out_ptr", "v_offset") or name.endswith("_stride"):
                attributes[(i,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, attributes)
    options = {"num_warps": warps, "num_stages": stages}
    return int(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared)


def compile_all(capability: int, dtype: str, head_dim: int, group: int, block_size: int) -> dict[str, int]:
    size = ELEMENT_SIZE[dtype]
    shape = {"NUM_KV_HEADS": 8, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size}
    decode = paged_decode.decode_config(head_dim, size)
    prefill = paged_prefill.prefill_config(head_dim, size, capability in (90, 100))
    return {
        "write": shared_memory(
            kv_write._kv_write_kernel, capability, dtype, {"WIDTH": 8 * head_dim, "PADDED": 8 * head_dim}, 4, 3
        ),
        "decode": shared_memory(
            paged_decode._decode_kernel,
            capability,
            dtype,
            shape | {"QUERIES": 1, "ROWS": 16, "KEYS": decode.keys, "SEQUENCES": 512},
            decode.num_warps,
            decode.num_stages,
        ),
        "merge": shared_memory(
            paged_decode._merge_kernel,
            capability,
            dtype,
            {"NUM_HEADS": 8 * group, "HEAD_DIM": head_dim, "QUERIES": 1, "KEYS": decode.keys, "SEQUENCES": 512}
            | {"MERGED": paged_decode.MERGED_AT_ONCE},
            1,
            3,
        ),
        "prefill": shared_memory(
            paged_prefill._prefill_kernel,
            capability,
            dtype,
            shape | {"QUERIES": prefill.rows // group, "ROWS": prefill.rows, "KEYS": prefill.keys, "SEQUENCES": 32},
            prefill.num_warps,
            prefill.num_stages,
        ),
    }


if __name__ == "__main__":
    capabilities, dtypes, head_dims, groups, block_sizes = (a.split(",") for a in sys.argv[1:])
    print(
        json.dumps(
            {
                ", ".join(case): compile_all(int(case[0]), case[1], *map(int, case[2:]))
                for case in product(capabilities, dtypes, head_dims, groups, block_sizes)
            }
        )
    )
