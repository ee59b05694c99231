"""Paged KV memory with a prefix cache: which blocks are free, shared, or findable by their content.

PagedAttention (Kwon et al. 2023) for the block table; hashing full blocks for reuse as in vLLM's prefix cache.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

import xxhash

from nanovllm.engine.sequence import Content, Sequence


def packed(token_ids: SequenceOf[int]) -> bytes:
    """Token ids as bytes, 8 for each, so that no id is cut short."""
    return array("q", token_ids).tobytes()


def chained_digest(parent: bytes, tokens: bytes) -> bytes:
    """Digest of a block of packed tokens that follows the text of digest `parent`."""
    return bytes(xxhash.xxh3_128_digest(parent + tokens))


def root_digest(cache_salt: str | None) -> bytes:
    """What the first block is chained to, so that different salts lead to different digests."""
    return b"" if cache_salt is None else bytes(xxhash.xxh3_128_digest(cache_salt.encode(errors="surrogatepass")))


class BlockManager:
    """Hands out the blocks 0 .. num_blocks - 1 of the KV pool. An operation takes time only for what it changes.

    window: keys that a query sees at most in any layer, its own included; 0: some layer sees the whole text.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, window: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.window = window
        self.ref_counts = [0] * num_blocks  # block tables that contain the block
        # Least recently used first. A free block keeps its content until it is taken again.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.contents: list[Content | None] = [None] * num_blocks
        self.block_by_digest: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self.free)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: Sequence) -> list[int]:
        """The blocks that hold the beginning of `seq`, as far as it is cached. Changes nothing but its digests.

        What is still to be scored must be computed, so nothing is found beyond the tokens that were scored.
        """
        blocks: list[int] = []
        if not self.enable_prefix_caching:
            return blocks
        parent = None
        # At least one token is always computed, or there would be no logits to sample from: hence the - 1.
        longest = seq.num_scored if seq.num_scored < seq.num_to_score else len(seq.token_ids) - 1
        for i in range(longest // self.block_size):
            tokens = self._tokens(seq, i)
            block = self.block_by_digest.get(self._digest(seq, i, tokens))
            content = None if block is None else self.contents[block]
            if block is None or content is None or not content.matches(parent, tokens, seq.cache_salt):
                break
            blocks.append(block)
            parent = content
        return blocks

    def num_needed(self, num_tokens: int, cached: list[int]) -> int:
        """How many free blocks it takes to hold `num_tokens`, the first of which are in the blocks `cached`.

        A cached block that no sequence uses is in the free list, so it counts as one of them.
        """
        return self.num_blocks_for(num_tokens) - sum(self.ref_counts[block] > 0 for block in cached)

    def share(self, seq: Sequence, cached: list[int]) -> None:
        """Start the empty block table of `seq` with what `find_prefix` found. Called before any `grow`, which might
        evict these very blocks."""
        for block in cached:
            self.free.pop(block, None)
            self.ref_counts[block] += 1
        seq.block_table = list(cached)
        seq.num_unseen = 0
        seq.num_published = len(cached)
        seq.content = self.contents[cached[-1]] if cached else None

    def grow(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Append blocks until the table holds `num_tokens` tokens; returns them. The caller made sure they are free."""
        taken = [self._take() for _ in range(self.num_blocks_for(num_tokens) - len(seq.block_table))]
        seq.block_table += taken
        return taken

    def publish(self, seq: Sequence, num_computed: int) -> list[int]:
        """Make the full blocks among the first `num_computed` tokens findable. Called when a step is committed, since
        only then are ids known and KV written. Returns the indices of the blocks that had no findable equal yet."""
        new: list[int] = []
        if not self.enable_prefix_caching:
            return new
        for i in range(seq.num_published, num_computed // self.block_size):
            tokens = self._tokens(seq, i)
            digest = self._digest(seq, i, tokens)
            twin = self.block_by_digest.get(digest)
            content = None if twin is None else self.contents[twin]
            if content is None or not content.matches(seq.content, tokens, seq.cache_salt):
                if twin is not None:  # other tokens by a collision, or the same ones after a beginning that is gone
                    self._forget(twin)
                content = Content(digest, seq.content, tokens, seq.cache_salt)
                self.contents[seq.block_table[i]] = content
                self.block_by_digest[digest] = seq.block_table[i]
                new.append(i)
            seq.content = content
            seq.num_published = i + 1
        return new

    def release(self, seq: Sequence, keep_cached: bool = True, num_kept: int = 0) -> list[int]:
        """Give back the blocks of `seq` after the first `num_kept`; returns those that are free now. With
        `keep_cached` their content stays findable until they are taken again.

        From the last block to the first: the end of a text is useless without its beginning, and is evicted first.
        """
        if not keep_cached:
            for digest in seq.digests[: seq.num_unseen]:
                if digest in self.block_by_digest:
                    self._forget(self.block_by_digest[digest])
        freed = self._give_back(seq.block_table[max(num_kept, seq.num_unseen) :], keep_cached)
        del seq.block_table[num_kept:]
        return freed

    def release_unseen(self, seq: Sequence) -> list[int]:
        """Give back the leading blocks of `seq` that no window reaches any more; returns those that are free now.

        They keep their places in the block table, where nobody looks at them, and can be found until they are taken. A
        block that is not published yet has to wait: if another sequence took it, it could not be published any more.
        """
        first_seen = seq.num_computed + 1 - self.window  # by the next token to compute
        num_unseen = max(seq.num_unseen, first_seen // self.block_size)
        if self.enable_prefix_caching:
            num_unseen = min(num_unseen, seq.num_published)
        unseen, seq.num_unseen = seq.block_table[seq.num_unseen : num_unseen], num_unseen
        return self._give_back(unseen, keep_cached=True)

    def _give_back(self, blocks: list[int], keep_cached: bool) -> list[int]:
        freed = []
        for block in reversed(blocks):
            if not keep_cached:
                self._forget(block)
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                freed.append(block)
                self.free[block] = None
                if self.contents[block] is None:  # nothing is lost with it
                    self.free.move_to_end(block, last=False)
        return freed

    def _take(self) -> int:
        block, _ = self.free.popitem(last=False)
        self._forget(block)
        self.ref_counts[block] = 1
        return block

    def _forget(self, block: int) -> None:
        """From now on this block cannot be found by its content."""
        content = self.contents[block]
        if content is not None:
            del self.block_by_digest[content.digest]
            self.contents[block] = None

    def _tokens(self, seq: Sequence, i: int) -> bytes:
        return packed(seq.token_ids[i * self.block_size : (i + 1) * self.block_size])

    def _digest(self, seq: Sequence, i: int, tokens: bytes) -> bytes:
        """The digest of block `i`, which holds `tokens`; the digests of all blocks before it exist."""
        if i == len(seq.digests):
            parent = seq.digests[-1] if seq.digests else root_digest(seq.cache_salt)
            seq.digests.append(chained_digest(parent, tokens))
        return seq.digests[i]
