"""Solution of exercise 3a. A block is handed out only while all below it are in use, hence the promise."""

from heapq import heappop, heappush

from stages.core import Sequence
from stages.stage_3_paged_blocks import BlockPool, PagedEngine


class LowestFirstPool(BlockPool):
    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.free = list(range(num_blocks))  # in order, so it is a heap already

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        # exercise 3a: the lowest free blocks, or none
        # instead: return super().allocate(seq, num_tokens)  # yours to write, with self.free
        missing = self.num_blocks_for(num_tokens) - len(seq.block_table)
        if missing > len(self.free):
            return False
        seq.block_table += [heappop(self.free) for _ in range(missing)]
        return True
        # end exercise

    def release(self, seq: Sequence) -> list[int]:
        # exercise 3a: all blocks of the sequence back into self.free
        # instead: return super().release(seq)  # yours to write
        freed, seq.block_table = seq.block_table, []
        for block in freed:
            heappush(self.free, block)
        return freed
        # end exercise


class LowestFirstEngine(PagedEngine):
    def make_pool(self, num_blocks: int, block_size: int) -> LowestFirstPool:
        return LowestFirstPool(num_blocks, block_size)
