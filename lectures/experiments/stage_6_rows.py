"""Three requests in a batch of four rows, as they lie in the input memory of stage 6: one line a row."""

import torch

from stages.core import make_sequences
from stages.stage_4_prefix_caching import PrefixCachingPool
from stages.stage_6_cuda_graphs import Rows
from tools.pictures.three_requests import BLOCK_SIZE, NUM_BLOCKS, three_requests

BUCKET, TABLE = 4, 6  # rows, blocks in a table

sequences = make_sequences(*three_requests(), vocab_size=4096, max_model_len=2048)
pool = PrefixCachingPool(NUM_BLOCKS, BLOCK_SIZE)
for seq in sequences:
    pool.allocate(seq, len(seq.token_ids))
rows = Rows.of(torch.zeros(BUCKET * (5 + TABLE), dtype=torch.int64), BUCKET)
rows.fill(sequences, BLOCK_SIZE, scratch_block=NUM_BLOCKS)
print("         id pos slot len blocks")
names = [f"row {i}" for i in range(len(sequences))] + ["padding"] * (BUCKET - len(sequences))
fields = (rows.input_ids, rows.positions, rows.slots, rows.context_lens, rows.block_tables)
for name, token, position, slot, length, table in zip(names, *(f.tolist() for f in fields), strict=True):
    print(f"{name:7} {token:3} {position:3} {slot:4} {length:3} {' '.join(map(str, table))}")
