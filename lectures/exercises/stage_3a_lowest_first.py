"""Exercise 3a: Hand out the lowest free block first, and see how much memory was never touched.

Stage 3's free list is a queue: the block that has been free for longest goes first. In time every block of the pool is
touched, however few are in use at once. If the lowest number goes first instead, the upper part of the pool stays
untouched, and could be given to somebody else (another model on the same GPU, say).

Write `allocate` and `release` of `LowestFirstPool`: the same promises as stage 3's (all or nothing; blocks that a
sequence has already stay in front), another choice. A block must be found in less time than it takes to look at the
whole pool: a heap (`heapq`) does it.

What can you promise about the highest block ever used? The check holds you to it: it is the most blocks that were ever
in use at once, minus one.

Check: .venv/bin/python -m tools.lectures.lecture_exercises 3a
"""

from stages.core import Sequence
from stages.stage_3_paged_blocks import BlockPool, PagedEngine


class LowestFirstPool(BlockPool):
    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.free = list(range(num_blocks))  # in order, so it is a heap already

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        return super().allocate(seq, num_tokens)  # yours to write, with self.free

    def release(self, seq: Sequence) -> list[int]:
        return super().release(seq)  # yours to write


class LowestFirstEngine(PagedEngine):
    def make_pool(self, num_blocks: int, block_size: int) -> LowestFirstPool:
        return LowestFirstPool(num_blocks, block_size)
