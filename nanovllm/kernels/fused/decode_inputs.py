"""The inputs of a decode step (token, slot, context length, block table of each row), looked up in one launch."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _decode_inputs_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, positions_ptr, token_ids_ptr, block_table_ptr, input_ids_ptr, slots_ptr, context_len_ptr, table_ptr,
    token_stride, num_columns, BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    row = tl.load(rows_ptr + n).to(tl.int64)
    position = tl.load(positions_ptr + n)
    block = tl.load(block_table_ptr + row * num_columns + position // BLOCK_SIZE).to(tl.int64)
    tl.store(input_ids_ptr + n, tl.load(token_ids_ptr + row * token_stride + position))
    tl.store(slots_ptr + n, block * BLOCK_SIZE + position % BLOCK_SIZE)
    tl.store(context_len_ptr + n, position + 1)
    last = position // BLOCK_SIZE
    column = tl.arange(0, COLUMNS)
    for start in range(0, last + 1, COLUMNS):
        used = start + column <= last
        blocks = tl.load(block_table_ptr + row * num_columns + start + column, mask=used)
        tl.store(table_ptr + n * num_columns + start + column, blocks, mask=used)


def decode_inputs(
    rows: Tensor, positions: Tensor, token_ids: Tensor, block_table: Tensor, block_size: int,
    input_ids: Tensor, slots: Tensor, context_len: Tensor, table: Tensor,
) -> None:  # fmt: skip
    """For rows [B] that decode at `positions` [B], both int32, fill in place:

    input_ids [B] int32: the token at that position, from `token_ids` [R, L] int32.
    slots [B] int64: where the token's key and value go, from `block_table` [R, M] int32.
    context_len [B] int32: position + 1.
    table [B, M] int32: the row's blocks, as far as they are used.
    """
    _decode_inputs_kernel[(rows.shape[0],)](
        rows, positions, token_ids, block_table, input_ids, slots, context_len, table,
        token_ids.stride(0), block_table.shape[1], BLOCK_SIZE=block_size, COLUMNS=32, num_warps=1,
    )  # fmt: skip
