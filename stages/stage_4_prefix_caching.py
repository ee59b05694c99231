"""Stage 4: prefix caching.

What hurt:    requests that open with the same long text (a system prompt, the chat so far) each compute it anew.
The idea:     a full block whose keys and values are computed is named by a hash of its tokens *and of everything before
              it*. A new sequence walks its prompt block by block; while the names are known, it shares the blocks (each
              has a reference count) and skips their computation. Blocks nobody uses stay in the free list with their
              contents, and are only forgotten when the oldest of them are handed out again (LRU).
Still hurts:  the batch is static. It ends when its slowest sequence ends, new requests wait for that, and every
              sequence reserves room for an output that it may never write. Stage 5 lets them come and go at every step.
"""

from array import array
from collections import deque
from dataclasses import dataclass

import xxhash
from torch import Tensor

from stages.core import Sequence
from stages.stage_3_paged_blocks import BlockPool, PagedEngine


@dataclass(frozen=True, eq=False)
class Content:
    """What a full, computed block holds: these tokens after that beginning. The digest only finds it.

    Equal contents are one and the same object, so that the object `parent` stands for the whole beginning.
    """

    digest: int  # chained: hash of the parent's digest and the tokens
    parent: "Content | None"  # what the block before it holds; None for the first
    token_ids: tuple[int, ...]

    def matches(self, parent: "Content | None", token_ids: tuple[int, ...]) -> bool:
        return self.parent is parent and self.token_ids == token_ids


def chained_digest(parent: int, tokens: tuple[int, ...]) -> int:
    """The name of a block: equal tokens after different beginnings have different keys and values, and names."""
    # exercise 4.1: xxhash.xxh64_intdigest over the parent's digest (8 bytes) followed by the token ids. An
    #   array("q", ...) has tobytes(); one byte for a token is not enough.
    ids = array("q", tokens)
    data = parent.to_bytes(8, "little") + ids.tobytes()
    return xxhash.xxh64_intdigest(data)
    # end exercise


class PrefixCachingPool(BlockPool):
    """Blocks with reference counts, and a map from the names of computed blocks to the blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.ref_counts = [0] * num_blocks
        self.contents: list[Content | None] = [None] * num_blocks
        self.block_by_digest: dict[int, int] = {}

    def find_prefix(self, seq: Sequence) -> list[int]:
        """The computed blocks that hold the beginning of `seq`, as far as they are known."""
        blocks: list[int] = []
        parent: Content | None = None
        # At least one token must be computed, or there would be no logits to sample from: hence the - 1
        for i in range((len(seq.token_ids) - 1) // self.block_size):
            tokens = tuple(seq.token_ids[i * self.block_size : (i + 1) * self.block_size])
            # exercise 4.2: the digest of these tokens after those of `parent` (0 if there is none), and the content
            #   found under it. Stop unless it matches parent and tokens: a digest can collide, and the wrong text is
            #   worse than a miss. Otherwise add its block, and go on with this content as the parent.
            digest = chained_digest(parent.digest if parent else 0, tokens)
            content = self.find(digest)
            if content is None or not content.matches(parent, tokens):
                break
            blocks.append(self.block_by_digest[digest])
            parent = content
            # end exercise
        return blocks

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Give `seq` blocks for its first `num_tokens` tokens, known ones first; or nothing, and return False.

        For a sequence without blocks, seq.num_computed becomes the number of tokens it need not compute.
        """
        shared = [] if seq.block_table else self.find_prefix(seq)
        missing = self.num_blocks_for(num_tokens) - len(seq.block_table) - len(shared)
        # A shared block that lies in the free list cannot be handed out as an empty one as well
        if missing > len(self.free_list) - sum(self.ref_counts[block] == 0 for block in shared):
            return False
        if not seq.block_table:
            seq.num_computed = len(shared) * self.block_size
        # exercise 4.3: take the shared blocks first (out of the free list, or they might be handed out as empty), then
        #   the missing ones from its front, forgetting what each held. Raise every reference count. The free list is
        #   stage 3's OrderedDict: pop(block, None) takes out a block, popitem(last=False) the pair (first block, None).
        for block in shared:
            self.free_list.pop(block, None)
        fresh = [self.free_list.popitem(last=False)[0] for _ in range(missing)]
        for block in fresh:
            self.forget(block)
        for block in shared + fresh:
            self.ref_counts[block] += 1
        # end exercise
        seq.block_table += shared + fresh
        return True

    def forget(self, block: int) -> None:
        """The block is about to be refilled: nobody may find its old content any more."""
        content = self.contents[block]
        if content is not None and self.block_by_digest.get(content.digest) == block:
            del self.block_by_digest[content.digest]
        self.contents[block] = None

    def publish(self, seq: Sequence) -> None:
        """Name the blocks of `seq` that are full and computed by now, so that others can find them."""
        num_full = seq.num_computed // self.block_size
        if num_full == 0 or self.contents[seq.block_table[num_full - 1]] is not None:
            return  # no block was filled since the last time
        parent: Content | None = None
        for i, block in enumerate(seq.block_table[:num_full]):
            content = self.contents[block]
            if content is None:
                content = self.describe(parent, tuple(seq.token_ids[i * self.block_size : (i + 1) * self.block_size]))
                self.contents[block] = content
                if self.find(content.digest) is not content:
                    self.block_by_digest[content.digest] = block
            parent = content

    def find(self, digest: int) -> Content | None:
        block = self.block_by_digest.get(digest)
        return self.contents[block] if block is not None else None

    def describe(self, parent: Content | None, tokens: tuple[int, ...]) -> Content:
        """The content of a block; the very same object where another block already holds the same."""
        digest = chained_digest(parent.digest if parent else 0, tokens)
        twin = self.find(digest)
        return twin if twin is not None and twin.matches(parent, tokens) else Content(digest, parent, tokens)

    def release(self, seq: Sequence) -> list[int]:
        """Give back the blocks of `seq`; returns those that are free now. Their contents stay until they are reused."""
        freed = []
        # exercise 4.4: lower the count of every block; one that reaches 0 goes to the end of the free list (where a new
        #   key of an OrderedDict stands). Go from the last block to the first: the end of a text is evicted before its
        #   beginning, since it is no use without it.
        for block in reversed(seq.block_table):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_list[block] = None
                freed.append(block)
        # end exercise
        seq.block_table = []
        return freed


class PrefixCachingEngine(PagedEngine):
    """Stage 3 with a pool that remembers. The cache outlives a call of `generate`."""

    pool: PrefixCachingPool

    def make_pool(self, num_blocks: int, block_size: int) -> PrefixCachingPool:
        return PrefixCachingPool(num_blocks, block_size)

    def start_batch(self, waiting: deque[Sequence]) -> list[Sequence]:
        """Admit and prefill one sequence after the other, so that the second finds what the first computed."""
        running: list[Sequence] = []
        while waiting and len(running) < self.max_num_seqs and self.admit(waiting[0]):
            seq = waiting.popleft()
            logits = self.step([(seq, seq.num_prompt_tokens - seq.num_computed)])
            running += self.append_sampled([seq], logits)
        return running

    def step(self, work: list[tuple[Sequence, int]]) -> Tensor:
        logits = super().step(work)
        for seq, _ in work:
            self.pool.publish(seq)  # after the step, not before: only now do the blocks hold what their names say
        return logits
