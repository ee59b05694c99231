"""Compile the kernels for absent GPUs: `python -m tests.kernels.compile_attention 90 bf16 128 2 256`.

Prints JSON: for each kernel the shared memory of a program in bytes. With `--prefill`: for the prefill kernel alone, a
program's shared memory, a thread's registers and its bytes of stack, where registers are spilled to. Run in a process
of its own, because the tests' process has Triton's interpreter switched on, and the interpreter accepts much that a GPU
does not.
"""

import json
import re
import subprocess
import sys
import tempfile
from functools import partial
from itertools import product
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanovllm.kernels.attention import paged_decode, paged_prefill
from nanovllm.kernels.fused import add_rms_norm, decode_inputs, edits, norm_rope_write, sample, silu_and_mul, threshold
from nanovllm.kernels.fused import top_logprobs as logprobs
from nanovllm.kernels.linear import choice, skinny_linear, tiled_linear

ELEMENT_SIZE = {"fp32": 4, "fp16": 2, "bf16": 2}
INTEGERS = (
    "block_table_ptr", "query_start_ptr", "context_len_ptr", "rows_ptr", "positions_ptr", "token_ids_ptr",
    "input_ids_ptr", "table_ptr", "num_prompt_ptr", "id_ptr", "last_id_ptr", "piece_ptr", "ids_ptr", "stop_ids_ptr",
    "biased_ids_ptr", "bad_ends_ptr", "bad_tokens_ptr", "mask_ptr", "words_ptr", "places_ptr", "notes_ptr",
    "counts_ptr", "num_edits_ptr", "edited_ids_ptr", "found_ptr", "drawn_ptr", "best_id_ptr", "num_above_ptr",
)  # fmt: skip
FLOATS = (
    "m_ptr", "denom_ptr", "acc_ptr", "temperature_ptr", "score_ptr", "border_ptr", "cos_sin_ptr", "repetition_ptr",
    "presence_ptr", "frequency_ptr", "biases_ptr", "raw_ptr", "scores_ptr",
    "top_p_ptr", "log_min_p_ptr", "cells_ptr", "maxima_ptr", "edits_ptr", "best_score_ptr", "sums_ptr", "values_ptr",
)  # fmt: skip
LONG_INTEGERS = (
    "slots_ptr", "seed_ptr", "tokens_ptr", "edited_ptr", "min_tokens_ptr", "num_stop_ids_ptr", "num_biased_ptr",
    "num_bad_words_ptr", "masked_ptr", "top_k_ptr", "masses_ptr", "sampled_ptr", "num_wanted_ptr", "best_ptr",
    "top_ids_ptr", "ranks_ptr",
)  # fmt: skip


def compiled(
    kernel: Any, capability: int, dtype: str, constants: dict[str, Any], warps: int, stages: int,
    registers: int | None = None,
) -> Any:  # fmt: skip
    """Compile down to machine code; the types of the arguments follow from their names."""
    kinds = dict.fromkeys(INTEGERS, "*i32") | dict.fromkeys(FLOATS, "*fp32")
    kinds |= dict.fromkeys(LONG_INTEGERS, "*i64") | {"scale": "fp32", "eps": "fp32", "v_offset": "i64"}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name == "kv_boxes":
            signature[name] = f"tensordesc<{dtype}[{constants['KEYS']}, {constants['HEAD_DIM']}]>"
        else:
            signature[name] = kinds.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
            if not name.endswith(("len_ptr", "start_ptr", "rows_ptr", "positions_ptr", "eps", "scale")):
                attributes[(i,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, attributes)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": bool(constants.get("PDL")), "maxnreg": registers}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def shared_memory(kernel: Any, capability: int, dtype: str, constants: dict[str, int], warps: int, stages: int) -> int:
    return int(compiled(kernel, capability, dtype, constants, warps, stages).metadata.shared)


def compile_prefill(capability: int, dtype: str, head_dim: int, group: int, block_size: int) -> dict[str, int]:
    config = paged_prefill.prefill_config(head_dim, ELEMENT_SIZE[dtype], block_size, hopper=capability == 90)
    constants = {"NUM_KV_HEADS": 8, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size, "SEQUENCES": 32}
    constants |= {"QUERIES": config.rows // group, "ROWS": config.rows, "KEYS": config.keys, "TMA": config.tma}
    program = compiled(
        paged_prefill._prefill_kernel,
        capability,
        dtype,
        constants if config.tma else constants | {"kv_boxes": None},
        config.num_warps,
        config.num_stages,
        config.max_registers,
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK"))
    return {"shared": program.metadata.shared, "registers": registers, "stack": stack}


def compile_all(capability: int, dtype: str, head_dim: int, group: int, block_size: int) -> dict[str, int]:
    size = ELEMENT_SIZE[dtype]
    pdl = int(capability >= 90)
    shape = {"NUM_KV_HEADS": 8, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size}
    decode = paged_decode.decode_config(head_dim, size)
    return {
        "decode": shared_memory(
            paged_decode._decode_kernel,
            capability,
            dtype,
            shape
            | {"QUERIES": 1, "ROWS": 16, "KEYS": decode.keys, "PDL": pdl}
            | {"LINES": max(1, head_dim * size // 128), "PREFETCHED": paged_decode.PREFETCHED_TILES},
            decode.num_warps,
            decode.num_stages,
        ),
        "plan": shared_memory(
            paged_decode._plan_kernel, capability, dtype, {"KEYS": decode.keys, "SEQUENCES": 512}, 4, 3
        ),
        "merge": shared_memory(
            paged_decode._merge_kernel,
            capability,
            dtype,
            {"NUM_HEADS": 8 * group, "HEAD_DIM": head_dim, "QUERIES": 1, "KEYS": decode.keys}
            | {"PARTS": paged_decode.MANY_PARTS, "PDL": pdl},
            1,
            3,
        ),
        "prefill": compile_prefill(capability, dtype, head_dim, group, block_size)["shared"],
    }


def compile_fused(capability: int, dtype: str, head_dim: int, group: int) -> dict[str, int]:
    """The kernels beside attention, for the shapes of Qwen3-0.6B."""
    pdl = {"PDL": int(capability >= 90)}

    def memory(kernel: Any, constants: dict[str, int], warps: int = 4, stages: int = 3) -> int:
        return shared_memory(kernel, capability, dtype, constants, warps, stages)

    parts = {"SIZE": 151936, "NUM_PARTS": 304, "PART": logprobs.PART, "SOME_ASK": 1} | pdl
    cells = {"SIZE": 151936, "NUM_CELLS": 4748, "CELL": threshold.CELL, "MASK": 4748} | pdl
    found = {
        "decode inputs": memory(decode_inputs._decode_inputs_kernel, {"BLOCK_SIZE": 256, "COLUMNS": 32}),
        "add and norm": memory(
            add_rms_norm._add_rms_norm_kernel, {"SIZE": 1024, "PADDED": 1024, "SPLITS": 3, "ADD": 1} | pdl,
        ),
        "gate": memory(silu_and_mul._silu_and_mul_kernel, {"SIZE": 3072, "BLOCK": silu_and_mul.BLOCK} | pdl),
        "norm, rope, write": memory(
            norm_rope_write._norm_rope_write_kernel,
            {"NUM_HEADS": 8 * group, "NUM_KV_HEADS": 8, "HALF": head_dim // 2, "NORM": 1}
            | {"HEADS": norm_rope_write.HEADS_PER_PROGRAM} | pdl,
            warps=2,
        ),
        "cells": memory(threshold._cells_kernel, cells | {"CELLS": threshold.CELLS}),
        "threshold": memory(
            threshold._threshold_kernel,
            cells | {"ALL_CELLS": 8192, "PARTS": 64, "ROOM": threshold.ROOM, "CHUNK": threshold.CHUNK}
            | {"TILE": threshold.TILE, "EDITS": 5889, "DRAW": 1, "FAST": 1},
            warps=8,
        ),
        "edits": memory(
            edits._edit_kernel,
            {"ROW": 151936, "IDS": 151936, "LIST": 5889, "WORDS": 4748, "KNOWN": 4097, "STOP_IDS": 130, "BIASED": 1024}
            | {"BAD_WORDS": 512, "BAD_TOKENS": 2048, "MASK": 4748, "TILE": edits.TILE} | pdl,
            warps=8,
        ),
        "restored": memory(edits._restore_kernel, {"ROW": 151936, "LIST": 5889, "TILE": edits.TILE} | pdl, warps=8),
        "logprobs of parts": memory(logprobs._parts_kernel, parts | {"PARTS": logprobs.PARTS}),
        "likeliest": memory(logprobs._tournament_kernel, parts | {"ALL_PARTS": 512}, warps=1),
        "best of row": memory(sample._best_of_row_kernel, {"RANKS": 2, "PARTS": 64} | pdl, warps=4),
    }  # fmt: skip
    for lists in (0, 1):  # of several ranks nobody has filters, masks and edits
        constants = {"MASK": 4748 * lists, "EDITS": 5889 * lists, "FILTERS": lists, "TILE": sample.TILE, "VECTOR": 8}
        constants |= {"ROW": 151936, "IDS": 151936, "FAST": 1} | pdl
        found[f"best of part {lists}"] = memory(sample._best_of_part_kernel, constants, warps=1)
    if dtype != "fp32":
        for name, inputs, outputs, gated, in_parts in SKINNY:
            for tokens in (16, 32):
                warps, columns = skinny_linear.NUM_WARPS, skinny_linear.num_columns(outputs, gated)
                inner = skinny_linear.inner_length(inputs)
                constants = {
                    "INPUTS": inputs,
                    "OUTPUTS": outputs,
                    "TOKENS": tokens,
                    "COLUMNS": columns,
                    "BIAS": 0,
                }
                constants |= {"INNER": inner, "STEPS": 1 if in_parts else inputs // inner, "GATED": int(gated)} | pdl
                constants["PARTS"] = warps
                found[f"{name} x {tokens}"] = memory(skinny_linear._skinny_linear_kernel, constants, warps)
        for kind, tokens, tile in tiles() if capability == 90 else ():
            constants = {"TOKENS": tokens, "COLUMNS": tile.columns, "INNER": tile.inner, "SWAPPED": int(tile.swapped)}
            constants |= {"GATED": int(kind == "gated"), "BIAS": 0, "LINES": 8, "LINE": 64} | pdl
            name = f"{kind} {tile} x {tokens}"
            found[name] = memory(tiled_linear._tiled_linear_kernel, constants, stages=tile.num_stages)
    return found


def tiles() -> set[tuple[str, int, tiled_linear.Tile]]:
    """Kind of the layer, the most tokens of a program and the tile, of every row of the table for any GPU."""
    return {
        (kind, min(tiled_linear.MAX_TILE, row.max_tokens), row.kernel.keywords["tile"])
        for (kind, _), rows in choice.ON_ANY_GPU.items()
        for row in rows
        if isinstance(row.kernel, partial)
    }


# inputs, outputs, gated, whether the result is in parts
SKINNY = [
    ("qkv", 1024, 4096, False, False),
    ("o", 2048, 1024, False, True),
    ("gate and up", 1024, 3072, True, False),
    ("down", 3072, 1024, False, True),
]

if __name__ == "__main__":
    arguments = [a for a in sys.argv[1:] if a != "--prefill"]
    found = {}
    for case in product(*(a.split(",") for a in arguments)):
        capability, head_dim, group, block_size = map(int, (case[0], *case[2:]))
        if "--prefill" in sys.argv:
            found[", ".join(case)] = compile_prefill(capability, case[1], head_dim, group, block_size)
        else:
            found[", ".join(case)] = compile_all(capability, case[1], head_dim, group, block_size)
            found[", ".join(case)] |= compile_fused(capability, case[1], head_dim, group)
    print(json.dumps(found))
